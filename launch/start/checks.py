"""One line of the doctor's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moe_trm.errors import MoeTrmError

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One thing that was examined, and its state.

    Attributes:
        name: what was examined.
        status: `ok`; `warn`: the run works, but look at it; `fail`: it will not, or its results will be wrong; `skip`:
            not examined.
        says: the fact, with its figures.
        fix: what to do; empty when nothing.
    """

    name: str
    status: Status
    says: str
    fix: str = ""


def attempt(name: str, look: Callable[[], Check | str]) -> Check:
    """`look`, whose typed error is a failed check; text is a passed one."""
    try:
        answer = look()
    except MoeTrmError as error:
        where = f" ({error.where})" if error.where else ""
        compared = f": got {error.got}, expected {error.expected}" if error.got is not None or error.expected else ""
        return Check(name, "fail", f"{error.what}{where}{compared}", error.fix)
    return answer if isinstance(answer, Check) else Check(name, "ok", answer)
