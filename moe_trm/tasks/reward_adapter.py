"""Adapter from the signature of a reward function to the way it is called.

Imported in the function's process, so it imports little.

| signature | called with |
|---|---|
| `def reward(sample: RewardInput) -> float` | one sample at a time, in each of `task.reward_processes` processes |
| `async def reward(sample: RewardInput) -> float` | many samples at once, awaited together in one process |
| `def reward(samples: list[RewardInput]) -> list[float]` | the waiting samples, up to 64; one number each, in order |
| `async def reward(samples: list[RewardInput]) -> list[float]` | the same, several batches at once |

Instead of a number each may return a dict of named numbers.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moe_trm.errors import ConfigError
from moe_trm.runtime.child_service import Asker
from moe_trm.runtime.functions.hosted import FunctionSettings, Hosted, is_async
from moe_trm.tasks.reward_input import RewardInput


def adapt(function: Callable[..., Any], settings: FunctionSettings) -> Hosted:
    """See `moe_trm.runtime.functions.hosted`; payload and value are lists whatever the function takes. Raises
    `ConfigError`.
    """
    batched = _takes_a_list(function, settings)
    concurrent = is_async(function)

    async def call(payload: Any, ask: Asker) -> Any:
        samples = msgspec.convert(payload, list[RewardInput])
        value = function(samples if batched else samples[0])
        if concurrent:
            value = await value
        return value if batched else [value]

    return Hosted(call, batched=batched, concurrent=concurrent)


def _takes_a_list(function: Callable[..., Any], settings: FunctionSettings) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters or len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise ConfigError(
            "a reward function takes one argument",
            where=f"config key {settings.key}",
            got=f"{settings.function}{inspect.signature(function)}",
            expected="(sample: RewardInput) or (samples: list[RewardInput])",
        )
    first = parameters[0]
    try:
        annotation = typing.get_type_hints(function).get(first.name, first.annotation)
    except (NameError, TypeError):
        annotation = first.annotation
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] in ("list", "List", "Sequence")
    return (typing.get_origin(annotation) or annotation) in (list, Sequence)
