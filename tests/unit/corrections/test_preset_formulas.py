"""Every preset against verl's formulas, as loops over floats, on half padding, extreme ratios, short and empty rows.

`python -m benchmarks.verl_presets --verl FOLDER` compares the same cases with verl's own functions.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.verl_presets import Case, differences, make_case, ours
from moe_trm import corrections

# name -> (level of the weights, their cap or band, rejection mode, its bounds); "bypass" reads the current policy.
FORMULAS: dict[str, tuple[str, tuple[float, float], str, tuple[float, float]]] = {}
for prefix in ("decoupled", "bypass_pg"):
    for rejection, mode, bounds in (
        ("geo", "k1", (math.log(0.999), math.log(1.001))),
        ("k3", "k3", (-math.inf, 0.01)),
    ):
        for suffix, level in (("", ""), ("_seq_tis", "sequence"), ("_token_tis", "token")):
            FORMULAS[f"{prefix}_{rejection}_rs{suffix}"] = (level, (0.0, 2.0), f"mean_{mode}", bounds)
FORMULAS |= {
    name: (level, band, mode, bounds)
    for names, level, band, mode, bounds in (
        ("disabled bypass_ppo_clip", "", (0.0, 2.0), "", (0.0, 0.0)),
        ("decoupled_token_is", "token", (0.0, 2.0), "", (0.0, 0.0)),
        ("decoupled_seq_is bypass_pg_is", "sequence", (0.0, 2.0), "", (0.0, 0.0)),
        ("decoupled_seq_is_rs", "sequence", (0.0, 2.0), "sum_k1", (math.log(0.5), math.log(2.0))),
        ("decoupled_token_icepop bypass_pg_token_icepop", "icepop", (0.5, 5.0), "", (0.0, 0.0)),
        ("bypass_ppo_clip_geo_rs", "", (0.0, 2.0), "mean_k1", (math.log(0.999), math.log(1.001))),
        ("bypass_ppo_clip_k3_rs", "", (0.0, 2.0), "mean_k3", (-math.inf, 0.01)),
    )
    for name in names.split()
}


def clamped(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def row(name: str, x: list[float]) -> tuple[list[float], list[bool]]:
    """Weights and kept tokens of one row of log-ratios."""
    level, (low, cap), mode, (least, most) = FORMULAS[name]
    keep = [True] * len(x)
    if mode:
        values = [-clamped(v) if mode.endswith("k1") else math.exp(clamped(v)) - 1 - clamped(v) for v in x]
        statistic = sum(values) / (len(x) if mode.startswith("mean") else 1)
        keep = [least <= statistic <= most] * len(x)
    if level == "icepop":
        ratios = [math.exp(clamped(v)) for v in x]
        return ratios, [low <= ratio <= cap for ratio in ratios]
    if level == "sequence":
        return [min(math.exp(clamped(sum(x))), cap)] * len(x), keep
    return [min(math.exp(clamped(v)), cap) if level == "token" else 1.0 for v in x], keep


def formula(name: str, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights, keep = torch.zeros_like(old), torch.zeros_like(mask)
    for i in range(len(old)):
        if mask[i].any():
            found = row(name, (old - rollout)[i][mask[i]].tolist())
            weights[i, mask[i]], keep[i, mask[i]] = torch.tensor(found[0], dtype=old.dtype), torch.tensor(found[1])
    return weights, keep


@pytest.mark.parametrize("name", corrections.presets)
@pytest.mark.parametrize("stale", [False, True], ids=["sync", "async"])
def test_a_preset_is_verls_formula(name: str, stale: bool) -> None:
    cases = [make_case(seed, stale=stale) for seed in range(20)]
    assert sum(differences(name, case, formula) for case in cases) == 0
    kept = [int(ours(name, case).keep.sum()) for case in cases]
    assert sum(kept) > 0
    assert (sum(kept) < sum(int(case.mask.sum()) for case in cases)) is bool(FORMULAS[name][2] or "icepop" in name)


def test_the_comparison_sees_a_difference() -> None:
    """In the lag of stale samples, which the synchronous cases cannot show."""

    def without_lag(name: str, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return formula(name, old - lag[0], rollout, mask)

    for stale in (False, True):
        case: Case = make_case(7, stale=stale)
        lag = [case.proximal - case.behavior]
        assert (differences("decoupled_token_is", case, without_lag) > 0) is stale
