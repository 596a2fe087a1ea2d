"""A learner on one GPU in this process, and what it says of the same work as in the tests without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from moe_trm.learner.protocol import Learner, UpdateResult
from moe_trm.sync.rounding import Rounding
from routing.record.sources import Native, ReplayRecords
from tests.integration.learner_support.conformance import build, work
from tests.integration.learner_support.work import objective


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    torch.cuda.set_device(0)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # as torchrun's, which DeepSpeed reads
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        from moe_trm.learner.megatron.build import close_learner

        close_learner()


class Trial:
    """One learner, what it scored, and its first step.

    Args:
        checkpoint: Hugging Face folder.
        folder: for exports.
        options: as of `learner_support.conformance.build`.
    """

    def __init__(self, checkpoint: Path, folder: Path, **options: str) -> None:
        self.learner: Learner = build(str(checkpoint), {"backend": "megatron", **options})
        self._folder = folder
        self.batches, self.routes, _ = work(self.learner)
        self.start = self.export("start")
        self.native = self.score([Native()] * len(self.batches))
        self.replayed = self.score(self.routes)

    def score(self, sources: list[Any]) -> Tensor:
        """Log-probs of all scored tokens, `[N]` on the CPU."""
        scores = self.learner.score(self.batches, sources)
        pairs = zip(scores, self.batches, strict=True)
        return torch.cat([score.logprobs.cpu()[batch.mask] for score, batch in pairs])

    def update(self, sources: list[ReplayRecords] | None = None) -> tuple[UpdateResult, Tensor]:
        """A step on replayed routes; the log-probs it saw, `[N]`."""
        seen: list[Tensor] = []
        result = self.learner.update(self.batches, sources or self.routes, objective(self.batches, seen))
        pairs = zip(seen, self.batches, strict=True)
        return result, torch.cat([values.cpu()[batch.mask] for values, batch in pairs])

    def export(self, name: str) -> dict[str, Tensor]:
        """The present weights in Hugging Face form and float32."""
        self.learner.export_shard(str(self._folder / name), Rounding("float32"))
        return load_file(next((self._folder / name).glob("*.safetensors")))

    def moved(self) -> Tensor:
        """The change of all weights by the steps so far, flat."""
        now = self.export("now")
        return torch.cat([(now[name] - self.start[name]).flatten() for name in sorted(now)]).double()


def k3(log_ratio: Tensor) -> float:
    """Mean of e^x - 1 - x."""
    x = log_ratio.double()
    return float((torch.expm1(x) - x).mean())


def relative(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of `expected`."""
    return float((got - expected).norm() / expected.norm())
