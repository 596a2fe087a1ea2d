"""The worked example under every objective: loss, gradient and how to evaluate them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_trm import corrections, losses
from moe_trm.losses import LossInputs, aggregate
from moe_trm.ratios import LogRatios
from tests.unit.conftest import WorkedExample

CELLS = ((0, 0), (0, 1), (1, 2), (2, 1), (3, 1))


@dataclass(frozen=True)
class Golden:
    """Loss value, -dL/d current_logprobs at CELLS, and the sum of its absolute values over all cells."""

    name: str
    value: float
    coefficients: tuple[float, ...]
    total: float
    parameters: dict[str, float | str] = field(default_factory=dict)
    aggregation: str | None = None
    correction: tuple[str, dict[str, float | str]] | None = None
    case: str = ""


M2PO: tuple[str, dict[str, float | str]] = ("m2po", {"ratio": "staleness", "over": "harmful"})
P3 = (0.085013, 0.062979, -0.069603, 0, 0)
GOLDEN = [
    Golden("ppo_clip", 0.008834, P3, 0.674050),
    Golden("ppo_clip", 0.008834, P3, 0.674050, {"dual_clip": 3.0}, case="dual"),
    Golden("ppo_clip", -0.003473, P3, 0.674050, {"clip_high": 0.28}, case="higher"),
    Golden(
        "ppo_clip",
        -0.079932,
        (0.069073, 0.051171, -0.056552, 0, 0),
        0.627222,
        aggregation="seq-mean-token-mean",
        case="grpo",
    ),
    Golden(
        "ppo_clip",
        0.005742,
        (0.055259, 0.040937, -0.045242, 0, 0),
        0.438132,
        aggregation="seq-mean-token-sum-norm",
        case="drgrpo",
    ),
    Golden(
        "ppo_clip",
        -0.069081,
        (0.076923, 0.062979, -0.056986, 0, 0),
        0.670374,
        correction=("token_tis", {}),
        case="decoupled",
    ),
    Golden(
        "reinforce",
        0.556349,
        (0.226209, 0.226209, -0.226209, 0.5, -0.083218),
        3.059328,
        correction=("seq_tis", {"ratio": "total"}),
        case="seqtis",
    ),
    Golden("gspo", -0.000275, (0, 0, -0.0625, 0, 0), 0.25),
    Golden("gspo_token", -0.000275, (0, 0, -0.0625, 0, 0), 0.25),
    Golden("gmpo", -0.118072, (0.065704, 0.065704, -0.0625, 0.145229, 0), 0.926746),
    Golden("gpg", -0.092308, (0.076923, 0.076923, -0.076923, 0.076923, -0.076923), 1.0),
    Golden("cispo", 0.037034, (0.085013, 0.062979, -0.069603, 0.098462, -0.046656), 0.974615),
    Golden("sapo", -0.175435, (0.068883, 0.050753, -0.056411, 0.163673, -0.048447), 0.979859),
    Golden("dppo_tv", 0.119549, (0.085013, 0.062979, -0.069603, 0.103835, 0), 0.938707, {"ratio": "update"}),
    Golden(
        "dppo_kl",
        0.170836,
        (0.085013, 0.062979, -0.069603, 0.103835, 0),
        0.881721,
        {"ratio": "update", "bound_low": 0.04, "bound_high": 0.04},
    ),
    Golden("topr", 0.321753, (0.25, 0.25, -0.226209, 0.25, -0.083218), 2.654491),
    Golden("aspo", 0.049680, (0.069603, 0.093954, -0.069603, 0, 0), 0.689614),
    Golden("minpro", 0.061668, (0.085013, 0.069603, -0.076923, 0.103835, -0.038199), 0.920947),
    Golden("ctpo", 0.076965, (0, 0.069603, -0.076923, 0, 0), 0.369975),
    Golden("vespo", 0.076046, (0.083788, 0.083788, -0.068933, 0, -0.010773), 0.643204),
    Golden("unclipped", -0.033463, P3, 0.777885, correction=M2PO, case="m2po"),
    Golden("m2po_clip", -0.026466, (0.085013, 0.062979, -0.069603, 0.103835, 0), 0.938707),
    Golden("dispo", 0.054230, (0.085013, 0.062979, -0.069603, 0.103835, -0.046656), 0.985363),
    Golden("r2vpo", -0.011201, (0.076072, 0.074395, -0.062979, 0.067508, -0.028298), 0.875274),
    Golden("kl_cov", -0.033656, (0.085013, 0.062979, -0.069603, 0.103835, -0.046656), 0.985363, {"share": 0.2}),
    Golden("quatro", -0.006745, (0.068011, 0.088171, -0.055682, 0.041534, 0), 0.769074),
    Golden(
        "oapl",
        0.457750,
        (0.083277, 0.083277, -0.166723, -0.279223, -0.041723),
        1.683613,
        {"beta": 0.5, "beta_value": 0.5},
    ),
    # Scores of the rows 1.2, 1.0 and 0.8, -0.25: two pairs.
    Golden("dpo", 0.554554, (0.118755, 0.118755, -0.118755, 0.092921, -0.092921), 1.414646, {"beta": 0.5}),
    Golden("acr_clip", -0.002694, (0.085013, 0.062979, -0.069603, 0.103835, 0), 0.777885),
    Golden(
        "acr_clip",
        -0.092136,
        (0.076923, 0.062979, -0.056986, 0.207671, 0),
        0.878045,
        correction=("token_tis", {}),
        case="decoupled",
    ),
    Golden("turn_ppo", -0.009380, (0.080867, 0.080867, -0.074401, 0.089372, 0), 0.810429),
]


def evaluate(golden: Golden, fx: WorkedExample, current: Tensor) -> Tensor:
    ratios = LogRatios(fx.rollout, fx.behavior, current, fx.mask)
    inputs = LossInputs.uncorrected(ratios, current, fx.advantages)
    if golden.correction:
        rule, thresholds = golden.correction
        evidence = replace(fx.evidence, ratios=ratios)
        inputs = LossInputs.corrected(ratios, current, fx.advantages, corrections.get(rule)(evidence, **thresholds))
    inputs = replace(
        inputs,
        rewards=(fx.signs > 0).double(),
        group_ids=torch.tensor([0, 0, 1, 1]),
        entropy=torch.ones(4, 5),
        router_shift=torch.zeros(4, 5),
        turn_ids=torch.tensor([[0] * 5, [0, 0, 1, 1, 1], [0] * 5, [0] * 5]),
        reference_logprobs=fx.behavior - 0.25,
    )
    objective = losses.get(golden.name)
    values = objective(inputs, **golden.parameters).values
    mode = golden.aggregation or objective.aggregation
    return aggregate(values, inputs.keep, fx.mask, mode, num_sequences=4, num_tokens=13, horizon=5)
