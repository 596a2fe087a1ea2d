"""Rejections of a turn: where they happened, and routes among their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_trm.errors import RecordRejected
from moe_trm.types import RolloutRecord
from routing import RouteError
from routing.indexer.record import check_positions


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


def recorded_positions(record: RolloutRecord, layer_ids: tuple[int, ...], top_k: int) -> None:
    """Raise `RecordRejected` (`route_positions`) without the positions that the indexers of these layers chose."""
    routes = record.routes
    try:
        # Rows without routes would have positions of other weights, or none.
        positions = None if routes is None or routes.covered is not None else routes.indexer
        check_positions(positions, layer_ids, top_k, record.num_tokens - 1, f"sample {record.sample_id}")
    except RouteError as error:
        raise routes_rejected(error) from error


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
