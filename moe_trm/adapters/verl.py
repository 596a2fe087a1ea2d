"""Our rules and losses inside verl: a stand-in for its rollout correction, and policy losses by its own registry.

Read in verl 0.10.0.dev and 0.8.0.dev. verl is imported where it is needed, inside of functions.

Shape letters: B rows, R response columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from moe_trm import losses
from moe_trm.corrections import BoundRule, compose
from moe_trm.corrections.evidence import Evidence
from moe_trm.corrections.plain import Rules, bind, correct
from moe_trm.errors import ConfigError
from moe_trm.losses import BoundLoss, LossInputs
from moe_trm.methods import summable
from moe_trm.methods.parameters import Parameter
from moe_trm.methods.ratios import PARTS
from moe_trm.ratios import LogRatios

Correct = Callable[..., tuple[Any, dict[str, float]]]
PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]
_HELPER = "verl.trainer.ppo.rollout_corr_helper"
_STOOD_IN_FOR = "compute_rollout_correction_and_add_to_batch"
_WHERE = "moe_trm.adapters.verl"


def rollout_correction(
    rules: Rules, *, fresh: bool = False, batch_normalize: Literal["off", "token", "sequence"] = "off"
) -> Correct:
    """A function in the place of verl's `compute_rollout_correction_and_add_to_batch`; `standing_in` puts it there.

    It adds `rollout_is_weights` `[B, R]` to the batch: the rules' weights, 0 where a rule drops a token. verl's losses
    multiply by them, all but `geo_mean`, which takes their logarithm. `response_mask` stays as it is, so no denominator
    changes, and no advantage.

    Args:
        rules: as in `moe_trm.corrections.plain.bind`. verl calls this once a step, before it computes advantages and
            before any update. So rules read `merged` (or `engine`, see `fresh`), and none reads advantages. Rules of
            batch scope judge the batch of the step.
        fresh: True says that every sample is of the weights that the step begins with, as in synchronous training.
            Then rules may read `engine`.
        batch_normalize: divide the weights by their mean over the batch.

    Raises:
        ConfigError: here, rules that cannot be bound. In the call: a rule that needs what is not there, a batch without
            log-probs of the rollout, and settings of verl's own correction, which would have no effect.
    """
    bound = bind(rules)
    compose(bound, whole_minibatch=True)

    def corrected(batch: Any, rollout_corr_config: Any = None) -> tuple[Any, dict[str, float]]:
        tensors = batch.batch
        _check_batch(tensors, rollout_corr_config)
        old = tensors["old_log_probs"]
        got = correct(
            bound,
            rollout_logprobs=tensors["rollout_log_probs"],
            behavior_logprobs=old if fresh else None,
            proximal_logprobs=old,
            mask=tensors["response_mask"].bool(),
            advantages=tensors["advantages"] if "advantages" in tensors.keys() else None,  # noqa: SIM118
            whole_minibatch=True,
            batch_normalize=batch_normalize,
        )
        tensors["rollout_is_weights"] = torch.where(got.keep, got.weights, 0.0)
        return batch, {f"rollout_corr/{name}": value for name, value in got.metrics.items()}

    return corrected


@contextmanager
def standing_in(function: Correct) -> Iterator[None]:
    """verl calls `function` for its rollout correction until the context is left, in this process.

    The name is exchanged in every module of verl that has it by then: import the trainer first.
    """
    original = getattr(import_module(_HELPER), _STOOD_IN_FOR)
    ours = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "verl" and getattr(module, _STOOD_IN_FOR, None) is original
    ]
    for module in ours:
        setattr(module, _STOOD_IN_FOR, function)
    try:
        yield
    finally:
        for module in ours:
            setattr(module, _STOOD_IN_FOR, original)


def register_policy_loss(
    name: str,
    rules: Rules = "disabled",
    *,
    loss: str = "ppo_clip",
    parameters: Mapping[str, Parameter] | None = None,
    bypass: bool = False,
) -> PolicyLoss:
    """Register a policy loss with verl, for `actor_rollout_ref.actor.policy_loss.loss_mode=NAME`.

    Args:
        name: any that verl does not have yet.
        rules: as in `policy_loss`.
        loss: likewise.
        parameters: likewise.
        bypass: likewise.

    Raises:
        ConfigError: a name that verl has already, and as `policy_loss`.
    """
    core = import_module("verl.trainer.ppo.core_algos")
    if name in core.POLICY_LOSS_REGISTRY:
        raise ConfigError("verl has a policy loss of this name", where=_WHERE, got=name, expected="another name")
    function = policy_loss(rules, loss=loss, parameters=parameters, bypass=bypass, aggregate=core.agg_loss)
    core.register_policy_loss(name)(function)
    return function


def policy_loss(
    rules: Rules = "disabled",
    *,
    loss: str = "ppo_clip",
    parameters: Mapping[str, Parameter] | None = None,
    bypass: bool = False,
    aggregate: Callable[..., Tensor],
) -> PolicyLoss:
    """A policy loss as verl calls it: `(old_log_prob, log_prob, advantages, response_mask, ...) -> (loss, metrics)`.

    Rules run in every micro-batch, on the policy in training. Tokens that they drop give no loss and stay in every
    denominator. `rollout_is_weights`, where the batch has them, multiply the loss.

    Args:
        rules: as in `moe_trm.corrections.plain.bind`. They read `update`; in bypass `total`.
        loss: one of our losses that needs log-probs and advantages alone.
        parameters: of the loss.
        bypass: True says that verl runs with `rollout_correction.bypass_mode=true`: its old log-probs are those of the
            rollout. They cannot be told apart otherwise.
        aggregate: verl's `agg_loss`.

    Raises:
        ConfigError: rules or a loss on a ratio that is not known, of batch scope, or with other needs; a ratio that
            would be counted twice.
    """
    bound, bound_loss = bind(rules), losses.get(loss).bind(**(parameters or {}))
    judge = compose(bound)
    _check_known(bound, bound_loss, bypass)

    def run(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        # In bypass the rollout is the anchor; else it is not known, and no rule reads a ratio to it.
        ratios = LogRatios(old_log_prob, None, log_prob, response_mask.bool(), old_log_prob, measured=False)
        correction = judge(Evidence(ratios, advantages))
        token_loss = bound_loss(LossInputs.corrected(ratios, log_prob, advantages, correction))
        values = torch.where(correction.keep, token_loss.values, 0.0)
        if rollout_is_weights is not None:
            values = values * rollout_is_weights
        info = {} if config is None else config.global_batch_info
        reduced = aggregate(loss_mat=values, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **info)
        metrics = summable.finalize({**correction.metrics, **token_loss.metrics})
        return reduced, {f"actor/{name}": value for name, value in metrics.items()}

    return run


def _check_batch(tensors: Any, settings: Any) -> None:
    missing = [name for name in ("old_log_probs", "rollout_log_probs", "response_mask") if name not in tensors.keys()]  # noqa: SIM118
    if missing:
        raise ConfigError(
            "the batch lacks what the rules read",
            where=_WHERE,
            got=f"no {', '.join(missing)}",
            expected="old_log_probs, rollout_log_probs and response_mask",
            fix="set actor_rollout_ref.rollout.calculate_log_probs=true",
        )
    theirs = [name for name in ("rollout_is", "rollout_rs") if settings is not None and settings.get(name, None)]
    if theirs:
        raise ConfigError(
            "verl's own correction is set, and ours stands in its place",
            where=", ".join(f"algorithm.rollout_correction.{name}" for name in theirs),
            got=[settings.get(name) for name in theirs],
            expected="null",
            fix="write it as one of our rules: moe-trm config from-verl says which",
        )


def _check_known(bound: tuple[BoundRule, ...], loss: BoundLoss, bypass: bool) -> None:
    ratio = "total" if bypass else "update"
    for rule in bound:
        if rule.ratio != ratio:
            raise ConfigError(
                f"rule {rule.rule.name} reads a ratio that verl's policy losses are not told",
                where=_WHERE,
                got=f"ratio={rule.ratio} with bypass={bypass}",
                expected=f"ratio={ratio}",
                fix="give the rule that ratio; rules on `merged` belong in `rollout_correction`",
            )
    needs = [*loss.loss.needs, *(["the whole minibatch"] if loss.loss.scope == "batch" else [])]
    if needs or (not bypass and (loss.contains - {"update"} or loss.ratio != "update")):
        raise ConfigError(
            f"loss {loss.loss.name} needs what verl's policy losses are not told",
            where=_WHERE,
            got=", ".join(needs) or f"ratio={loss.ratio} with bypass={bypass}",
            expected=f"a loss on {ratio}, of log-probs and advantages alone",
        )
    again = [rule.rule.name for rule in bound if rule.weighs and PARTS[rule.ratio] & loss.contains]
    if again:
        raise ConfigError(
            f"the ratio would be counted twice: loss {loss.loss.name} contains it already",
            where=_WHERE,
            got=f"{', '.join(again)} weighs by ratio={ratio}",
            expected="rules that only reject, or a loss without the ratio",
        )
