"""GPUs of a run: which serve, which train, and how many servers their memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_trm.config.schema import RolloutConfig
from moe_trm.errors import ConfigError
from moe_trm.rollout.servers.placement import gpus_of, place
from moe_trm.tools.plan.gpus import Gpu
from moe_trm.tools.plan.parameters import Model
from moe_trm.tools.plan.speed import cache_bytes

SERVER_SHARE = 0.9
"""Share of a GPU's memory that a server's weights and cache may take; the rest is for activations and graphs."""


@dataclass(frozen=True)
class Cluster:
    """The machine.

    Attributes:
        nodes, gpus: nodes, and GPUs of each.
        gpu: one of them.
        server_nodes: nodes that serve only (`SERVER_NODES` of `launch/slurm.sh`).
    """

    nodes: int
    gpus: int
    gpu: Gpu
    server_nodes: int

    def split(self, rollout: RolloutConfig) -> tuple[int, int]:
        """GPUs that serve and GPUs that train.

        With `rollout.colocate` all do both. On one node there is one server, and the launcher's rule places it.

        Raises:
            ConfigError: nothing is left to train on.
        """
        total = self.nodes * self.gpus
        if self.nodes == 1:
            placed = place(self.gpus, gpus_of(rollout), num_ranks=1, shared=rollout.colocate)
            return total if rollout.colocate else sum(map(len, placed.servers)), len(placed.learner)
        if rollout.colocate:
            return total, total
        serving = self.server_nodes * self.gpus
        if not 0 < serving < total:
            raise ConfigError(
                "no GPUs are left for one side",
                where="--nodes, --gpus, --server-nodes",
                got=f"{serving} of {total} GPUs serve",
                expected=f"1 to {total - 1}",
                fix="Take more nodes, fewer --server-nodes, a smaller rollout.server.tensor_parallel, "
                "or rollout.colocate=true.",
            )
        return serving, total - serving


@dataclass(frozen=True)
class Serving:
    """The servers that fit.

    Attributes:
        gpus: of one server.
        servers: their number.
        bytes_per_gpu: weights and cache, and what a learner keeps there.
        fits: within `SERVER_SHARE` of a GPU.
        smallest_gpus: fewest GPUs (a power of two) whose memory holds weights and cache; None: more than there are.
    """

    gpus: int
    servers: int
    bytes_per_gpu: float
    fits: bool
    smallest_gpus: int | None


def serving(
    rollout: RolloutConfig, model: Model, hf: Mapping[str, Any], cluster: Cluster, gpus: int, held: float = 0.0
) -> Serving:
    """The servers on `gpus` GPUs, with `rollout.server.max_total_tokens` of cache each.

    The engine holds 16-bit weights without the MTP layers; experts, attention and vocabulary are shared by its GPUs. A
    vision tower is whole on each. `held`: bytes that a learner keeps on the same GPU meanwhile.
    """
    server = rollout.server

    def needed(size: int) -> float:
        return held + 2 * (model.total() / size + model.vision) + server.max_total_tokens * cache_bytes(hf, size)

    room = SERVER_SHARE * cluster.gpu.memory_gb * 1e9
    sizes = [2**power for power in range(gpus.bit_length())]
    gpus_per_server = server.tensor_parallel
    return Serving(
        gpus_per_server,
        max(1, gpus // gpus_per_server),
        needed(gpus_per_server),
        needed(gpus_per_server) <= room and gpus_per_server <= gpus,
        next((size for size in sizes if needed(size) <= room), None),
    )
