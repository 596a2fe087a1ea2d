"""Flip rates against numbers worked by hand and a naive loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import routing
from routing import Layout, RouteError, RouteRecord
from routing.judge.flips import flipped_tokens, gate_weight_shift, router_margin
from routing.record.sources import Recorded
from tests.unit.routing.cuts import local_targets

# Four token-layers of E=6, K=2: {0,1}|{1,0}, {2,3}|{2,4}, {1,0}|{1,0}, {0,4}|{3,4}.
LEFT = np.array([[[0, 1]], [[2, 3]], [[1, 0]], [[0, 4]]], dtype=np.uint8)
RIGHT = np.array([[[1, 0]], [[2, 4]], [[1, 0]], [[3, 4]]], dtype=np.uint8)


def test_numbers_worked_by_hand() -> None:
    result = routing.flips(LEFT, RIGHT, num_experts=6)
    assert result.num_token_layers == 4
    assert result.token_layer_rate == 0.5
    assert result.overlap_loss == 0.25
    assert result.expert_delta == pytest.approx(1 / 6)
    np.testing.assert_allclose(result.per_expert, [0.25, 0, 0, 0.5, 0.25, 0])
    assert result.per_layer.tolist() == [0.5]


def test_any_layer_and_per_layer() -> None:
    left, right = LEFT.reshape(2, 2, 2), RIGHT.reshape(2, 2, 2)
    result = routing.flips(RouteRecord(left, (0, 1), 6), RouteRecord(right, (0, 1), 6))
    assert result.token_any_layer_rate == 1.0
    assert result.per_layer.tolist() == [0.0, 1.0]


def test_masks_leave_rows_and_layers_out() -> None:
    left, right = LEFT.reshape(2, 2, 2), RIGHT.reshape(2, 2, 2)
    assert routing.flips(left, right, np.array([True, False])).token_layer_rate == 0.5
    layers = np.array([[True, False], [True, False]])
    result = routing.flips(left, right, torch.from_numpy(layers))
    assert (result.token_layer_rate, result.token_any_layer_rate, result.num_token_layers) == (0.0, 0.0, 2)
    assert routing.flips(left, right, np.zeros(2, dtype=bool)).token_layer_rate == 0.0


def test_rows_that_were_not_recorded_must_be_masked() -> None:
    missing = LEFT.astype(np.int64)
    missing[1] = -1
    with pytest.raises(RouteError) as error:
        routing.flips(missing, RIGHT.astype(np.int64))
    assert error.value.reason == "range"
    assert routing.flips(
        missing, RIGHT.astype(np.int64), np.array([True, False, True, True])
    ).token_layer_rate == pytest.approx(1 / 3)


def test_what_does_not_compare_is_refused() -> None:
    for a, b, mask in ((LEFT, RIGHT[:3], None), (LEFT, RIGHT, np.ones(3, dtype=bool)), (LEFT, RIGHT, np.ones(4))):
        with pytest.raises(RouteError) as error:
            routing.flips(a, b, mask)
        assert error.value.reason == "shape"
    with pytest.raises(RouteError) as error:
        routing.flips(RouteRecord(LEFT, (0,), 6), RouteRecord(RIGHT, (1,), 6))
    assert error.value.reason == "layers"


@settings(max_examples=30)
@given(st.integers(0, 6), st.integers(1, 3), st.integers(1, 5), st.integers(0, 1000))
def test_equals_a_naive_loop(rows: int, layers: int, top_k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (np.argsort(rng.random((rows, layers, 6)), axis=-1)[..., :top_k] for _ in range(2))
    mask = rng.random((rows, layers)) < 0.7
    places = [(row, layer) for row in range(rows) for layer in range(layers) if mask[row, layer]]
    kept = [(set(a[place].tolist()), set(b[place].tolist())) for place in places]
    result = routing.flips(a, b, mask, num_experts=6)
    count = max(len(kept), 1)
    assert result.token_layer_rate == pytest.approx(sum(x != y for x, y in kept) / count)
    assert result.overlap_loss == pytest.approx(sum(1 - len(x & y) / top_k for x, y in kept) / count)
    assert result.expert_delta == pytest.approx(sum(len(x ^ y) for x, y in kept) / 6 / count)
    assert result.expert_delta == pytest.approx(2 * top_k * result.overlap_loss / 6)


def test_flipped_tokens_of_a_pass() -> None:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((5, 2, 6)), axis=-1)[..., :2].astype(np.uint8)
    records = (RouteRecord(experts, (0, 2), 6), None)
    layout = Layout(2, 6)
    used = local_targets(records, layout, (0, 2), 6, 2)
    used[2][3 * 2] = torch.tensor([e for e in range(6) if e not in experts[3, 1].tolist()][:2])
    used[0][1 * 2] = used[0][1 * 2].flip(0)
    flipped = flipped_tokens(Recorded(used, layout=layout), records, layout.length)
    assert flipped.nonzero().tolist() == [[0, 3, 1]]
    # A row without recorded routes is not compared, whatever stands there.
    holed = (records[0].uncover(slice(3, 5)), None)
    assert not flipped_tokens(Recorded(used, layout=layout), holed, layout.length).any()
    shards = [Layout(2, 6, sp_size=2, sp_rank=rank) for rank in range(2)]
    parts = [
        flipped_tokens(Recorded({2: used[2].chunk(2)[rank]}, layout=shards[rank]), records, layout.length)
        for rank in range(2)
    ]
    assert (parts[0] | parts[1]).nonzero().tolist() == [[0, 3, 0]]
    assert not parts[0].any()


def test_margin_is_the_gap_at_the_cut() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    torch.testing.assert_close(router_margin(scores, 2), torch.tensor([0.15]))
    torch.testing.assert_close(router_margin(scores, 1), torch.tensor([0.2]))
    torch.testing.assert_close(router_margin(scores.expand(3, 2, -1), 2), torch.full((3, 2), 0.15))


def test_gate_weights_are_compared_on_common_experts_only() -> None:
    ids_a, ids_b = torch.tensor([[3, 1], [0, 1]]), torch.tensor([[1, 2], [2, 3]])
    shift = gate_weight_shift(
        ids_a, torch.tensor([[0.7, 0.3], [0.5, 0.5]]), ids_b, torch.tensor([[0.4, 0.6], [0.5, 0.5]])
    )
    torch.testing.assert_close(shift[0], torch.tensor(0.1))
    assert shift[1].isnan()
