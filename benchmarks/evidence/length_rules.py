"""Controls of answer_length.yaml: answers dropped at random, evenly or with the length profile of `trm_max`."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from moe_trm.corrections import Evidence
from moe_trm.corrections.by_length import octave_of
from moe_trm.corrections.decision import keep_rows
from moe_trm.corrections.evidence import RowDecision
from moe_trm.corrections.row_scores import divergence_score
from moe_trm.corrections.rule import rule


@rule(ratio="total", scope="batch", calibrate=lambda quantile: {"max_score": quantile})
def random_rows(evidence: Evidence, log_ratio: Tensor, *, max_score: float) -> RowDecision:
    """Keep row i iff u_i <= max_score, with u_i uniform in [0, 1)."""
    draws = torch.rand(len(log_ratio), generator=_draw(evidence), dtype=torch.float64).to(log_ratio)
    return keep_rows(draws <= max_score, draws)


@rule(ratio="total", scope="batch", calibrate=lambda quantile: {"max_score": quantile})
def random_rows_like_trm_max(evidence: Evidence, log_ratio: Tensor, *, max_score: float) -> RowDecision:
    """Keep row i iff the score of `trm_max` of a row drawn from the rows of its octave of length is <= max_score.

    The scores of an octave are dealt anew, each once. So as many rows of every length are dropped as `trm_max` drops,
    but not the same ones.
    """
    scores, octaves, draw = (
        divergence_score("max", evidence, log_ratio),
        octave_of(evidence.mask.sum(1)),
        _draw(evidence),
    )
    dealt = scores.clone()
    for octave in torch.unique(octaves):
        rows = (octaves == octave).nonzero()[:, 0]
        dealt[rows] = scores[rows[torch.randperm(len(rows), generator=draw).to(rows.device)]]
    return keep_rows(dealt <= max_score, dealt)


def _draw(evidence: Evidence) -> torch.Generator:
    """Another draw for every batch, the same again after a resumption."""
    sampled = evidence.ratios.packed_rollout_logprobs().double().cpu().numpy().tobytes()
    seed = hashlib.blake2b(sampled, digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(seed, "big"))
