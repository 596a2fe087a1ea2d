"""Scores of each update of a recorded run, beside the rollouts of its bundle: log-probs, advantages and rewards.

Every learner rank writes one file `scores-NNNNNN-rank-RRR.safetensors` per training step into the bundle's folder. With
them, corrections and losses can be computed again without engines (`moe_trm.tools.whatif`). docs/bundles.md describes
the format.

Shape letters: B rows and R columns of a micro-batch, N scored tokens of all micro-batches of an update.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from moe_trm.config.schema import Config, Recovery
from moe_trm.errors import BundleError
from moe_trm.methods.row_fields import BY_ROW, RowFields
from moe_trm.recording.checked_file import Arrays, CheckedHeader, damaged, read_checked, read_header, write_checked

FORMAT, FORMAT_VERSION = "moe-trm-scores", 2
WHOLE_SAMPLES = 1
"""The version in which every row is a whole sample."""
CONFIG_FILE = "config.json"
SCORES_FILE = re.compile(r"scores-(\d{6,})-rank-(\d{3,})\.safetensors")
_ROW_FIELDS = ("sample_ids", "sample_tokens", *(name for name, by_row in BY_ROW.items() if by_row))


@dataclass(frozen=True)
class ScoredBatch(RowFields):
    """One micro-batch as an update saw it; `[B, R]` tensors are 0 where `mask` is False.

    Attributes:
        mask: bool, tokens that were scored.
        rollout_logprobs, current_logprobs, advantages: float32.
        turn_ids, versions: integers.
        sample_ids, group_ids: `[B]` int64 (`RolloutRecord.row_id`), -1 on a row of padding.
        rewards: `[B]` float32; None where they are not known, as in dumps of others.
        anchor_logprobs: under the weights at the start of the step; None where the update's own forward was the anchor.
        behavior_logprobs: under older weights that sampled, where they were scored; None elsewhere.
        anchor_exact_kl: KL(rollout || anchor) on the kept support, or None.
        sample_tokens: as in `TokenBatch`.
    """

    mask: Tensor
    rollout_logprobs: Tensor
    current_logprobs: Tensor
    advantages: Tensor
    sample_ids: Tensor
    turn_ids: Tensor = field(kw_only=True)
    versions: Tensor = field(kw_only=True)
    group_ids: Tensor = field(kw_only=True)
    rewards: Tensor | None = field(kw_only=True)
    anchor_logprobs: Tensor | None = None
    behavior_logprobs: Tensor | None = None
    anchor_exact_kl: Tensor | None = None
    sample_tokens: Tensor | None = None


@dataclass(frozen=True)
class ScoredUpdate:
    """One optimizer step: micro-batches, denominators of its minibatch, the rest of `step.passes.AnchoredMinibatch`."""

    batches: tuple[ScoredBatch, ...]
    num_sequences: int
    num_tokens: int
    recovery: Recovery = "same"
    version: int = 0
    kl_coef: float = 0.0


class UpdateHeader(msgspec.Struct):
    """Header of one update: `[B, R]` of each micro-batch, and the rest as in `ScoredUpdate`."""

    shapes: list[tuple[int, int]]
    num_sequences: int
    num_tokens: int
    recovery: Recovery
    version: int
    kl_coef: float


class ScoresHeader(CheckedHeader, kw_only=True):
    """Metadata of one scores file."""

    step: int
    data_rank: int
    data_size: int
    updates: list[UpdateHeader]


def write_scores(folder: Path, step: int, updates: Sequence[ScoredUpdate], *, data_rank: int, data_size: int) -> None:
    """One rank's updates of one step as a file, whole or not at all."""
    arrays: dict[str, np.ndarray] = {}
    for number, update in enumerate(updates):
        for score_field in fields(ScoredBatch):
            values = [getattr(batch, score_field.name) for batch in update.batches]
            if any(value is None for value in values):
                continue
            arrays[f"{number}/{score_field.name}"] = torch.cat(
                [_packed(score_field.name, batch, value) for batch, value in zip(update.batches, values, strict=True)]
            ).numpy()
    header = ScoresHeader(
        format=FORMAT,
        version=FORMAT_VERSION,
        step=step,
        data_rank=data_rank,
        data_size=data_size,
        updates=[
            UpdateHeader(
                [(*batch.mask.shape,) for batch in scored_update.batches],
                scored_update.num_sequences,
                scored_update.num_tokens,
                scored_update.recovery,
                scored_update.version,
                scored_update.kl_coef,
            )
            for scored_update in updates
        ],
    )
    write_checked(folder / f"scores-{step:06d}-rank-{data_rank:03d}.safetensors", header, arrays)


