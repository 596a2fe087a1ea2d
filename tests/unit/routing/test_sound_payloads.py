"""Payloads that are decoded together become the records that each would by itself, or none at all."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from routing import RouteError, RouteRecord
from routing.sglang import PAYLOAD_BYTES, decode_payload, sound_payloads

MODEL: dict[str, Any] = {"num_layers": 3, "layer_ids": (0, 2), "num_experts": 8, "top_k": 2}
TOKENS = [[5, 6, 7, 8], [9, 5, 2**31 - 1], [1, 2, 3, 4, 5, 6]]
STARTS = [0, 1, 2]


def routes(seed: int = 0, dtype: str = "int32") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = [len(tokens) - 1 - start for tokens, start in zip(TOKENS, STARTS, strict=True)]
    return [rng.random((number, 3, 8)).argsort(axis=-1)[..., :2].astype(np.dtype(dtype)) for number in rows]


def payloads(arrays: list[np.ndarray]) -> list[bytes]:
    return [base64.b64encode(array.tobytes()) for array in arrays]


def together(found: list[bytes], **other: Any) -> list[RouteRecord] | None:
    return sound_payloads(found, tokens=TOKENS, starts=STARTS, **(MODEL | other))


def each(found: list[bytes], **other: Any) -> list[RouteRecord]:
    return [
        decode_payload(payload, tokens=np.array(tokens, np.int32), start=start, **(MODEL | other))
        for payload, tokens, start in zip(found, TOKENS, STARTS, strict=True)
    ]


@pytest.mark.parametrize("dtype", PAYLOAD_BYTES)
@pytest.mark.parametrize("layers", [(0, 2), (0, 1, 2), (1,)])
def test_the_records_are_those_of_each_payload(dtype: str, layers: tuple[int, ...]) -> None:
    found = payloads(routes(dtype=dtype))
    records = together(found, dtype=dtype, layer_ids=layers)
    assert records is not None
    for record, expected in zip(records, each(found, dtype=dtype, layer_ids=layers), strict=True):
        assert np.array_equal(record.experts, expected.experts)
        assert record.experts.dtype == expected.experts.dtype
        assert (record.layer_ids, record.num_experts, record.token_digest, record.order, record.covered) == (
            expected.layer_ids,
            expected.num_experts,
            expected.token_digest,
            expected.order,
            expected.covered,
        )


def test_payloads_without_rows_are_sound() -> None:
    record = sound_payloads([b""], tokens=[[5]], starts=[0], **MODEL)
    assert record is not None
    assert record[0].experts.shape == (0, 2, 2)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [-1, 8, 2**31 - 1, -(2**31), "twice"])
def test_an_id_that_is_wrong_anywhere_makes_none_sound(place: int, value: Any) -> None:
    found = routes()
    found[place][-1, 2, 1] = found[place][-1, 2, 0] if value == "twice" else value
    assert together(payloads(found)) is None


def test_an_id_of_a_layer_that_is_not_wanted_does_not_matter() -> None:
    found = routes()
    found[0][0, 1] = -1
    assert together(payloads(found)) is not None


def test_rows_of_the_next_payload_make_none_sound() -> None:
    """All rows together are as many as there should be."""
    first, second, third = routes()
    moved = [first[:-1], np.concatenate([first[-1:], second]), third]
    assert together(payloads(moved)) is None


DAMAGES = {"cut": b"AAAA", "padding": b"AA==", "no base64": b"AA-A", "a break": b"AA\nA"}


@pytest.mark.parametrize("end", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_payload_makes_none_sound(end: bytes) -> None:
    good = payloads(routes())
    damaged = [good[0], good[1], good[2][:-4] + end if end != DAMAGES["cut"] else good[2][:-4]]
    assert together(damaged) is None
    with pytest.raises(RouteError):
        each(damaged)


@pytest.mark.parametrize("end", [b"=", b"==", b"A", b"===="])
def test_characters_behind_the_end_make_none_sound(end: bytes) -> None:
    good = payloads(routes())
    assert together([*good[:2], good[2] + end]) is None


WRONG: list[dict[str, Any]] = [
    {"dtype": "int64"},
    {"dtype": "uint8", "num_experts": 257},
    {"layer_ids": (2, 0)},
    {"layer_ids": (0, 3)},
    {"num_experts": 1},
    {"top_k": 3},
]


@pytest.mark.parametrize("other", WRONG, ids=str)
def test_what_does_not_fit_the_model_makes_none_sound(other: dict[str, Any]) -> None:
    found = payloads([np.zeros_like(array) for array in routes()])
    assert together(found, **other) is None
    with pytest.raises(RouteError):
        each(found, **other)
