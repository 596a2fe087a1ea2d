"""What makes a function a policy objective: `f(inputs, log_ratio, *, parameters...) -> TokenLoss`, decorated with `@objective(...)`.

It receives its log-ratio `[B, T]` with gradient and 0 on tokens that do not train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from moe_trm.corrections.rule import Scope
from moe_trm.functions.parameters import Parameter, bind
from moe_trm.losses.aggregate import Aggregation
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.ratios import RATIO_NAMES, LogRatios

ObjectiveFunction = Callable[..., TokenLoss]


@dataclass(frozen=True)
class Objective:
    """A policy objective, callable as `objective(inputs, **parameters) -> TokenLoss`.

    Attributes:
        name: registry name.
        ratio: the ratio it is written on unless `ratio=` is given: `update` against the proximal policy, `total` against the rollout.
        aggregation: how its published form turns token losses into one number.
        scope: `token`, `sequence`, or `batch` if it compares rows or tokens of the whole minibatch.
        experimental: the published form is not established; the docstring says what is in doubt.
    """

    name: str
    ratio: str
    aggregation: Aggregation
    scope: Scope
    experimental: bool
    function: ObjectiveFunction

    def __call__(self, inputs: LossInputs, **parameters: Parameter) -> TokenLoss:
        return self.bind(**parameters)(inputs)

    def bind(self, **parameters: Parameter) -> BoundObjective:
        """This objective with its parameters, checked now: unknown, missing or senseless ones raise `ConfigError`."""
        where = f"loss {self.name}"
        chosen = bind(self.function, self.ratio, parameters, RATIO_NAMES, what="loss parameter", where=where)
        bound = BoundObjective(self, *chosen)
        bound(_no_inputs())
        return bound


@dataclass(frozen=True)
class BoundObjective:
    """An objective with all its parameters: `bound(inputs) -> TokenLoss`."""

    objective: Objective
    ratio: str
    parameters: Mapping[str, Parameter]

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        log_ratio = torch.where(inputs.keep, inputs.ratios.get(self.ratio), 0.0)
        loss = self.objective.function(inputs.kept(), log_ratio, **self.parameters)
        return replace(loss, metrics={f"loss/{key}": value for key, value in loss.metrics.items()})


def objective(
    *, aggregation: Aggregation, ratio: str = "update", scope: Scope = "token", experimental: bool = False
) -> Callable[[ObjectiveFunction], Objective]:
    """Turn a function into an `Objective` of the same name; its keyword-only parameters are its settings."""

    def register(function: ObjectiveFunction) -> Objective:
        registered = Objective(function.__name__, ratio, aggregation, scope, experimental, function)
        object.__setattr__(registered, "__doc__", function.__doc__)
        return registered

    return register


def _no_inputs() -> LossInputs:
    nothing, rows = torch.zeros(0, 1), torch.zeros(0)
    inputs = LossInputs.uncorrected(LogRatios(nothing, nothing, nothing, nothing.bool()), nothing, nothing)
    return replace(inputs, turn_ids=nothing.long(), rewards=rows, group_ids=rows.long(), entropy=nothing)
