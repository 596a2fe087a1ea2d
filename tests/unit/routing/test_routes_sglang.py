"""SGLang's payload: what is decoded, and every structural violation refused with its reason."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from routing import ReplayProofError, RouteError, RouteRecord, flips, token_digest
from routing.judge.sample_flips import PassFlips, total
from routing.record.sources import ReplayRecords, ReplayReport
from routing.replay.replay_pass import Counters, ReplayPass, judge
from routing.sglang import decode_payload

T, D, K, E = 6, 4, 2, 8
LAYERS = (1, 3)
TOKENS = np.arange(T, dtype=np.int32) + 100


def engine_routes(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((T - 1, D, E)), axis=-1)[..., :K].astype("<i4")


def decode(routes: np.ndarray, **changes: object) -> RouteRecord:
    arguments: dict[str, Any] = {
        "tokens": TOKENS,
        "num_layers": D,
        "layer_ids": LAYERS,
        "num_experts": E,
        "top_k": K,
    } | changes
    return decode_payload(base64.b64encode(routes.tobytes()).decode(), **arguments)


def test_decodes_moe_columns_in_engine_order_and_binds_tokens() -> None:
    routes = engine_routes()
    record = decode(routes)
    assert record.experts.dtype == np.uint8
    np.testing.assert_array_equal(record.experts, routes[:, [1, 3]])
    assert record.layer_ids == LAYERS
    assert record.token_digest == token_digest(TOKENS)


@pytest.mark.parametrize(("dtype", "experts"), [("uint8", 8), ("uint8", 256), ("uint16", 8), ("uint16", 512)])
def test_narrow_ids_are_read_as_they_are_named(dtype: str, experts: int) -> None:
    routes = engine_routes()
    routes[0, 1] = [experts - 1, 0]
    record = decode(routes.astype(np.dtype(dtype).newbyteorder("<")), dtype=dtype, num_experts=experts)
    np.testing.assert_array_equal(record.experts, routes[:, [1, 3]])


@pytest.mark.parametrize(
    ("dtype", "experts"), [("uint8", 257), ("uint16", (1 << 16) + 1), ("int16", 8), ("int64", 8), ("", 8), ("<i4", 8)]
)
def test_a_type_that_is_unknown_or_too_small_is_refused(dtype: str, experts: int) -> None:
    with pytest.raises(RouteError, match="not known or too small") as error:
        decode(engine_routes(), dtype=dtype, num_experts=experts)
    assert error.value.reason == "dtype"


@pytest.mark.parametrize(("sent", "named"), [("<i4", "uint8"), ("<i4", "uint16"), ("u1", "int32"), ("<u2", "uint8")])
def test_a_payload_of_another_type_than_named_is_refused(sent: str, named: str) -> None:
    with pytest.raises(RouteError) as error:
        decode(engine_routes().astype(sent), dtype=named)
    assert error.value.reason in ("rows", "payload")


def test_dense_columns_are_never_validated() -> None:
    routes = engine_routes()
    routes[:, [0, 2]] = -1
    np.testing.assert_array_equal(decode(routes).experts, routes[:, [1, 3]])


def test_more_than_256_experts_need_uint16() -> None:
    routes = engine_routes()
    routes[0, 1] = [300, 7]
    record = decode(routes, num_experts=512)
    assert record.experts.dtype == np.uint16
    assert record.experts[0, 0].tolist() == [300, 7]


@pytest.mark.parametrize("bad", [-1, E, 256, 2**31 - 1, -(2**31), 256 + 3])
def test_out_of_range_ids_are_refused_before_narrowing(bad: int) -> None:
    routes = engine_routes()
    routes[2, 3, 1] = bad
    with pytest.raises(RouteError, match="row 2, layer 3") as error:
        decode(routes)
    assert error.value.reason == "range"


def test_duplicate_experts_are_refused() -> None:
    routes = engine_routes()
    routes[4, 1] = 5
    with pytest.raises(RouteError, match="row 4, layer 1") as error:
        decode(routes)
    assert error.value.reason == "duplicate"


@pytest.mark.parametrize(("cut", "reason"), [(1, "payload"), (4, "payload"), (4 * K, "payload"), (4 * K * D, "rows")])
def test_short_payload_is_refused(cut: int, reason: str) -> None:
    payload = base64.b64encode(engine_routes().tobytes()[:-cut])
    with pytest.raises(RouteError) as error:
        decode_payload(payload, tokens=TOKENS, num_layers=D, layer_ids=LAYERS, num_experts=E, top_k=K)
    assert error.value.reason == reason


@pytest.mark.parametrize("payload", ["not base64!", "abc", "AAAA\n", "ünïcode"])
def test_text_that_is_not_base64_is_refused(payload: str) -> None:
    with pytest.raises(RouteError) as error:
        decode_payload(payload, tokens=TOKENS, num_layers=D, layer_ids=LAYERS, num_experts=E, top_k=K)
    assert error.value.reason == "payload"


def test_long_payloads_are_decoded_in_parts() -> None:
    """Damage in any part is found, and the row it names is that of the whole."""
    rows = 70_000
    routes = np.tile(engine_routes(), (rows // (T - 1), 1, 1))
    tokens = np.arange(rows + 1, dtype=np.int32)
    np.testing.assert_array_equal(decode(routes, tokens=tokens).experts, routes[:, [1, 3]])
    payload = base64.b64encode(routes.tobytes())
    routes[60_000, 3, 1] = -1
    with pytest.raises(RouteError, match="row 60000, layer 3"):
        decode(routes, tokens=tokens)
    for place in (0, len(payload) // 2 // 4 * 4, len(payload) - 8):
        damaged = payload[:place] + b"AA==" + payload[place + 4 :]
        with pytest.raises(RouteError) as error:
            decode_payload(damaged, tokens=tokens, num_layers=D, layer_ids=LAYERS, num_experts=E, top_k=K)
        assert error.value.reason == "payload"


def test_missing_payload_is_refused() -> None:
    missing: Any = None
    with pytest.raises(RouteError) as error:
        decode_payload(missing, tokens=TOKENS, num_layers=D, layer_ids=LAYERS, num_experts=E, top_k=K)
    assert error.value.reason == "payload"


def test_extra_rows_and_wrong_tokens_are_refused() -> None:
    with pytest.raises(RouteError) as error:
        decode(engine_routes(), tokens=TOKENS[:-1])
    assert error.value.reason == "rows"


@pytest.mark.parametrize("layers", [(), (3, 1), (1, 1), (1, 4), (-1, 2)])
def test_layer_ids_must_fit_the_payload(layers: tuple[int, ...]) -> None:
    with pytest.raises(RouteError) as error:
        decode(engine_routes(), layer_ids=layers)
    assert error.value.reason == "layers"


def test_ten_thousand_mutated_payloads_never_crash_or_break_an_invariant() -> None:
    """SGLang's payload has no checksum: a mutation is refused, or gives a legal record.

    That record differs from the original only where it was hit.
    """
    rng = np.random.default_rng(0)
    original = engine_routes()
    whole = original.tobytes()
    refused = 0
    for _ in range(10_000):
        data = bytearray(whole)
        kind = rng.integers(4)
        if kind == 0:
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        elif kind == 1:
            del data[rng.integers(len(data)) :]
        elif kind == 2:
            data += bytes(rng.integers(0, 256, rng.integers(1, 40), dtype=np.uint8))
        else:
            data[4 * rng.integers(len(data) // 4)] = rng.integers(256)
        try:
            record = decode_payload(
                base64.b64encode(data), tokens=TOKENS, num_layers=D, layer_ids=LAYERS, num_experts=E, top_k=K
            )
        except RouteError:
            refused += 1
            continue
        record.validate(T)
        assert (record.experts != original[:, [1, 3]]).any(-1).sum() <= 1, "at most the set that was hit"
    assert refused > 6000


def test_a_legal_id_flipped_into_another_legal_one_is_seen_by_nobody_and_shows_as_one_local_flip() -> None:
    """Nothing in the payload could tell; docs/routes.md says so.

    It costs one token-layer of replay, and is counted as such.
    """
    routes = engine_routes()
    sent = decode(routes)
    routes[2, 3] = [(routes[2, 3, 0] + 1) % E, routes[2, 3, 1]]
    if routes[2, 3, 0] == routes[2, 3, 1]:
        routes[2, 3, 0] = (routes[2, 3, 0] + 1) % E
    received = decode(routes)
    assert flips(sent, received).token_layer_rate == 1 / (2 * (T - 1))
    report = judged(replayed(sent.experts, received.experts))
    assert (report.local_flips, report.applied_fraction) == (1, 1.0)


@pytest.mark.parametrize("share", [0.31, 0.5, 1.0])
def test_payloads_damaged_beyond_the_flip_bound_stop_the_step(share: float) -> None:
    """A payload of legal but wrong ids in a share of one layer's rows above `max_local_flip_rate` is refused."""
    sent = np.argsort(np.random.default_rng(1).random((200, len(LAYERS), E)), axis=-1)[..., :K].astype(np.uint8)
    received = sent.copy()
    received[: int(200 * share) + 1, 1] = (sent[: int(200 * share) + 1, 1] + 1) % E
    with pytest.raises(ReplayProofError, match="too often"):
        judged(replayed(sent, received))


