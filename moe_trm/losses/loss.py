"""Policy losses: functions `f(inputs, log_ratio, *, parameters...) -> TokenLoss` under `@loss(...)`.

Such a function receives its log-ratio `[B, T]` with gradient on tokens that train. With scope `token` it is 0 on
others; else it has values without gradient there, so that statistics of rows are over `inputs.counted`, every sampled
token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from moe_trm.corrections.rule import Scope
from moe_trm.errors import ConfigError
from moe_trm.losses.aggregate import Aggregation
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.methods.losses import Held, Need, contained
from moe_trm.methods.own import check_declaration
from moe_trm.methods.parameters import Parameter, bind
from moe_trm.methods.ratios import RATIO_NAMES
from moe_trm.ratios import LogRatios

LossFunction = Callable[..., TokenLoss]
Adapt = Callable[[Mapping[str, Parameter], Mapping[str, float]], Mapping[str, Parameter]]
"""From a loss's parameters and the metrics of a training step to the parameters that change for the next."""


@dataclass(frozen=True)
class Loss:
    """A policy loss, callable as `loss(inputs, **parameters) -> TokenLoss`.

    Attributes:
        name: the function's.
        ratio: the ratio it is written on unless `ratio=` is given: `update` against the proximal policy, `total`
            against the rollout.
        aggregation: how its published form turns token losses into one number.
        scope: `token`, `sequence`, or `batch` if it compares rows or tokens of the whole minibatch.
        needs: inputs that not every run has.
        holds: the ratio that its gradient depends on, which no rule may weigh by again.
        experimental: the published form is not established; the docstring says what is in doubt.
        adapt: what moves some of its parameters from step to step; None: they are what the configuration says.
    """

    name: str
    ratio: str
    aggregation: Aggregation
    scope: Scope
    needs: tuple[Need, ...]
    holds: Held
    experimental: bool
    function: LossFunction
    adapt: Adapt | None = None

    def __call__(self, inputs: LossInputs, **parameters: Parameter) -> TokenLoss:
        return self.bind(**parameters)(inputs)

    def bind(self, **parameters: Parameter) -> BoundLoss:
        """This loss with its parameters, checked now on a minibatch without rows.

        Raises:
            ConfigError: unknown, missing or senseless parameters, or a function that fails on no rows.
        """
        where = f"loss {self.name}"
        ratio_and_parameters = bind(
            self.function, self.ratio, parameters, RATIO_NAMES, what="loss parameter", where=where
        )
        bound = BoundLoss(self, *ratio_and_parameters)
        try:
            bound(_no_inputs())
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                "the loss fails on a minibatch without rows",
                where=where,
                got=f"{type(error).__name__}: {error}",
                expected="a TokenLoss of shape [0, 1]",
            ) from error
        return bound


@dataclass(frozen=True)
class BoundLoss:
    """A loss with all its parameters: `bound(inputs) -> TokenLoss`."""

    loss: Loss
    ratio: str
    parameters: Mapping[str, Parameter]

    @property
    def contains(self) -> frozenset[str]:
        """The parts of the total ratio that its gradient depends on: `engine`, `lag`, `update`."""
        return contained(self.loss.holds, self.ratio)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        log_ratio = inputs.log_ratio(self.ratio, by_row=self.loss.scope != "token")
        result = self.loss.function(inputs.kept(), log_ratio, **self.parameters)
        if not isinstance(result, TokenLoss) or result.values.shape != inputs.keep.shape:
            shaped = f" of values {tuple(result.values.shape)}" if isinstance(result, TokenLoss) else ""
            raise ConfigError(
                "a loss returns the loss of each token",
                where=f"loss {self.loss.name}",
                got=f"{type(result).__name__}{shaped}",
                expected=f"TokenLoss(values, metrics), of moe_trm.losses, of values {tuple(inputs.keep.shape)}",
            )
        return replace(result, metrics={f"loss/{key}": value for key, value in result.metrics.items()})


def loss(
    *,
    aggregation: Aggregation,
    ratio: str = "update",
    scope: Scope = "token",
    needs: Sequence[Need] = (),
    holds: Held = "own",
    experimental: bool = False,
    adapt: Adapt | None = None,
) -> Callable[[LossFunction], Loss]:
    """Turn a function into a `Loss` of the same name; its keyword-only parameters are its settings.

    Raises:
        ConfigError: an unknown aggregation, ratio, scope, held ratio or need, or a signature that cannot be called.
    """

    def register(function: LossFunction) -> Loss:
        choices = {
            "aggregation": (aggregation, get_args(Aggregation)),
            "ratio": (ratio, RATIO_NAMES),
            "scope": (scope, get_args(Scope)),
            "held ratio": (holds, get_args(Held)),
            **{f"need {need!r}": (need, get_args(Need)) for need in needs},
        }
        check_declaration(function, choices, what="loss", takes="inputs, log_ratio")
        registered = Loss(
            function.__name__, ratio, aggregation, scope, tuple(needs), holds, experimental, function, adapt
        )
        object.__setattr__(registered, "__doc__", function.__doc__)
        return registered

    return register


def _no_inputs() -> LossInputs:
    nothing, rows = torch.zeros(0, 1), torch.zeros(0)
    inputs = LossInputs.uncorrected(LogRatios(nothing, nothing, nothing, nothing.bool()), nothing, nothing)
    inputs = replace(inputs, turn_ids=nothing.long(), rewards=rows, group_ids=rows.long())
    return replace(inputs, entropy=nothing, router_shift=nothing, reference_logprobs=nothing)
