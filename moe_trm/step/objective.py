"""From a minibatch's anchor scores to the loss of each micro-batch: ratios, corrections, policy loss, KL and
entropy terms, aggregation, and their metrics.

Shape letters: B rows, R forwarded tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trm import corrections, diagnostics
from moe_trm.config.schema import Config
from moe_trm.corrections import Correction, Evidence
from moe_trm.corrections.batch_norm import normalized, weight_sums
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.losses import BoundLoss, LossInputs, TokenLoss, aggregate
from moe_trm.losses.kl import kl_estimate, kl_term, rollout_kl
from moe_trm.methods import summable
from moe_trm.methods.parameters import Parameter
from moe_trm.observe.sinks import Sink
from moe_trm.ratios import LogRatios
from moe_trm.step.decision import Decision
from moe_trm.step.mask_judge import MaskJudge
from moe_trm.step.minibatch import WholeMinibatch, gather_minibatch
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.recipe import Recipe, recipe
from moe_trm.step.thresholds import Thresholds
from routing.replay.router_losses import RouterTerms

TERMS = frozenset({"loss/policy", "loss/kl", "loss/rollout_kl", "loss/entropy"})
"""Metrics that are sums of shares: the terms of the loss."""


class Objective:
    """The configured corrections and loss; collects summable metrics until `take`.

    Args:
        run_dir: where calibrated thresholds are kept (`thresholds.json`); None keeps them in memory.
        sinks: are shown every judged micro-batch.
        masks: knows the rows with false sampling masks; None: masks are not judged.

    Raises `ConfigError` for an unknown rule, loss, threshold or parameter, before anything runs.
    """

    def __init__(
        self, config: Config, run_dir: Path | None = None, sinks: Sequence[Sink] = (), masks: MaskJudge | None = None
    ) -> None:
        self._recipe = recipe(config)
        path = run_dir / "thresholds.json" if run_dir else None
        self._thresholds = Thresholds(self._recipe.uncalibrated, config.correction.calibration_steps, path)
        self._metrics: list[summable.Summable] = []
        self._num_updates = 0
        self._adapted: dict[str, Parameter] = {}
        self._decision = Decision(config.correction.decide_after)
        self._sinks, self._seed = sinks, config.seed
        self._has_turns, self._masks = config.rollout.has_turns, masks
        self._ages = bool(config.pipeline.staleness_limit)
        self._has_servers = len(config.rollout.addresses) > 1

    def state(self, learner: Learner) -> dict[str, Any]:
        """State for a checkpoint between two steps, as plain data. Collective."""
        adapted = {"name": self._recipe.loss.loss.name, "parameters": self._adapted}
        return {
            "thresholds": self._thresholds.state(learner),
            "loss": adapted,
            "decision": self._decision.state(),
        }

    def restore(self, state: Mapping[str, Any], learner: Learner) -> None:
        """Go on after `state`."""
        self._thresholds.restore(state["thresholds"], learner)
        if "decision" in state:  # older checkpoints have none
            self._decision.restore(state["decision"])
        adapted = state.get("loss", {})
        if adapted.get("name") == self._recipe.loss.loss.name:
            self._adapted = dict(adapted["parameters"])

    @property
    def reads_minibatch(self) -> bool:
        """True when rules or loss look at the whole minibatch before its update."""
        return self._recipe.rules_read_minibatch or self._recipe.loss_reads_minibatch or bool(self._recipe.uncalibrated)

    @property
    def measuring(self) -> bool:
        """True while a rule with a target has no threshold yet: what is kept now says nothing about it."""
        return self._thresholds.measuring

    @property
    def needs_entropy(self) -> bool:
        """True when the scores of updates have to carry the policy's entropy."""
        return self._recipe.entropy

    def router_terms(self, part: AnchoredMinibatch) -> RouterTerms | None:
        """Factors of the routers' own losses in the update of `part`; None: there are none."""
        terms, rows = self._recipe.router_terms, max(part.mini.num_sequences, 1)
        return terms and RouterTerms(terms.balance / rows, terms.z / rows)

    @property
    def watches_routers(self) -> bool:
        """True when updates have to know how far the routers have moved since the anchors."""
        return "routers" in self._recipe.loss.loss.needs

    def bind(self, part: AnchoredMinibatch, learner: Learner, *, first: bool) -> Callable[[int, Scores], Tensor]:
        """`objective(i, current) -> loss share` of the micro-batches of `part`. Collective: every rank binds its share.

        `first`: these are the first updates of the step, at the very weights that scored the anchors; in synchronous
        training their log-update must be exactly zero, and `update/first_nonzero_fraction` says whether it was. Where
        the learner's passes do not repeat their bits, it is `update/first_reordered_fraction`.
        """
        rules = (*self._recipe.rules, *self._thresholds.rules)
        bound_recipe = replace(self._recipe, rules=rules, loss=self._loss, acts=self._decision.acts)
        judge = _judge(bound_recipe, part, learner, first=first, seed=self._seed)
        self._num_updates += 1

        def loss_of(index: int, current: Scores) -> Tensor:
            batch, ratios = part.batches[index], part.ratios(index, current.logprobs)
            trained, masks = ratios.mask, dict[str, Tensor]()
            if self._masks is not None and batch.kept_offsets is not None:
                if first and not part.scores:  # the update's own forward is the pass at the weights that sampled
                    self._masks.observe(batch, current, part.version)
                refused, masks = self._masks.measured(batch)
                trained = trained & ~refused[:, None]
            evidence = Evidence(ratios, batch.advantages).with_fields(batch, current)
            self._thresholds.observe(evidence)
            correction, token_loss = judge(index, evidence, current.logprobs)
            for sink in self._sinks:
                sink.judged(part.mini.micro_batches[index].rows, evidence, correction)
            terms = {"loss/policy": (token_loss.values, correction.keep & trained, 1.0)}
            measured: dict[str, Tensor] = {}
            if bound_recipe.rollout_kl_coef:
                divergence, kept = rollout_kl(ratios)
                terms["loss/rollout_kl"] = divergence, kept & trained, bound_recipe.rollout_kl_coef
            if current.entropy is not None:
                terms["loss/entropy"] = current.entropy, trained, -bound_recipe.entropy_coef
                measured |= summable.mean("policy/entropy", current.entropy, ratios.mask)
            if (reference := batch.reference_logprobs) is not None:
                kl = kl_term(
                    bound_recipe.kl_estimator,
                    ratios,
                    current.logprobs,
                    reference,
                    ratio=bound_recipe.kl_ratio,
                    clip=bound_recipe.kl_clip,
                )
                terms["loss/kl"] = kl, trained, part.kl_coef
                measured |= reference_metrics(current.logprobs, reference, ratios.mask)
            shares = {
                name: coef
                * aggregate(
                    weighed(values, batch.row_weights),
                    keep,
                    ratios.mask,
                    bound_recipe.aggregation,
                    num_sequences=part.mini.num_sequences,
                    num_tokens=part.mini.num_tokens,
                    horizon=bound_recipe.horizon,
                    sample_tokens=batch.sample_tokens,
                )
                for name, (values, keep, coef) in terms.items()
                if coef
            }
            self._metrics.append(
                {
                    **diagnostics.metrics(evidence),
                    **masks,
                    **{name: share.detach().double() for name, share in shares.items()},
                    **measured,
                    **token_loss.metrics,
                    **correction.metrics,
                    **diagnostics.divergences(evidence),
                    **diagnostics.acceptance(evidence, correction),
                    **(diagnostics.by_turn(evidence) if self._has_turns else {}),
                    **diagnostics.by_place(evidence),
                    **(diagnostics.by_age(evidence, part.version) if self._ages else {}),
                    **(diagnostics.by_server(evidence, batch.servers) if self._has_servers else {}),
                    **diagnostics.gradient_power(evidence, correction),
                    **_first_update(ratios, first and part.scored, repeats=learner.repeats_passes),
                }
            )
            return torch.stack([*shares.values()]).sum()

        return loss_of

    def take(self, learner: Learner) -> dict[str, float]:
        """Metrics of all micro-batches since the last call, over all ranks, finished into plain numbers. Ends a step.
        Collective.

        `loss/policy` and the other terms are means over the updates; each micro-batch has only its share of one.
        """
        collected, self._metrics = self._metrics, []
        metrics = summable.finalize(learner.reduce(summable.add(collected)))
        for term in TERMS & metrics.keys():
            metrics[term] /= self._num_updates
        self._num_updates = 0
        if self._masks is not None:
            self._masks.end_step()
        metrics |= self._adapt(metrics) | self._decision.end_step(metrics)
        return metrics | diagnostics.certificate_estimate(metrics) | self._thresholds.end_step(learner)

    @property
    def _loss(self) -> BoundLoss:
        """The loss at the parameters of this step."""
        loss = self._recipe.loss
        return replace(loss, parameters={**loss.parameters, **self._adapted})

    def _adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move the loss's parameters after a step with these metrics; returns those that it used, by `loss/NAME`."""
        adapt = self._recipe.loss.loss.adapt
        if adapt is None:
            return {}
        used = self._loss.parameters
        changed = adapt(used, metrics)
        self._adapted |= changed
        return {f"loss/{name}": float(used[name] or 0.0) for name in changed}


