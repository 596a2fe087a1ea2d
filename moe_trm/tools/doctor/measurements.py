"""Measurements of the zero-update probe: the same tokens under rollout engine and learner, at the same weights.

Shape letters: N scored tokens, L MoE layers, E experts, R rows of a sample, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from moe_trm.errors import BundleError
from moe_trm.recording.bundle import BundleReader
from moe_trm.recording.scores import ScoredBatch, ScoresReader
from moe_trm.types import RolloutRecord

Array = NDArray[Any]


@dataclass(frozen=True)
class Measurements:
    """Scored tokens of the probe; log-probs are float64 nats.

    Attributes:
        group: `[N]` prompt of the token; position: `[N]` tokens before it.
        rollout: `[N]` log-prob under the distribution it was drawn from; full: the same over the whole vocabulary.
        replayed, native: `[N]` learner minus rollout, with the rollout's routes and with the learner's own.
        entropy: `[N]` of the learner's policy over the vocabulary.
        flipped_layers: `[N]` MoE layers whose expert set the two engines choose differently at the input token.
        touched: `[N, L, E]` bool, true where any token of the context, the input token included, passed the expert in
            the rollout.
    """

    group: Array
    position: Array
    rollout: Array
    full: Array
    replayed: Array
    native: Array
    entropy: Array
    flipped_layers: Array
    touched: Array

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def num_layers(self) -> int:
        return int(self.touched.shape[1])


def read_measurements(bundle: Path, probe: Path) -> Measurements:
    """Join what one step recorded in `bundle` with what its probe saved.

    Raises:
        BundleError: a recording that is damaged, or without scores, routes or probe arrays.
    """
    step = _only_step(bundle)
    native = _probe_by_sample(probe, step)
    scored = {
        int(number): (batch, row)
        for update in ScoresReader(bundle).read(step)
        for batch in update.batches
        for row, number in enumerate(batch.sample_ids.tolist())
        if number >= 0
    }
    parts = []
    for record in BundleReader(str(bundle)).read(step):
        if record.row_id not in scored:
            continue  # valid, but not trained: filtered with its group
        batch, row = scored[record.row_id]
        probe_row = native[record.row_id]
        parts.append(
            of_sample(
                record, probe_row["replayed"], probe_row["native"], _entropy(batch, row), probe_row["flipped_layers"]
            )
        )
    return join(parts)


def of_sample(
    record: RolloutRecord, replayed: Array, native: Array, entropy: Array, flipped_layers: Array
) -> Measurements:
    """The measurements of one sample from what the learner made of its scored tokens, each `[N]`: see `Measurements`.

    Raises:
        BundleError: a record without routes.
    """
    if record.routes is None:
        raise BundleError("the probe's rollouts hold no routes", expected="routes of every sample")
    places = np.flatnonzero(record.sampled)[record.scored] - 1
    return Measurements(
        group=np.full(len(places), record.group_id),
        position=places + 1,
        rollout=record.rollout_logprobs[record.scored].astype(np.float64),
        full=record.full_logprobs[record.scored].astype(np.float64),
        replayed=replayed.astype(np.float64),
        native=native.astype(np.float64),
        entropy=entropy.astype(np.float64),
        flipped_layers=flipped_layers,
        touched=touched_experts(record.routes.experts, record.routes.num_experts)[places],
    )


def join(parts: Sequence[Measurements]) -> Measurements:
    """The measurements of all samples together."""
    return Measurements(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Measurements)}
    )


def _only_step(bundle: Path) -> int:
    steps = ScoresReader(bundle).steps()
    if not steps:
        raise BundleError("the probe left no scores", where=str(bundle), expected="one step")
    return steps[-1]


def touched_experts(experts_RLK: Array, num_experts: int) -> Array:
    """`[R, L, E]` bool: experts that the rows up to and including each one passed."""
    num_rows, num_layers, _ = experts_RLK.shape
    passed_RLE = np.zeros((num_rows, num_layers, num_experts), bool)
    np.put_along_axis(passed_RLE, experts_RLK.astype(np.int64), True, axis=2)
    touched: Array = np.logical_or.accumulate(passed_RLE, axis=0)
    return touched


def _entropy(batch: ScoredBatch, row: int) -> Array:
    if batch.entropy is None:
        raise BundleError("the probe's scores hold no entropy", expected="loss.measure_entropy=true")
    values: Array = batch.entropy[row][batch.mask[row]].numpy()
    return values


def _probe_by_sample(folder: Path, step: int) -> dict[int, dict[str, Array]]:
    """Probe arrays of each sample, tokens in order."""
    files = sorted(folder.glob(f"step-{step:06d}-rank*.safetensors"))
    if not files:
        raise BundleError("the probe left no arrays", where=str(folder), expected=f"step-{step:06d}-rank*.safetensors")
    by_sample: dict[int, dict[str, Array]] = {}
    for arrays in map(load_file, files):
        for sample in np.unique(arrays["sample_id"]).tolist():
            is_sample = arrays["sample_id"] == sample
            by_sample[sample] = {name: arrays[name][is_sample] for name in ("native", "replayed", "flipped_layers")}
    return by_sample
