"""What makes a function a policy objective: `f(inputs, *, parameters...) -> TokenLoss`, decorated with `@objective(...)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from moe_trm.losses.aggregate import Aggregation
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.parameters import Parameter, resolve
from moe_trm.ratios import LogRatios

ObjectiveFunction = Callable[..., TokenLoss]


@dataclass(frozen=True)
class Objective:
    """A policy objective, callable as `objective(inputs, **parameters) -> TokenLoss`.

    Attributes:
        name: registry name.
        aggregation: how its published form turns token losses into one number.
        experimental: the published form is not established; the docstring says what is in doubt.
    """

    name: str
    aggregation: Aggregation
    experimental: bool
    function: ObjectiveFunction

    def __call__(self, inputs: LossInputs, **parameters: Parameter) -> TokenLoss:
        return self.bind(**parameters)(inputs)

    def bind(self, **parameters: Parameter) -> BoundObjective:
        """This objective with its parameters, checked now: unknown, missing or senseless ones raise `ConfigError`."""
        resolved = resolve(self.function, parameters, what="loss parameter", where=f"loss {self.name}")
        bound = BoundObjective(self, resolved)
        bound(_no_inputs())
        return bound


@dataclass(frozen=True)
class BoundObjective:
    """An objective with all its parameters: `bound(inputs) -> TokenLoss`."""

    objective: Objective
    parameters: Mapping[str, Parameter]

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss = self.objective.function(inputs.kept(), **self.parameters)
        return replace(loss, metrics={f"loss/{key}": value for key, value in loss.metrics.items()})


def objective(*, aggregation: Aggregation, experimental: bool = False) -> Callable[[ObjectiveFunction], Objective]:
    """Turn a function into an `Objective` of the same name; its keyword-only parameters are its settings."""

    def register(function: ObjectiveFunction) -> Objective:
        registered = Objective(function.__name__, aggregation, experimental, function)
        object.__setattr__(registered, "__doc__", function.__doc__)
        return registered

    return register


def _no_inputs() -> LossInputs:
    nothing, rows = torch.zeros(0, 1), torch.zeros(0)
    inputs = LossInputs.uncorrected(LogRatios(nothing, nothing, nothing, nothing.bool()), nothing, nothing)
    return replace(inputs, turn_ids=nothing.long(), rewards=rows, group_ids=rows.long())
