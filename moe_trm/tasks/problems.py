"""Integer arithmetic with short written working: the problems themselves, as text. No tokenizer, no tensors.

A problem `672+39` is asked as `672+39=`. Its working goes digit by digit from the right, with carries and borrows, and
ends with `#` and the answer: `2+9=11,7+3+1=11,6+0+1=7#711`. A negative result starts with `~`: the operands are swapped
first. So the length of an answer varies with its digits, and an answer without working is a `#` and a guess.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

HELD_OUT_SHARE = 26 / 256
"""Share of all problems that is never trained on (chosen by hash, so it needs no list and never moves)."""


@dataclass(frozen=True)
class ArithmeticProblem:
    """`a op b` with `op` one of `+`, `-`; both operands non-negative."""

    a: int
    op: str
    b: int

    @property
    def name(self) -> str:
        return f"{self.a}{self.op}{self.b}"

    @property
    def prompt(self) -> str:
        return f"{self.name}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b if self.op == "+" else self.a - self.b)

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] < HELD_OUT_SHARE * 256

    def working(self) -> str:
        """The digit steps, without the answer."""
        negative = self.op == "-" and self.a < self.b
        upper, lower = (self.b, self.a) if negative else (self.a, self.b)
        width = max(len(str(upper)), len(str(lower)))
        pairs = zip(reversed(str(upper).zfill(width)), reversed(str(lower).zfill(width)), strict=True)
        steps, carry = [], 0
        for x, y in pairs:
            step = f"{x}{self.op}{y}" + (f"{self.op}1" if carry else "")
            if self.op == "+":
                value = int(x) + int(y) + carry
                steps.append(f"{step}={value}")
                carry = value // 10
            else:
                value = int(x) - int(y) - carry
                carry = int(value < 0)
                steps.append(f"{step}={value % 10}" + ("b" if carry else ""))
        return ("~" if negative else "") + ",".join(steps)

    def solution(self, *, with_working: bool = True) -> str:
        """A good answer: working, `#`, answer; or `#` and the answer alone."""
        return (self.working() if with_working else "") + f"#{self.answer}"


def draw(rng: random.Random, max_digits: int, *, held_out: bool) -> ArithmeticProblem:
    """One problem; each operand has 1 to `max_digits` digits, every count equally likely."""
    while True:
        a, b = _operand(rng, max_digits), _operand(rng, max_digits)
        problem = ArithmeticProblem(a, rng.choice("+-"), b)
        if problem.held_out == held_out:
            return problem


def _operand(rng: random.Random, max_digits: int) -> int:
    digits = rng.randint(1, max_digits)
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)
