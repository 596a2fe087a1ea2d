"""The GPUs of one machine, shared out between rollout servers and learner ranks from the configuration alone.

The planner counts by this rule and the launchers place by it. torchrun numbers its ranks from 0, and rank r computes on
GPU r. So the learner has the first GPUs and the servers have the last ones, each its own. With `rollout.colocate` both
begin at the first GPU, on purpose. Importing this module imports no torch.
"""

from __future__ import annotations

import argparse
import urllib.parse
from dataclasses import dataclass

from moe_trm.config.schema import RolloutConfig
from moe_trm.errors import ConfigError
from moe_trm.runtime.addresses import is_loopback


@dataclass(frozen=True)
class Placement:
    """GPUs by their number on the machine.

    Attributes:
        servers: of each server.
        learner: free for learner ranks.
    """

    servers: tuple[range, ...]
    learner: range


def place(
    num_gpus: int, server_gpus: int, *, num_servers: int = 1, num_ranks: int = 0, shared: bool = False
) -> Placement:
    """The GPUs of each side.

    Args:
        num_gpus: of the machine.
        server_gpus: of one server (`gpus_of`).
        num_servers: on this machine.
        num_ranks: learner ranks on this machine; 0: unknown, or none.
        shared: both sides compute on the same GPUs in turn.

    Raises:
        ConfigError: the machine has too few.
    """
    serving = server_gpus * num_servers
    needed = max(serving, num_ranks) if shared else serving + num_ranks
    if needed > num_gpus:
        sides = f"{num_servers} rollout server{'s' * (num_servers > 1)} of {server_gpus} and {num_ranks} learner ranks"
        raise ConfigError(
            "too few GPUs on this machine",
            where="rollout.server.tensor_parallel and the learner ranks of the machine",
            got=f"{num_gpus} GPUs, {sides}{', which share them' * shared}",
            expected=f"{needed} GPUs",
            fix="Choose a smaller rollout.server.tensor_parallel or fewer ranks (--nproc-per-node), set "
            "rollout.colocate=true so that both sides share the GPUs, or take servers elsewhere (rollout.urls). "
            "CUDA_VISIBLE_DEVICES hides GPUs that it does not name.",
        )
    if shared:
        starts = [number * server_gpus for number in range(num_servers)]
    else:
        starts = [num_gpus - (number + 1) * server_gpus for number in range(num_servers)]
    servers = tuple(range(start, start + server_gpus) for start in starts)
    return Placement(servers, range(num_gpus if shared else num_gpus - serving))


def gpus_of(rollout: RolloutConfig) -> int:
    """GPUs of one server on one machine: its tensor-parallel ranks, times its replicas and pipeline stages.

    These are options of SGLang and vLLM, which spell them alike. Replicas of attention alone share the tensor-parallel
    ranks. 0 for a server on the CPU.
    """
    if rollout.server.device == "cpu":
        return 0
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("--dp-size", "--dp", "--data-parallel-size", "-dp", dest="replicas", type=int, default=1)
    options.add_argument("--pp-size", "--pipeline-parallel-size", "-pp", dest="stages", type=int, default=1)
    options.add_argument("--nnodes", dest="machines", type=int, default=1)
    options.add_argument("--enable-dp-attention", dest="share", action="store_true")
    try:
        sizes, _ = options.parse_known_args(rollout.server.extra_args)
    except argparse.ArgumentError as error:
        raise ConfigError(
            "an argument of the rollout server cannot be read",
            where="rollout.server.extra_args",
            got=str(error),
            expected="a number",
        ) from error
    ranks = rollout.server.tensor_parallel * sizes.stages * (1 if sizes.share else sizes.replicas)
    return int(-(-ranks // sizes.machines))


def servers_here(rollout: RolloutConfig, port: int) -> tuple[int, int]:
    """Servers of the run on this machine, and the number of the one at `port`: by its place in `rollout.urls`."""
    urls = [urllib.parse.urlsplit(url) for url in rollout.urls]
    ports = [url.port for url in urls if is_loopback(url.hostname or "")]
    return (len(ports), ports.index(port)) if port in ports else (1, 0)