def same_rows(used: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (used == expected).all(1)


def judged(found: tuple[torch.Tensor, PassFlips]) -> ReplayReport:
    counters, flips = found
    return judge(counters, 0.3, total([flips], len(counters)), K, E)


def replayed(live: np.ndarray, records: np.ndarray) -> tuple[torch.Tensor, PassFlips]:
    """Counters of a forward whose routers chose `live` and were given `records`, both `[N, L, K]`."""
    cpu, layers = torch.device("cpu"), range(len(LAYERS))
    flips = PassFlips([0], torch.tensor([len(live)]), layers, len(LAYERS), sample_last=False, device=cpu)
    counters = Counters(len(LAYERS), torch.device("cpu"))
    opened = ReplayPass(ReplayRecords(()), range(len(LAYERS)), len(live), counters)
    chosen = {layer: torch.from_numpy(records[:, layer].astype(np.int64)) for layer in opened.layer_ids}
    opened.targets = opened.expected = chosen
    opened.expect(torch.ones(len(live), dtype=torch.bool), None, cpu, flips)
    for layer in opened.layer_ids:
        used = opened.choose(layer, torch.from_numpy(live[:, layer].astype(np.int64)), recompute=False)
        opened.prove(layer, partial(same_rows, used), recompute=False)
    return counters.take(torch.zeros(len(counters), 0, dtype=torch.int64)), flips
