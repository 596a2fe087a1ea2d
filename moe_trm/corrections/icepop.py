"""IcePop: calibrate tokens or rows on which both engines agree well enough, and let the others go."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from moe_trm.corrections.decision import check_band, exponential, weigh, weigh_rows
from moe_trm.corrections.evidence import Correction, Evidence, RowDecision
from moe_trm.corrections.row_scores import NO_SIGN, Score, check_score, signed_score, unscored
from moe_trm.corrections.rule import rule
from moe_trm.errors import ConfigError
from moe_trm.ratios import clamp_log_ratio


@rule(
    ratio="engine",
    scope="token",
    calibrate=lambda quantile: {"low": math.exp(-quantile), "high": math.exp(quantile)},
    weighs=True,
)
def icepop(
    evidence: Evidence,
    log_ratio: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
    weight: Literal["ratio", "one"] = "ratio",
) -> Correction:
    """IcePop: M(k_t) = k_t if low <= k_t <= high, else 0, for the engine ratio k_t. Both bounds belong to the band.

    The default band is Ring-1T's, which masks 1-2 per mille of tokens; above 10% look for the cause instead.
    `weight="one"` is the 0/1 form (no calibration). With `ratio="total"` and the `reinforce` loss it is the form that
    bands the full ratio.
    Source: IcePop (Ring-1T, arXiv 2510.18855); the total-ratio form is prime-rl's.

    When: an MoE policy has isolated tokens that routing or precision threw far off; cheap, and the usual first choice
    there.
    """
    check_band("icepop", low, high)
    ratio = clamp_log_ratio(log_ratio).exp()
    keep = (ratio >= low) & (ratio <= high)
    decision = weigh(ratio if weight == "ratio" else torch.ones_like(ratio), evidence.mask, keep)
    return replace(decision, score=clamp_log_ratio(log_ratio).abs())


@rule(
    ratio="engine",
    scope="sequence",
    calibrate=lambda quantile: {"low": exponential(-quantile), "high": exponential(quantile)},
    weighs=True,
)
def seq_icepop(
    evidence: Evidence,
    log_ratio: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
    score: Score = "mean",
    ln_delta: float | None = None,
    weight: Literal["ratio", "one"] = "ratio",
) -> RowDecision:
    """IcePop on rows: M(k_i) = k_i if low <= k_i <= high, else 0, with k_i = exp(score of log rho_t).

    Both bounds belong to the band. `score`: `mean` (k_i is the geometric mean of the token ratios), `sum` (their
    product), `max` (the token farthest from 1) or `ln`; not `ser`, which has no sign. `weight="one"` is the 0/1 form,
    and the only one for `max` and `ln`, which are not the ratio of a row. The band is `icepop`'s; none has been
    published for rows.
    Source: ours, after IcePop (Ring-1T, arXiv 2510.18855).

    When: as `icepop`, where an answer should train as a whole or not at all.
    """
    check_band("seq_icepop", low, high)
    check_score("seq_icepop", score, ln_delta, impossible={"ser": NO_SIGN})
    if weight == "ratio" and score not in ("mean", "sum"):
        raise ConfigError(
            "only the product of the token ratios and their geometric mean are the ratio of a row",
            where="correction seq_icepop, weight",
            got=f"weight=ratio with score={score}",
            expected="weight=one, or score=mean or sum",
        )
    log_row = clamp_log_ratio(signed_score(score, evidence, log_ratio, ln_delta))
    row_ratio = log_row.exp()
    keep = (row_ratio >= low) & (row_ratio <= high)
    decision = weigh_rows(row_ratio if weight == "ratio" else torch.ones_like(row_ratio), keep)
    return replace(decision, score=log_row.abs(), metrics=unscored(score, evidence))
