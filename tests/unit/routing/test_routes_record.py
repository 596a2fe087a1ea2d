"""Invariants of a record, one violation each, and the package standing alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from routing import RouteError, RouteRecord, sample_origin, token_digest

TOKENS = np.array([5, 6, 7, 8], dtype=np.int32)
GOOD = RouteRecord(np.array([[[0, 3], [2, 1]]] * 3, dtype=np.uint8), (1, 4), 4, token_digest(TOKENS))


def edited(**changes: Any) -> RouteRecord:
    return replace(GOOD, **changes)


def test_a_good_record_passes() -> None:
    GOOD.validate(num_tokens=4)
    GOOD.check_tokens(TOKENS)
    edited(experts=GOOD.experts[:0]).validate(num_tokens=1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (edited(experts=GOOD.experts[0]), "shape"),
        (edited(experts=GOOD.experts.astype(np.int32)), "dtype"),
        (edited(num_experts=300), "dtype"),
        (edited(layer_ids=(1,)), "layers"),
        (edited(layer_ids=(4, 1)), "layers"),
        (edited(layer_ids=(1, 1)), "layers"),
        (edited(experts=GOOD.experts[:2]), "rows"),
        (edited(experts=GOOD.experts[:, :, :0]), "shape"),
        (edited(experts=GOOD.experts + np.uint8(1)), "range"),
        (edited(experts=np.where(GOOD.experts == 3, np.uint8(0), GOOD.experts)), "duplicate"),
    ],
)
def test_each_violation_has_its_reason(bad: RouteRecord, reason: str) -> None:
    with pytest.raises(RouteError) as error:
        bad.validate(num_tokens=4)
    assert error.value.reason == reason


def test_errors_name_the_place() -> None:
    experts = GOOD.experts.copy()
    experts[2, 1] = [3, 3]
    with pytest.raises(RouteError, match=r"row 2, layer 4.*\[3, 3\]"):
        edited(experts=experts).validate()


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [2, 5000])
def test_duplicates_are_found_between_any_two_places(rows: int, top_k: int) -> None:
    for first in range(top_k):
        for second in range(first + 1, top_k):
            experts = np.tile(np.arange(top_k, dtype=np.uint16), (rows, 1, 1))
            RouteRecord(experts, (0,), 300).validate()
            experts[1, 0, second] = first
            with pytest.raises(RouteError, match="row 1"):
                RouteRecord(experts, (0,), 300).validate()
    RouteRecord(np.tile(np.arange(top_k, dtype=np.uint16), (rows, 1, 1)), (0,), 300).validate()


def test_other_tokens_are_refused() -> None:
    for record, tokens in ((GOOD, TOKENS[::-1]), (GOOD, TOKENS[:3]), (edited(token_digest=None), TOKENS)):
        with pytest.raises(RouteError) as error:
            record.check_tokens(tokens)
        assert error.value.reason == "digest"


def test_tokens_that_differ_beyond_sixteen_bits_are_other_tokens() -> None:
    far = TOKENS + np.array([0, 1 << 16, 0, 0], np.int32)
    assert token_digest(far) != token_digest(TOKENS)
    assert token_digest(TOKENS.astype(np.int64)) == token_digest(TOKENS)


def test_a_bound_record_is_of_one_sample_and_its_versions() -> None:
    versions = np.array([3, 4], np.int32)
    origin = sample_origin(9, versions)
    bound = GOOD.bind(TOKENS, origin)
    bound.check_tokens(TOKENS, origin)
    assert origin == sample_origin(9, versions.astype(np.int64))
    others = [sample_origin(8, versions), sample_origin(9, versions + 1), sample_origin(9, versions[:1])]
    others += [sample_origin(9, np.array([4, 3])), sample_origin(-9, versions), sample_origin(9, versions + (1 << 16))]
    assert len({origin, *others}) == 7
    for record, other in [(GOOD, origin), (bound, b""), *((bound, other) for other in others)]:
        with pytest.raises(RouteError) as error:
            record.check_tokens(TOKENS, other)
        assert error.value.reason == "digest"
    for unfit in (bound, edited(token_digest=None)):
        with pytest.raises(RouteError):
            unfit.bind(TOKENS, origin)


def test_select_keeps_named_layers() -> None:
    chosen = GOOD.select((4,))
    assert chosen.experts.tolist() == [[[2, 1]]] * 3
    chosen.validate(num_tokens=4)
    with pytest.raises(RouteError):
        GOOD.select((2,))


def test_the_package_needs_no_engine() -> None:
    code = (
        "import sys, routing, routing.megatron, routing.sglang; "
        "print([m for m in ('moe_trm', 'megatron', 'sglang') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