class PartialJudge:
    """Corrections and token losses of a micro-batch by itself, where neither needs to know of the others."""

    def __init__(self, recipe: Recipe, draw: tuple[int, int]) -> None:
        self._correct = corrections.compose(recipe.rules) if recipe.acts else corrections.measuring(recipe.rules)
        self._loss, self._draw = recipe.loss, draw

    def __call__(self, index: int, evidence: Evidence, current: Tensor) -> tuple[Correction, TokenLoss]:
        correction = self._correct(evidence)
        inputs = LossInputs.corrected(evidence.ratios, current, evidence.advantages, correction)
        return correction, self._loss(replace(inputs, draw=self._draw).with_fields(evidence))


class WholeJudge:
    """The same computed once over the whole minibatch, of which a micro-batch is told its part.

    The loss of a row may depend on other rows by statistics without gradient alone. So a micro-batch has its part of
    the values, and of their derivative by the log-probs.
    """

    def __init__(self, recipe: Recipe, minibatch: WholeMinibatch, draw: tuple[int, int]) -> None:
        self._loss, self._whole, self._draw = recipe.loss, minibatch, draw
        evidence = minibatch.evidence
        joint = corrections.compose if recipe.acts else corrections.measuring
        correction = joint(recipe.rules, whole_minibatch=True)(evidence)
        if recipe.batch_normalize != "off" and recipe.acts:
            weighing = [bound for bound in recipe.rules if bound.weighs]
            weights = corrections.compose(weighing)(evidence)
            correction = normalized(correction, weight_sums(weights, minibatch.mask, recipe.batch_normalize))
            moments = summable.moments("correction/weight", correction.weights, minibatch.mask)
            correction = replace(correction, metrics={**correction.metrics, **moments})
        self._correction = correction
        self._minibatch_loss = self._differentiated() if recipe.loss_reads_minibatch else None

    def __call__(self, index: int, evidence: Evidence, current: Tensor) -> tuple[Correction, TokenLoss]:
        minibatch, correction, mask = self._whole, self._correction, evidence.mask
        local = replace(
            correction,
            weights=minibatch.part(index, correction.weights, mask),
            keep=minibatch.part(index, correction.keep, mask),
        )
        if self._minibatch_loss is not None:
            loss, slope = self._minibatch_loss
            moved = torch.where(local.keep, current - current.detach(), 0.0)
            values = minibatch.part(index, loss.values, mask) + minibatch.part(index, slope, mask) * moved
            return local, replace(loss, values=values)
        inputs = LossInputs.corrected(evidence.ratios, current, evidence.advantages, local)
        return local, self._loss(replace(inputs, draw=self._draw).with_fields(evidence))

    def _differentiated(self) -> tuple[TokenLoss, Tensor]:
        """The loss of all tokens, and the derivative `[N, T]` of their sum by each log-prob."""
        current, correction = self._whole.current.clone().requires_grad_(), self._correction
        with torch.enable_grad():
            inputs = self._whole.inputs(current, correction.weights, correction.keep)
            loss = self._loss(replace(inputs, draw=self._draw))
            total = torch.where(correction.keep, loss.values, 0.0).sum()
        slope = torch.autograd.grad(total, current)[0] if total.requires_grad else torch.zeros_like(current)
        metrics = {name: value.detach() for name, value in loss.metrics.items()}
        return TokenLoss(loss.values.detach(), metrics), slope