def _packed(name: str, batch: ScoredBatch, value: Tensor) -> Tensor:
    value = value.detach().cpu()
    if name == "mask":
        return value.flatten()
    return value if name in _ROW_FIELDS else value[batch.mask.cpu()]


class ScoresReader:
    """Reads the scores of a bundle.

    Every method raises `BundleError` for what is missing, damaged, truncated or of another format.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._files: dict[int, dict[int, Path]] = {}
        for path in self._folder.glob("scores-*.safetensors"):
            name = SCORES_FILE.fullmatch(path.name)
            if name:
                self._files.setdefault(int(name[1]), {})[int(name[2])] = path

    def steps(self) -> list[int]:
        """The steps with scores, ascending."""
        return sorted(self._files)

    def config(self) -> Config:
        """The configuration of the run that was recorded."""
        path = self._folder / CONFIG_FILE
        try:
            return Config.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(
                "the recorded configuration is damaged or of another version of moe-trm",
                where=str(path),
                got=str(error),
                expected="the config.json that the recording run wrote",
                fix="Copy it again from the run directory of the recorded run, or record the run again.",
            ) from error

    def read(self, step: int) -> list[ScoredUpdate]:
        """The updates of one step, micro-batches of all ranks together, rank after rank."""
        files = self._files.get(step, {})
        if not files:
            raise BundleError(
                "the recording has no scores of this step",
                where=str(self._folder),
                got=step,
                expected=f"one of {self.steps()}",
            )
        size = read_header(next(iter(files.values())), ScoresHeader, FORMAT, FORMAT_VERSION, WHOLE_SAMPLES).data_size
        if sorted(files) != list(range(size)):
            raise BundleError(
                "the scores of some learner ranks are missing or of another run",
                where=f"{self._folder}, step {step}",
                got=f"ranks {sorted(files)}",
                expected=f"ranks 0 to {size - 1}",
                fix="Copy the whole folder, or record the run again into an empty one.",
            )
        ranks = [self._read(files[rank], rank, size) for rank in range(size)]
        return [
            replace(parts[0], batches=tuple(batch for part in parts for batch in part.batches))
            for parts in zip(*ranks, strict=True)
        ]

    def _read(self, path: Path, rank: int, size: int) -> list[ScoredUpdate]:
        header, arrays = read_checked(path, ScoresHeader, FORMAT, FORMAT_VERSION, WHOLE_SAMPLES)
        if (header.data_rank, header.data_size) != (rank, size):
            raise damaged(path, f"it is of rank {header.data_rank} of {header.data_size}")
        try:
            return [_unpacked(update, arrays, f"{number}/") for number, update in enumerate(header.updates)]
        except (KeyError, ValueError, IndexError, RuntimeError) as error:
            raise damaged(path, f"{type(error).__name__}: {error}") from error


def _unpacked(header: UpdateHeader, arrays: Arrays, prefix: str) -> ScoredUpdate:
    tensors = {
        name.removeprefix(prefix): torch.from_numpy(array) for name, array in arrays.items() if name.startswith(prefix)
    }
    sizes = [rows * columns for rows, columns in header.shapes]
    masks = [
        part.view(shape) for part, shape in zip(torch.split(tensors.pop("mask"), sizes), header.shapes, strict=True)
    ]
    lengths = [[int(mask.sum()) for mask in masks], [len(mask) for mask in masks]]
    parts = {name: torch.split(values, lengths[name in _ROW_FIELDS]) for name, values in tensors.items()}
    batches = []
    for index, mask in enumerate(masks):
        batch_fields = {
            name: values[index] if name in _ROW_FIELDS else _spread(values[index], mask)
            for name, values in parts.items()
        }
        batches.append(ScoredBatch(mask=mask, **batch_fields))
    return ScoredUpdate(
        tuple(batches), header.num_sequences, header.num_tokens, header.recovery, header.version, header.kl_coef
    )


def _spread(packed: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=packed.dtype).masked_scatter(mask, packed)
