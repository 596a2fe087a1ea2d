#!/usr/bin/env bash
# Learner and rollout servers on a Slurm cluster. Edit the lines that begin with #SBATCH and the three settings below,
# then:
#
#     sbatch launch/slurm.sh CONFIG.yaml [key=value ...]
#
# The first SERVER_NODES nodes serve rollouts, the others train; torchrun meets on the first training node. The run's
# folder, the checkpoint and CONFIG must be on a file system that all nodes share.
#
# Submit the same command again after whatever ended the job: it goes on from the newest checkpoint. With --requeue
# Slurm does so itself.
#
#SBATCH --job-name=moe-trm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the end, the learner finishes its update and saves.
#SBATCH --signal=B:TERM@300

set -euo pipefail

SERVER_NODES=${SERVER_NODES:-1}
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
PORT=${PORT:-30100}

config=$1
shift

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
servers=("${nodes[@]:0:SERVER_NODES}")
learners=("${nodes[@]:SERVER_NODES}")
join() { local IFS=,; echo "$*"; }

# rollout.trusted_network=true: the nodes of the job talk with each other in the clear (SECURITY.md).
# One key for this job, in the environment only: it is neither on a command line nor in a file.
MOE_TRM_API_KEY=$(openssl rand -hex 32)
export MOE_TRM_API_KEY
# Training ranks of one node share its cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A fresh store for ranks that are started again: the old one still has the addresses of those that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Ranks that were asked to stop may take this many seconds to finish their update and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}

srun --nodes="${#servers[@]}" --ntasks="${#servers[@]}" --nodelist="$(join "${servers[@]}")" \
    python -m launch.rollout "$config" "$@" rollout.trusted_network=true \
    rollout.server.host=0.0.0.0 "rollout.server.port=$PORT" &
server_step=$!

urls=$(join "${servers[@]/#/http://}")
urls="[${urls//,/:$PORT,}:$PORT]"
srun --job-name=learner --nodes="${#learners[@]}" --ntasks="${#learners[@]}" --nodelist="$(join "${learners[@]}")" \
    python -m torch.distributed.run \
    --nnodes "${#learners[@]}" --nproc-per-node "$RANKS_PER_NODE" --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${learners[0]}:29400" \
    -m launch.train "$config" "$@" rollout.trusted_network=true "rollout.urls=$urls" &
learner_step=$!

# The batch script gets the signal, and passes it on to the processes of the learner's step. srun would kill the step.
# shellcheck disable=SC2329 # the trap calls it
stop_learner() {
    local step
    step=$(squeue --steps --noheader --jobs "$SLURM_JOB_ID" --format '%i %j' | awk '$2 == "learner" { print $1 }')
    if [[ -n "$step" ]]; then
        scancel --signal=TERM "$step"
    else
        kill -TERM "$learner_step" # it has not begun
    fi
}
trap stop_learner TERM INT
status=0
wait $learner_step || status=$?
# A trapped signal ends the first wait before the learner is done.
if kill -0 $learner_step 2>/dev/null; then
    status=0
    wait $learner_step || status=$?
fi
kill -TERM $server_step 2>/dev/null || true
wait $server_step || true
exit $status
