"""Mathematical equality of an answer with the expected one, decided by math-verify; runs as a reward function.

It has its own process: math-verify bounds its running time with `signal.alarm`, which works on a main thread only and
would disturb a server's own signals.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from math_verify import parse, verify

from moe_trm.tasks.reward_input import RewardInput

STEP_S = 3
"""Limit for each of math-verify's own steps."""
LONGEST = 400
"""Characters of an answer that are looked at, from its end; no final answer is longer than that."""

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def math_verify(sample: RewardInput) -> float:
    """Reward 1 when the text after the last `#` (the whole answer without one) equals the expected answer, else 0.

    An answer without an end gets 0. Raises `ValueError` where the expected answer is not mathematical.
    """
    if not sample.finished:
        return 0.0
    text = sample.completion
    final = text.rpartition("#")[2].strip().partition("\n")[0] if "#" in text else text
    return float(equal(sample.answer, final[-LONGEST:]))


def equal(answer: str, text: str) -> bool:
    """True when `text` means the same as `answer`. Raises `ValueError` as `math_verify` does."""
    with _without_warnings():
        gold = parse(_plain(answer, anchored=True), parsing_timeout=STEP_S)
        if not gold:
            raise ValueError(
                f"the expected answer {answer!r} is not mathematical: correct it, or set task.reward=exact"
            )
        return bool(verify(gold, parse(_plain(text, anchored=False), parsing_timeout=STEP_S), timeout_seconds=STEP_S))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """No warnings in the log: math-verify has one for every answer that it cannot read."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled_level)


def _plain(text: str, *, anchored: bool) -> str:
    """Without the commas of thousands; a LaTeX answer between dollar signs, where math-verify looks for LaTeX."""
    text = _THOUSANDS.sub("", text.strip())
    return f"${text}$" if anchored and "\\" in text and "$" not in text else text
