"""Plans for real models on 1 to 32 nodes of H100, and predictions against what others report.

`python -m benchmarks.plan_public [--models M ...] [--nodes N ...] [--json FILE]`. Nothing runs but the planner.

Reported seconds come from NVIDIA's NeMo AutoModel for pre-training in bfloat16 on H100 (2026-04-17, its page
docs/performance-summary.md). Tokens of pre-training are trained once: 6 operations each, no pass of log-probs.

Reported memory of hosts is of slime with CPU Adam: its issue 1851 (Ray's GB are GiB), and its example of DeepSeek-R1,
as vime keeps it. Beside an optimizer that sources keep copies of a rank's weights and gradients: the policy's and the
reference's weights (`TensorBackuper`), and until its pull requests 1924 and 1952 the copies of torch_memory_saver.

Set-ups of others are slime's scripts run-qwen3-30B-A3B.sh and run-glm4.7-355B-A32B.sh, and verl's
run_deepseek671b_math_megatron_80gb.sh. Both sides share all GPUs there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.config.load import load
from moe_trm.config.schema import Config
from moe_trm.learner.megatron.stages import balanced
from moe_trm.tools.plan.build import Assumptions, Plan, Work, build
from moe_trm.tools.plan.cluster import Cluster
from moe_trm.tools.plan.commands import PUBLISHED, SIGMA, WORKLOAD
from moe_trm.tools.plan.exchange import exchange_seconds
from moe_trm.tools.plan.gpus import gpu_of
from moe_trm.tools.plan.lengths import log_normal
from moe_trm.tools.plan.memory import rank_elements, stepped_elements
from moe_trm.tools.plan.parameters import model_of
from moe_trm.tools.plan.search import layouts, search, with_servers
from moe_trm.tools.plan.speed import Efficiency, anchor_passes, train_seconds

MODELS = ("qwen3_30b_a3b", "glm_4_5_air", "glm_4_5", "deepseek_v3", "kimi_k2")
NODES = (1, 2, 4, 8, 16, 32)
H100 = gpu_of("h100")


class Reported(NamedTuple):
    """A run of pre-training: its step in samples of 4,096 tokens, and the figures that were printed."""

    model: str
    gpus: int
    samples: int
    pipeline: int
    expert: int
    seconds: float
    tflops: float


PRE_TRAINING = (
    Reported("qwen3_30b_a3b", 8, 512, 1, 8, 21.773, 277),
    Reported("deepseek_v3", 256, 512, 4, 64, 8.18, 250),
    Reported("deepseek_v3", 1024, 8192, 4, 64, 37.87, 216),
    Reported("kimi_k2", 256, 512, 8, 32, 8.86, 189),
)
COPIES = 2 + 2 + 2 + 4
"""Bytes of copies for each number that a rank of slime holds: policy, reference, saver's weights and gradients."""
HOSTS = (
    ("qwen3_30b_a3b", 1, "slime, out of memory at 1 TB", "tensor=4 expert=8", 8 * 102.4 * 1.0737),
    ("deepseek_v3", 16, "vime, 1.4 to 1.5 TB", "tensor=8 pipeline=4 context=4 expert=32 last_stage_layers=13", 1450),
)


class SetUp(NamedTuple):
    """A run of others: its layout, GPUs of a server, lengths and samples of a step."""

    model: str
    source: str
    nodes: int
    layout: str
    server: int
    tokens: int
    workload: str


