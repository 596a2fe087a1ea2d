"""A calculator as a tool: whatever the policy writes up to `=` is worked out for it, and it goes on from there.

    672+39=                                    the prompt
    2+9=   [11]   ,7+3+1=   [11]   ,6+0+1=   [7]   #711

What stands in brackets comes from the tool. The policy decides what to ask, and when it has seen enough to answer.
"""

from __future__ import annotations

import re

from moe_trm.rollout.sessions.session import Session

EXPRESSION = re.compile(r"(\d+(?:[+-]\d+)+)=$")


async def rollout(session: Session) -> None:
    """Answers alternate with the calculator's results until the policy ends or `rollout.max_turns` is reached."""
    while (turn := await session.sample(stop=("=",))).stopped_by == "=":
        await session.append(calculate(turn.text))


def calculate(text: str) -> str:
    """The value of the sum that `text` ends in; `?` where it ends in none.

    A negative value is written the way the model borrows: its last digit, counted up from ten, and a `b`.
    """
    match = EXPRESSION.search(text)
    if match is None:
        return "?"
    value = sum(int(term) for term in re.findall(r"[+-]?\d+", match[1]))
    return str(value) if value >= 0 else f"{value % 10}b"
