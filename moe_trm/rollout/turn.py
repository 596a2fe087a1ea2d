"""Rejections of a turn: where they happened, and routes among their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_trm.errors import RecordRejected
from routing import RouteError


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Put `place`, e.g. the sample, in front of the place that a rejection names."""
    try:
        yield
    except RecordRejected as rejection:
        raise RecordRejected(
            rejection.reason,
            rejection.what,
            where=", ".join(part for part in (place, rejection.where) if part),
            got=rejection.got,
            expected=rejection.expected,
            fix=rejection.fix,
        ) from rejection


def routes_rejected(error: RouteError) -> RecordRejected:
    """The rejection of a record whose routes violate an invariant, counted as `route_<reason>`."""
    return RecordRejected(
        f"route_{error.reason}",
        error.what,
        where=error.where,
        got=error.got,
        expected=error.expected,
        fix=error.fix,
    )