SET_UPS = (
    SetUp("qwen3_30b_a3b", "slime", 1, "tensor=4 expert=8", 8, 20480,
          "rollout.prompts_per_step=32 rollout.max_new_tokens=8192 learner.minibatches=1"),
    SetUp("glm_4_5", "slime", 8, "tensor=8 pipeline=4 context=2 expert=16", 32, 32768,
          "rollout.prompts_per_step=128 rollout.max_new_tokens=32768 learner.minibatches=1"),
    SetUp("deepseek_v3", "verl", 32, "pipeline=16 expert=16 first_stage_layers=4 last_stage_layers=1", 32, 6144,
          "rollout.prompts_per_step=512 rollout.group_size=4 rollout.max_new_tokens=4096 learner.minibatches=4"),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--models", nargs="*", default=MODELS, help=f"names (default: {' '.join(MODELS)})")
    parser.add_argument("--nodes", nargs="*", type=int, default=NODES, help="of 8 GPUs (default: 1 2 4 8 16 32)")
    args = parser.parse_args(argv)
    rows = [planned(model, nodes) for model in args.models for nodes in args.nodes]
    rows += [pre_trained(reported) for reported in PRE_TRAINING]
    rows += [set_up(setup) for setup in SET_UPS]
    report("Plans, and predictions against reports", [*rows, *hosts()], args.json)
    return 0


def work_of(model: str, config: Config) -> Work:
    """Answers of a quarter of the longest in the median, prompts of 512 tokens, and the planner's assumed speeds."""
    longest = config.rollout.max_new_tokens
    lengths = log_normal(longest / 4, SIGMA, longest, 512)
    hf = json.loads((PUBLISHED / f"{model}.json").read_text(encoding="utf-8"))
    return Work(hf, Assumptions(Efficiency(), lengths, 3.3, 4.0), model)


def planned(model: str, nodes: int) -> Row:
    """The best plan of a search, and the seconds that it took."""
    config, began = load(WORKLOAD), time.process_time()
    result = search(config, work_of(model, config), Cluster(nodes, 8, H100, 1))
    row: Row = {"model": model, "nodes": nodes, "searched, s": round(time.process_time() - began, 1)}
    if not result.plans:
        return row | {"best plan": result.why, "step, s": "-", "learner, GB": "-", "server, GB": "-", "plans": 0}
    best = result.plans[0]
    return row | {
        "best plan": layout_of(best),
        "step, s": round(best.configured.timeline.step_s, 1),
        "learner, GB": round(best.layout.total / 1e9, 1),
        "server, GB": round(best.serving.bytes_per_gpu / 1e9, 1),
        "plans": len(result.plans),
    }


def layout_of(plan: Plan) -> str:
    """A plan in short: servers, learner, memory savers."""
    sizes, learner = plan.layout.parallel, plan.config.learner
    shape = "x".join(str(size) for size in (sizes.tensor, sizes.pipeline, sizes.context, sizes.expert))
    serves = "all GPUs" if plan.config.rollout.colocate else f"{plan.serving.servers * plan.serving.gpus} GPUs"
    savers = f"{learner.recompute}{', host' if learner.offload_optimizer else ''}"
    return f"{plan.serving.servers}x{plan.serving.gpus} on {serves}; {plan.ranks} train {shape}; {savers}"


def pre_trained(reported: Reported) -> Row:
    """Predicted seconds of a reported step."""
    settings = ["rollout.max_new_tokens=4096", "learner.minibatches=1", f"learner.parallel.expert={reported.expert}"]
    hf = work_of(reported.model, load(WORKLOAD)).hf
    model, tokens, efficiency = model_of(hf), reported.samples * 4096.0, Efficiency()
    uneven = []
    if len(model.layers) % reported.pipeline:
        uneven = [f"learner.parallel.pipeline_layout='{balanced(len(model.layers), reported.pipeline)}'"]
    config = load(WORKLOAD, [*settings, f"learner.parallel.pipeline={reported.pipeline}", *uneven])
    # Virtual stages of the reports keep the wait short: it is left out, as the pass of log-probs is.
    seconds = train_seconds(model, hf, load(WORKLOAD, settings), H100, reported.gpus, tokens, 4096, efficiency)
    seconds *= 3 / (3 + anchor_passes(config, 0.0))
    seconds += exchange_seconds(model, hf, config, H100, 8, reported.gpus, tokens, efficiency)
    return {
        "pre-training": reported.model,
        "GPUs": reported.gpus,
        "reported, s": reported.seconds,
        "predicted, s": round(seconds, 2),
        "off": f"{seconds / reported.seconds - 1:+.0%}",
        "reported MFU": f"{reported.tflops / H100.tflops:.0%}",
        "assumed": f"{efficiency.train_flops:.0%}",
    }


def set_up(setup: SetUp) -> Row:
    """A layout of others by the planner, beside the best plan of a search for their workload on their machine."""
    parallel = [f"learner.parallel.{size}" for size in setup.layout.split()]
    shared = ["rollout.colocate=true", f"rollout.server.tensor_parallel={setup.server}", "pipeline.mode=sync"]
    savers = ["learner.offload_optimizer=true", "learner.recompute=full", f"learner.micro_batch_tokens={setup.tokens}"]
    config = load(WORKLOAD, [*setup.workload.split(), *parallel, *shared, *savers])
    work, cluster = work_of(setup.model, config), Cluster(setup.nodes, 8, H100, 1)
    model, gpus = work.model(config), cluster.nodes * cluster.gpus
    held = build(config, work, cluster).layout.resident
    served = with_servers(config, model, work, cluster, gpus, setup.server, held)
    plan = build(config if served is None else served[1], work, cluster)
    sizes = config.learner.parallel
    named = (sizes.tensor, sizes.pipeline, sizes.context, sizes.expert)
    tried = {
        (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
        for parallel, _ in layouts(config, work.hf, gpus, cluster.gpus)
    }
    best = search(load(WORKLOAD, setup.workload.split()), work, cluster).plans
    return {
        "set-up of others": setup.model,
        "nodes": setup.nodes,
        "by": setup.source,
        "layout": "x".join(map(str, named)),
        "searched": "yes" if named in tried else "no",
        "a rank, GB": round(plan.layout.total / 1e9, 1),
        "fits": "yes" if plan.layout.total <= plan.room and served is not None else "no",
        "step, s": round(plan.configured.timeline.step_s, 1),
        "best plan": layout_of(best[0]) if best else "none",
        "its step, s": round(best[0].configured.timeline.step_s, 1) if best else "-",
    }


def hosts() -> Iterator[Row]:
    """Host memory of a node with CPU Adam: 16 bytes for each number that is stepped, and the framework's copies."""
    for name, nodes, source, layout, reported in HOSTS:
        settings = [f"learner.parallel.{size}" for size in layout.split()]
        config = load(WORKLOAD, ["learner.offload_optimizer=true", *settings])
        model, world = model_of(work_of(name, config).hf), 8 * nodes
        stages = range(config.learner.parallel.pipeline)
        needed = [
            (
                16 * stepped_elements(model, config.learner, world, stage),
                COPIES * sum(rank_elements(model, config.learner.parallel, stage)),
            )
            for stage in stages
        ]
        optimizer, copies = max(needed, key=sum)
        predicted = 8 * (optimizer + copies) / 1e9
        yield {
            "host of a node": name,
            "nodes": nodes,
            "reported by": source,
            "reported, GB": round(reported),
            "optimizer, GB": round(8 * optimizer / 1e9),
            "with copies, GB": round(predicted),
            "off": f"{predicted / reported - 1:+.0%}",
        }


if __name__ == "__main__":
    sys.exit(main())
