"""Transcripts of made-up records: two prompts, a tool's tokens in between, some tokens rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.observe.transcripts import Transcripts
from moe_trm.ratios import LogRatios
from moe_trm.types import TokenBatch, TrainRow
from tests.unit.advantages import valued
from tests.unit.records import make_record


class Letters:
    """A decoder: one letter per id, some of them awkward in HTML."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [
            "\n" if token == 5 else "<" if token == 6 else "" if token == 7 else chr(97 + token % 26)
            for token in token_ids
        ]


def rows() -> list[TrainRow]:
    """Three samples of prompt 0 and one of prompt 1; the second has tool tokens between its turns."""
    records = [make_record(sample_id=n, group_id=n // 3, num_sampled=6 + 20 * n, reward=n % 2) for n in range(4)]
    tool = records[1]
    sampled, turns = tool.sampled.copy(), tool.turn_ids.copy()
    sampled[8:12], turns[8:] = False, 1
    scored = sampled[4:]
    records[1] = replace(
        tool,
        sampled=sampled,
        turn_ids=turns,
        rollout_logprobs=tool.rollout_logprobs[scored],
        full_logprobs=tool.full_logprobs[scored],
        versions=tool.versions[scored],
        routes=None,
        sampling_mask=None,
    )
    return [TrainRow(replace(record, routes=None, sampling_mask=None)) for record in records]


def judged(rows: Sequence[TrainRow]) -> tuple[TokenBatch, Evidence, Correction]:
    """A micro-batch of these rows with random log-probs of the learner; every third token is rejected."""
    batch = valued(rows, *(0.5 - n for n in range(len(rows))))
    generator = torch.Generator().manual_seed(0)
    learner = batch.rollout_logprobs + 0.01 * torch.randn(batch.mask.shape, generator=generator)
    ratios = LogRatios(batch.rollout_logprobs, learner, learner, batch.mask)
    keep = batch.mask & (torch.arange(batch.mask.shape[1]) % 3 != 0)
    weights = torch.where(keep, ratios.engine.exp(), 0.0)
    return batch, Evidence(ratios, batch.advantages, turn_ids=batch.turn_ids), Correction(weights, keep, {})


def made_transcripts(run_dir: Path) -> Path:
    """Writes them as a run would; returns the path of step 1 without its ending."""
    sink = Transcripts(run_dir, "nowhere", every=10, rollouts=3, decoder=Letters())
    given = rows()
    _, evidence, correction = judged(given)
    sink.judged(given, evidence, correction)
    sink.write(1, {})
    return run_dir / "transcripts" / "step-000001"


def sampled_places(row: TrainRow) -> list[int]:
    return np.flatnonzero(row.record.sampled).tolist()
