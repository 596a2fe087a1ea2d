"""Both cuts of records by a layout, and their check against padded rows, as `MegatronReplayer` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from routing.layout.packed import AnyLayout
from routing.layout.rows import Rows
from routing.record.record import RouteRecord
from routing.record.sources import check_rows
from routing.replay.cut import by_layer, first_cut, rows_of_records, stacked_routes
from routing.replay.proof import second_cut

Records = Sequence[RouteRecord | None]


def check_records(
    records: Records,
    input_ids: Tensor,
    target_ids: Tensor,
    valid: Tensor,
    missing: Literal["reject", "native"] = "reject",
    origins: Sequence[bytes | None] = (),
) -> None:
    check_rows(records, Rows.right_padded(valid), input_ids, target_ids, missing, origins)


def local_targets(
    records: Records, layout: AnyLayout, layers: Sequence[int], num_experts: int, top_k: int
) -> dict[int, Tensor]:
    routes_SLK = stacked_routes(records, layers, num_experts, top_k)
    return by_layer(first_cut(routes_SLK, rows_of_records(records), layout, num_experts), layers)


def expected_routes(
    records: Records, layout: AnyLayout, layers: Sequence[int], num_experts: int, top_k: int
) -> dict[int, Tensor]:
    routes_SLK = stacked_routes(records, layers, num_experts, top_k)
    return by_layer(second_cut(routes_SLK, rows_of_records(records), layout), layers)
