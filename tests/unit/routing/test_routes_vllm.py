"""vLLM's payload: what is decoded, and every structural violation refused with its reason."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from routing import RouteError, RouteRecord, token_digest
from routing.vllm import decode_payload

T, D, K, E = 7, 4, 2, 8
LAYERS = (1, 3)
TOKENS = np.arange(T, dtype=np.int32) + 100


def engine_routes(seed: int = 0, dtype: str = "uint8") -> np.ndarray:
    """Dense layers are zeros, as the server's buffer leaves them."""
    routes = np.argsort(np.random.default_rng(seed).random((T - 1, D, E)), axis=-1)[..., :K].astype(dtype)
    routes[:, [0, 2]] = 0
    return routes


def packed(array: np.ndarray, **options: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, **options)
    return base64.b64encode(file.getvalue()).decode()


def decode(payload: Any, **changes: Any) -> RouteRecord:
    arguments: dict[str, Any] = {
        "tokens": TOKENS,
        "num_layers": D,
        "layer_ids": LAYERS,
        "num_experts": E,
        "top_k": K,
    } | changes
    return decode_payload(payload, **arguments)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", ">u2", ">i4"])
def test_decodes_moe_columns_in_engine_order_and_binds_tokens(dtype: str) -> None:
    routes = engine_routes(dtype=dtype)
    record = decode(packed(routes))
    assert record.experts.dtype == np.uint8
    np.testing.assert_array_equal(record.experts, routes[:, [1, 3]])
    assert record.layer_ids == LAYERS
    assert record.token_digest == token_digest(TOKENS)


def test_columns_may_come_first_in_memory() -> None:
    routes = np.asfortranarray(engine_routes())
    np.testing.assert_array_equal(decode(packed(routes)).experts, routes[:, [1, 3]])


@pytest.mark.parametrize("start", [0, 1, 4])
def test_rows_from_the_one_that_was_asked_for(start: int) -> None:
    record = decode(packed(engine_routes()[start:]), start=start)
    np.testing.assert_array_equal(record.experts, engine_routes()[start:, [1, 3]])
    assert record.token_digest == token_digest(TOKENS)


@pytest.mark.parametrize("prompt", [1, 3, 6])
def test_rows_of_the_prompt_may_come_apart(prompt: int) -> None:
    routes = engine_routes()
    rest = packed(routes[prompt:].astype("uint16")) if prompt < T - 1 else None
    record = decode(rest, prompt_payload=packed(routes[:prompt]), num_prompt_tokens=prompt)
    np.testing.assert_array_equal(record.experts, routes[:, [1, 3]])


def test_more_than_256_experts_need_uint16() -> None:
    routes = engine_routes(dtype="uint16")
    routes[0, 1] = [511, 0]
    record = decode(packed(routes), num_experts=512)
    assert record.experts.dtype == np.uint16
    assert record.experts[0, 0].tolist() == [511, 0]


def changed(change: str) -> tuple[Any, dict[str, Any]]:
    routes, options = engine_routes(dtype="int32"), dict[str, Any]()
    if change == "short":
        routes = routes[:-1]
    elif change == "long":
        routes = np.concatenate([routes, routes[-1:]])
    elif change == "two dimensions":
        routes = routes.reshape(T - 1, -1)
    elif change == "other top-k":
        routes = routes[..., :1]
    elif change == "moe layers alone":
        routes = routes[:, list(LAYERS)]
    elif change == "negative":
        routes[2, 1, 0] = -1
    elif change == "negative that wraps":
        routes[2, 1, 0] = -256 + 3
    elif change == "too large":
        routes[2, 3, 1] = E
    elif change == "twice":
        routes[2, 3] = [4, 4]
    elif change == "never filled":
        routes[2] = 0
    elif change in ("int64", "int16", "float32", "bool"):
        routes = routes.astype(change)
    elif change == "another start":
        options = {"start": 1}
    elif change == "layers":
        options = {"layer_ids": (3, 1)}
    elif change == "prompt without length":
        options = {"prompt_payload": packed(routes[:2])}
    elif change == "prompt too short":
        return packed(routes[3:]), {"prompt_payload": packed(routes[:2]), "num_prompt_tokens": 3}
    elif change == "answer missing":
        return None, {"prompt_payload": packed(routes[:3]), "num_prompt_tokens": 3}
    elif change == "objects":
        return packed(np.array([{"a": 1}], dtype=object), allow_pickle=True), {}
    else:
        raise AssertionError(change)
    return packed(routes), options


REASONS = {
    "short": "rows", "long": "rows", "two dimensions": "shape", "other top-k": "shape", "moe layers alone": "shape",
    "negative": "range", "negative that wraps": "range", "too large": "range", "twice": "duplicate",
    "never filled": "duplicate", "int64": "dtype", "int16": "dtype", "float32": "dtype", "bool": "dtype",
    "another start": "rows", "layers": "layers", "prompt without length": "rows",
    "prompt too short": "rows", "answer missing": "payload", "objects": "dtype",
}  # fmt: skip


@pytest.mark.parametrize("change", REASONS)
def test_what_breaks_a_rule_is_refused_with_its_reason(change: str) -> None:
    payload, options = changed(change)
    with pytest.raises(RouteError) as error:
        decode(payload, **options)
    assert error.value.reason == REASONS[change]


def damaged(change: str) -> Any:
    good = packed(engine_routes())
    raw = base64.b64decode(good)
    if change == "raw ids":
        return base64.b64encode(engine_routes().tobytes()).decode()
    return {
        "missing": None,
        "a list": [1, 2],
        "empty": "",
        "not base64": good[:-5] + "!" + good[-4:],
        "cut": base64.b64encode(raw[:-3]).decode(),
        "cut header": base64.b64encode(raw[:20]).decode(),
        "bytes behind": base64.b64encode(raw + b"\0").decode(),
        "other header": base64.b64encode(raw.replace(b"'shape'", b"'shapf'")).decode(),
        "huge shape": base64.b64encode(raw.replace(b"(6, 4, 2)", b"(6,4,9**9)")).decode(),
        "code in the header": base64.b64encode(raw.replace(b"(6, 4, 2)", b"exit(3)  ")).decode(),
    }[change]


@pytest.mark.parametrize(
    "change",
    ["missing", "a list", "empty", "not base64", "cut", "cut header", "bytes behind", "other header", "huge shape",
     "code in the header", "raw ids"],
)  # fmt: skip
def test_damaged_payloads_are_refused(change: str) -> None:
    with pytest.raises(RouteError) as error:
        decode(damaged(change))
    assert error.value.reason == "payload"


def test_no_mutation_of_the_bytes_raises_anything_else() -> None:
    raw, rng = base64.b64decode(packed(engine_routes())), np.random.default_rng(0)
    for _ in range(2000):
        changed_bytes = bytearray(raw)
        for place in rng.integers(0, len(raw), size=rng.integers(1, 4)):
            changed_bytes[place] = rng.integers(0, 256)
        try:
            record = decode(base64.b64encode(changed_bytes).decode())
        except RouteError:
            continue
        record.validate(T)
