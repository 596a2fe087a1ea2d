"""Numbers with their origin, so that no assumption looks like a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Basis = Literal["measured", "given", "assumed"]
"""`measured`: by us or by the user's own run. `given`: follows from config.json, the configuration or a data sheet.
`assumed`: something in it is a guess, which is in the plan's list."""


@dataclass(frozen=True)
class Figure:
    """A number of the plan.

    Attributes:
        value: in its own unit: bytes, seconds, tokens per second.
        basis: the weakest origin of what it was computed from.
        note: the rule in short, or the option that changes it.
    """

    value: float
    basis: Basis
    note: str = ""


def weakest(*bases: Basis) -> Basis:
    """The origin of a number that was computed from numbers of these origins."""
    order: tuple[Basis, ...] = ("assumed", "given", "measured")
    return next(basis for basis in order if basis in bases)
