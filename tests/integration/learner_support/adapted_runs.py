"""Finished runs of `lora.py`, and an adapter to start from. Imports no Megatron."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trm.config.schema import LearnerConfig, LoraConfig
from moe_trm.learner.checkpoint.pieces import PieceReader
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.adapter import A, B, factor_name
from moe_trm.learner.lora.files import write_adapter
from moe_trm.learner.lora.targets import adapted_modules, matrix_modules, modules_of
from moe_trm.models.hf_config import read_hf_config
from moe_trm.tools.export.adapter import saved_factors
from tests.integration.learner_support.lora import ALPHA, RANK
from tests.integration.learner_support.ranks import Ranks, run_ranks

SCRIPT = Path(__file__).with_name("lora.py")


def modules(start: Path, run: str) -> frozenset[str]:
    """Hugging Face modules that have an adapter in `run`."""
    match = re.search(r"targets=([^:]+)", run)
    assert match is not None
    hf = read_hf_config(start)
    lora = LoraConfig(rank=RANK, targets=tuple(match[1].split("+")))
    return adapted_modules(modules_of(hf, HfCheckpoint(start).names), lora, hf)


def make_adapter(start: Path, run: str, folder: Path) -> None:
    """Write an adapter of the matrices of `run` whose B is not zero to `folder`."""
    torch.manual_seed(7)
    source, hf = HfCheckpoint(start), read_hf_config(start)
    factors = {}
    for module in sorted(modules(start, run)):
        outputs, inputs = source.shape(f"{module}.weight")
        factors[factor_name(module, A)] = torch.randn(RANK, inputs) / inputs**0.5
        factors[factor_name(module, B)] = torch.randn(outputs, RANK) / 40
    folder.mkdir()
    lora = LoraConfig(rank=RANK, alpha=ALPHA)
    write_adapter(folder, factors, lora, matrix_modules(modules_of(hf, source.names), hf), str(start))


@dataclass(frozen=True)
class Run:
    """A finished run."""

    ranks: Ranks
    name: str
    start: Path

    def factors(self, when: str) -> dict[str, Tensor]:
        """The factors that were saved, by peft's names without their prefix."""
        targets = re.search(r"targets=([^:]+)", self.name)
        assert targets is not None
        lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=tuple(targets[1].split("+")))
        backend: Any = "deepspeed" if "deepspeed" in self.name else "megatron"
        learner = LearnerConfig(backend=backend, lora=lora)
        reader = PieceReader(sorted((self.ranks.folder / self.name / when).glob("*")))
        return saved_factors(reader, read_hf_config(self.start), HfCheckpoint(self.start), learner)

    def scores(self) -> dict[str, Tensor]:
        """Log-probs of every micro-batch, which are the same on all ranks that have them."""
        found: dict[str, Tensor] = {}
        for rank in range(self.ranks.num_ranks):
            for name, values in self.ranks.saved(self.name, "scores", rank).items():
                assert torch.equal(found.setdefault(name, values), values), name
        return found

    def facts(self, rank: int = 0) -> dict[str, float]:
        return {name: float(value) for name, value in self.ranks.saved(self.name, "facts", rank).items()}


class Finished:
    """Runs by number of ranks and name, each done once, when it is first asked for.

    Args:
        folder: for what they save.
        checkpoint: of the runs that name no other.
        groups: numbers of ranks, and the runs that share their processes.
    """

    def __init__(self, folder: Path, checkpoint: Path, groups: Sequence[tuple[int, Sequence[str]]]) -> None:
        self._folder, self._checkpoint, self._groups = folder, checkpoint, groups
        self._done: dict[str, Ranks] = {}

    def __getitem__(self, key: tuple[int, str]) -> Run:
        num_ranks, run = key
        place = f"{num_ranks}/{run}"
        if place not in self._done:
            group = next(group for size, group in self._groups if size == num_ranks and run in group)
            folder = self._folder / str(num_ranks)
            done = run_ranks(folder, self._checkpoint, num_ranks, *group, script=SCRIPT)
            self._done |= {f"{num_ranks}/{each}": done for each in group}
        model = re.search(r"model=([^:]+)", run)
        start = self._checkpoint if model is None else self._checkpoint.with_name(model[1])
        return Run(self._done[place], run, start)