def _judge(
    recipe: Recipe, part: AnchoredMinibatch, learner: Learner, *, first: bool, seed: int
) -> PartialJudge | WholeJudge:
    """Judge of this minibatch: by parts, or as a whole at the weights of this update.

    The whole is gathered at the anchors' scores where nothing has moved since; otherwise after one more pass without
    gradient.
    """
    if not (recipe.rules_read_minibatch or recipe.loss_reads_minibatch):
        return PartialJudge(recipe, (seed, part.version))
    moved = not (first and part.scored) if recipe.moves else part.averaged
    current = learner.score(part.batches, part.sources) if moved else part.scores
    with torch.no_grad():
        return WholeJudge(recipe, gather_minibatch(part, current, learner), (seed, part.version))


def reference_metrics(logprobs: Tensor, reference: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`reference/k1_kl` and `reference/k3_kl`: two unbiased estimates of KL(policy || reference) per token, on what the
    rollout sampled.
    """
    estimates = {name: kl_estimate(name, logprobs.detach(), reference, mask) for name in ("k1", "k3")}
    return summable.add(summable.mean(f"reference/{name}_kl", value, mask) for name, value in estimates.items())


def _first_update(ratios: LogRatios, first: bool, *, repeats: bool) -> dict[str, Tensor]:
    changed = ratios.update.detach() != 0
    if repeats:
        return summable.fraction("update/first_nonzero_fraction", changed, ratios.mask & first)
    return summable.fraction("update/first_reordered_fraction", changed, ratios.mask & first)


def weighed(values_BT: Tensor, row_weights_B: Tensor | None) -> Tensor:
    """`[B, T]` token losses, each row times the weight that undoes its draw; None: every row counts once.

    It corrects for drawing groups again, not for a mismatch. So no rule and no loss sees it: a loss need not be linear
    in the weights of corrections.
    """
    return values_BT if row_weights_B is None else values_BT * row_weights_B.to(values_BT)[:, None]
