"""Values of one type from a setting, and rules made of one setting. A value of another type needs a decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError


@dataclass(frozen=True)
class Rule:
    """One rule of a translation.

    Attributes:
        reads: settings of the input.
        writes: ours that depend on them.
        apply: puts the latter, from the former.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    apply: Callable[[Draft], None]


def number(draft: Draft, key: str) -> float | None:
    """A number, whole or not. None where it is not set."""
    value = draft.take(key)
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise NeedsDecisionError(key, f"a number is expected, not {value}")


def integer(draft: Draft, key: str) -> int | None:
    """A whole number."""
    value = number(draft, key)
    if value is None or value == int(value):
        return None if value is None else int(value)
    raise NeedsDecisionError(key, f"a whole number is expected, not {value}")


def switch(draft: Draft, key: str) -> bool:
    """A switch; off where it is not set."""
    value = draft.take(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise NeedsDecisionError(key, f"true or false is expected, not {value}")


def text(draft: Draft, key: str) -> str | None:
    """A text."""
    value = draft.take(key)
    if value is None or isinstance(value, str):
        return value
    raise NeedsDecisionError(key, f"a text is expected, not {value}")


Reader = Callable[[Draft, str], Any]


def direct(key: str, ours: str, read: Reader) -> Rule:
    """A setting that is one of ours under another name. Null says nothing."""

    def apply(draft: Draft) -> None:
        if draft.take(key) is None:
            draft.miss(key, "null: our default is the same")
        else:
            draft.put(ours, read(draft, key), key)

    return Rule((key,), (ours,), apply)


def choice(key: str, ours: str, choices: Mapping[Any, Any], reason: str) -> Rule:
    """A name of theirs for a name of ours; another one needs a decision."""

    def apply(draft: Draft) -> None:
        value = draft.take(key)
        if value is None:
            return
        if value not in choices:
            raise NeedsDecisionError(key, f"{value}: {reason}")
        draft.put(ours, choices[value], key)

    return Rule((key,), (ours,), apply)


def full_vocabulary(keys: tuple[str, ...], read: Reader = number) -> Rule:
    """For a learner that scores over the whole vocabulary, whatever was sampled from."""

    def apply(draft: Draft) -> None:
        for key in keys:
            if read(draft, key) not in (None, 1, -1, 0):
                draft.put("sampling_mask.mode", "off", key)
                draft.remark(
                    f"sampling_mask.mode=off, as in {draft.framework}; keep scores over the ids that were sampled from"
                )
                return

    return Rule(keys, ("sampling_mask.mode",), apply)


def top_k(key: str, read: Reader = integer) -> Rule:
    """The bound on kept ids, which 0 and -1 switch off."""

    def apply(draft: Draft) -> None:
        value = read(draft, key)
        if value is not None:
            draft.put("rollout.top_k", value if value > 0 else None, key)

    return Rule((key,), ("rollout.top_k",), apply)


def betas(keys: tuple[str, str], read: Reader = number) -> Rule:
    """Decay rates of both moments of Adam, where each has a key."""

    def apply(draft: Draft) -> None:
        values = [read(draft, key) for key in keys]
        if None not in values:
            draft.put("optimizer.betas", values, *keys)

    return Rule(keys, ("optimizer.betas",), apply)


def pair(key: str) -> Rule:
    """Decay rates of both moments of Adam in one list."""

    def apply(draft: Draft) -> None:
        value = draft.take(key)
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(beta, float) for beta in value)):
            raise NeedsDecisionError(key, f"two numbers are expected, not {value}")
        draft.put("optimizer.betas", value, key)

    return Rule((key,), ("optimizer.betas",), apply)


MEGATRON_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
"""Megatron's names of learning-rate schedules, which verl and slime use."""


def undecided(key: str, reason: str, *ours: str) -> Rule:
    """A feature without a counterpart that would change the training: when it is on, somebody has to decide."""

    def apply(draft: Draft) -> None:
        value = draft.take(key)
        if value in (None, False, 0, "", (), []) or (value == -1 and value is not True):
            draft.miss(key, "off, as always here")
        else:
            draft.decide(key, reason, *ours)

    return Rule((key,), ours, apply)
