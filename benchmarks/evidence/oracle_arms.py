"""The gradient of each arm on the answers of one engine, with this project's rules, losses and replay.

All arms have the loss `unclipped` of the update ratio, summed over tokens and averaged over answers. They differ in the
routes of their passes and in the rule alone. So a mask is compared with the same gradient without it (`none`).

Shape letters: B answers, R columns, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.evidence.oracle_answers import Answers, forward, gradient
from benchmarks.evidence.split_half import Halves
from moe_trm import corrections, losses
from moe_trm.corrections import Evidence
from moe_trm.losses import LossInputs, aggregate
from moe_trm.ratios import LogRatios, k3
from routing.hf import HFReplayer
from routing.record.sources import Native, Recorded, ReplayRecorded, RouteSource

REJECTED = 0.2
"""Share of the answers that each mask drops."""
WEIGHTS = {"none": None, "TIS": "token_tis", "seq_TIS": "seq_tis", "IcePop": "icepop"}
"""Rules at their own thresholds and ratios, by arm. None: no rule."""
MASKS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "TRM_Max": ("trm_max", {}),
    "TRM_Avg": ("trm_avg", {}),
    "TRM_Max_Avg": ("trm_max_avg", {}),
    "LN_TRM": ("ln_trm", {"delta": 0.01}),
}
RANDOM = "random_rows"
ARMS = (*WEIGHTS, "R2", "R3", "R3_TIS", *MASKS, RANDOM)
BY_REPLAY: Mapping[str, tuple[str, ...]] = {"native": tuple(WEIGHTS), "R2": ("R2",), "R3": ("R3", "R3_TIS")}
"""Arms by the routes of their passes."""
RULES = {**WEIGHTS, "R2": None, "R3": None, "R3_TIS": "token_tis"}


@dataclass(frozen=True)
class Sampled:
    """Answers of an engine as a learner gets them.

    Attributes:
        half: 0 or 1.
        rollout_logprobs: `[B, R]` of the engine.
        routes: by replay, for the learner's passes.
        anchors: by replay, `[B, R]` log-probs of the learner at the weights that the engine got.
    """

    answers: Answers
    half: int
    rollout_logprobs: Tensor
    routes: Mapping[str, RouteSource]
    anchors: Mapping[str, Tensor]

    def ratios(self, replay: str, current: Tensor) -> LogRatios:
        """Ratios of `current` `[B, R]`, a pass with the same replay."""
        return LogRatios(self.rollout_logprobs, self.anchors[replay], current, self.answers.sampled)

    def rows(self, rows: Tensor) -> Sampled:
        """Some of the answers `[D]`, for passes with native routes."""
        return replace(
            self,
            answers=self.answers.rows(rows),
            rollout_logprobs=self.rollout_logprobs[rows],
            routes={"native": Native()},
            anchors={"native": self.anchors["native"][rows]},
        )


def routes_of(learner: Recorded, engine: Recorded) -> Mapping[str, RouteSource]:
    """The source of each replay: R2 has the routes of the learner's first pass, R3 the engine's."""
    return {"native": Native(), "R2": ReplayRecorded(learner), "R3": ReplayRecorded(engine)}


@dataclass(frozen=True)
class Gradients:
    """Gradients of every arm on one cell, and measurements beside them.

    Attributes:
        arms: by arm.
        k3: mean over tokens, engine against learner, with native routes and with R3.
    """

    arms: Mapping[str, Halves]
    k3: Mapping[str, float]


def gradients(causal: Any, batches: Sequence[Sampled], *, moved: bool, seed: int) -> Gradients:
    """Gradients of ascent at the weights of `causal`. Not `moved`: it still has the weights that the engine got."""
    replayer = HFReplayer(causal, max_local_flip_rate=1.0)
    num = [sum(len(batch.answers.ids) for batch in batches if batch.half == half) for half in (0, 1)]
    size = sum(weight.numel() for weight in causal.parameters())
    sums = {arm: torch.zeros(2, size) for arm in ARMS}
    divergences: dict[str, list[Tensor]] = {"native": [], "R3": []}
    rejected = rejections([_seen(causal, replayer, batch, moved) for batch in batches], seed)
    for place, batch in enumerate(batches):
        for replay, arms in BY_REPLAY.items():
            if replay == "R2" and not moved:
                continue  # Its own routes, at the weights that chose them: the arm `none`.
            current, _ = forward(causal, replayer, batch.answers, batch.routes[replay])
            ratios = batch.ratios(replay, current)
            if replay in divergences:
                divergences[replay].append(k3(ratios.total.detach()[batch.answers.sampled]))
            for arm in arms:
                loss = _loss(batch.answers, ratios, current, RULES[arm])
                sums[arm][batch.half] -= gradient(causal, loss, last=arm == arms[-1]) / num[batch.half]
        for arm, rows in rejected.items():
            # A mask is `none` without the answers that it drops, and these are few.
            if len(rows[place]):
                dropped = batch.rows(rows[place])
                current, _ = forward(causal, replayer, dropped.answers, Native())
                loss = _loss(dropped.answers, dropped.ratios("native", current), current, None)
                sums[arm][batch.half] += gradient(causal, loss) / num[batch.half]
    replayer.report()
    replayer.detach()
    for arm in rejected:
        sums[arm] += sums["none"]
    sums["R2"] = sums["R2"] if moved else sums["none"]
    arms_found = {arm: Halves(first, second, sum(num)) for arm, (first, second) in sums.items()}
    return Gradients(arms_found, {replay: float(torch.cat(parts).mean()) for replay, parts in divergences.items()})


def on_policy(causal: Any, batches: Sequence[tuple[int, Answers]]) -> Halves:
    """The gradient of J at the weights of `causal`, from batches of its own answers, each with its half."""
    parts = [(half, policy_gradient(causal, answers)) for half, answers in batches]
    first, second = (torch.stack([part for part_half, part in parts if part_half == half]).mean(0) for half in (0, 1))
    return Halves(first, second, sum(len(answers.ids) for _, answers in batches))


def policy_gradient(causal: Any, answers: Answers) -> Tensor:
    """Mean of A grad log pi over answers of `causal` itself, `[P]`."""
    replayer = HFReplayer(causal, max_local_flip_rate=1.0)
    current, _ = forward(causal, replayer, answers, Native())
    replayer.detach()
    return -gradient(causal, policy_loss(answers, current.detach(), current)) / len(answers.ids)


def policy_loss(answers: Answers, old_logprobs: Tensor, current: Tensor) -> Tensor:
    """The loss of the arms without a mismatch of engines, of `old_logprobs` `[B, R]`, summed over answers."""
    return _loss(answers, LogRatios(old_logprobs, old_logprobs, current, answers.sampled), current, None)


@torch.no_grad()
def _seen(causal: Any, replayer: HFReplayer, batch: Sampled, moved: bool) -> Evidence:
    """Evidence for a rule that reads the total ratio."""
    anchor = batch.anchors["native"]
    current = forward(causal, replayer, batch.answers, Native())[0] if moved else anchor
    return Evidence(batch.ratios("native", current), batch.answers.advantages)


def rejections(seen: Sequence[Evidence], seed: int) -> Mapping[str, list[Tensor]]:
    """By mask and batch, the answers `[D]` that it drops: `REJECTED` of them all, by thresholds or at random."""
    rejected = {}
    for arm, (name, fixed) in MASKS.items():
        rule = corrections.get(name)
        bound = corrections.calibrate(
            rule, [corrections.scores(rule, evidence, **fixed) for evidence in seen], REJECTED, **fixed
        )
        rejected[arm] = [(~bound(evidence).keep & evidence.mask).any(1).nonzero()[:, 0] for evidence in seen]
    sizes = [len(evidence.mask) for evidence in seen]
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    drawn = torch.split(order < round(REJECTED * sum(sizes)), sizes)
    return {**rejected, RANDOM: [drop.nonzero()[:, 0] for drop in drawn]}


def _loss(answers: Answers, ratios: LogRatios, current: Tensor, rule: str | None) -> Tensor:
    """The loss of the answers, their sum."""
    if rule is None:
        inputs = LossInputs.uncorrected(ratios, current, answers.advantages)
    else:
        correction = corrections.get(rule)(Evidence(ratios, answers.advantages))
        inputs = LossInputs.corrected(ratios, current, answers.advantages, correction)
    values = losses.get("unclipped")(inputs).values
    return aggregate(values, inputs.keep, inputs.mask, "token-sum", num_sequences=1, num_tokens=1)
