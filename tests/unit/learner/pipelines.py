"""Pipelines drawn at random, good and bad."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from moe_trm.config.schema import ParallelConfig


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[ParallelConfig, int]:
    """The settings of a pipeline and a number of layers; about half of them fit each other."""
    ranks, virtual = draw(st.integers(2, 4)), draw(st.sampled_from([None, 1, 2, 3]))
    each = virtual or 1
    common: dict[str, Any] = {"pipeline": ranks, "virtual_pipeline": virtual}
    kind = draw(st.sampled_from(["even", "sizes", "counted", "layout"]))
    off_by = draw(st.sampled_from([0, 0, 0, 1]))
    if kind == "even":
        return ParallelConfig(**common), ranks * each * draw(st.integers(1, 3)) + off_by
    if kind == "sizes":
        first, last = (draw(st.none() | st.integers(1, 4).map(lambda n: n * each)) for _ in range(2))
        middle = ranks - (first is not None) - (last is not None)
        layers = (first or 0) + (last or 0) + middle * each * draw(st.integers(1, 3)) + off_by
        return ParallelConfig(**common, first_stage_layers=first, last_stage_layers=last), layers
    if kind == "counted":
        embedding, loss = draw(st.booleans()), draw(st.booleans())
        layers = ranks * each * draw(st.integers(1, 3)) - embedding - loss + off_by
        return ParallelConfig(**common, account_for_embedding=embedding, account_for_loss=loss), max(1, layers)
    counts = draw(st.lists(st.integers(0, 3), min_size=ranks * each, max_size=ranks * each))
    layout = f"E{'|'.join('t' * count for count in counts)}L"
    return ParallelConfig(**common, pipeline_layout=layout), max(1, sum(counts) + off_by)
