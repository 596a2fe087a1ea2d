"""Targets of a replayed pass: bound to their tokens, cut like them, and cut a second time by other arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from routing import RouteError, RouteRecord, token_digest
from routing.layout import Layout
from routing.proof import differs, due_tokens, expected_routes, same_set
from routing.replay import batch_digest, check_records, local_targets, row_lengths

E, K, LAYERS = 8, 2, (0, 2, 3)
LENGTHS = (7, 4, 0)
R = 8


def record(tokens: np.ndarray, seed: int) -> RouteRecord:
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((len(tokens) - 1, len(LAYERS), E)), axis=-1)[..., :K].astype(np.uint8)
    return RouteRecord(experts, LAYERS, E, token_digest(tokens))


def micro_batch() -> tuple[list[RouteRecord | None], torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = [np.arange(length + 1, dtype=np.int32) + 10 * row for row, length in enumerate(LENGTHS)]
    input_ids, target_ids = torch.zeros(3, R, dtype=torch.long), torch.zeros(3, R, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        input_ids[row, :length] = torch.from_numpy(tokens[row][:-1])
        target_ids[row, :length] = torch.from_numpy(tokens[row][1:])
    valid = torch.arange(R)[None] < torch.tensor(LENGTHS)[:, None]
    return [record(tokens[0], 0), record(tokens[1], 1), None], input_ids, target_ids, valid


def test_a_matching_micro_batch_passes() -> None:
    check_records(*micro_batch())


@pytest.mark.parametrize(
    "change", ["swap", "stale", "target", "short", "missing", "superfluous", "count", "hole", "no digest"]
)
def test_records_of_other_tokens_are_refused(change: str) -> None:
    records, input_ids, target_ids, valid = micro_batch()
    first, reason = records[0], "rows"
    assert first is not None
    if change == "swap":
        valid[0], valid[1] = valid[0] & valid[1], valid[0] & valid[1]
        records[0] = replace(first, experts=records[0].experts[:4])
        records[0], records[1], reason = records[1], records[0], "digest"
    elif change == "stale":
        input_ids[1, 2] += 1
        reason = "digest"
    elif change == "target":
        target_ids[0, 6] += 1
        reason = "digest"
    elif change == "short":
        records[0] = replace(first, experts=records[0].experts[1:])
    elif change == "missing":
        records[1] = None
    elif change == "superfluous":
        records[2] = records[1]
    elif change == "count":
        records = records[:2]
    elif change == "hole":
        valid[0, 3] = False
    elif change == "no digest":
        records[0], reason = replace(first, token_digest=None), "digest"
    with pytest.raises(RouteError) as error:
        check_records(records, input_ids, target_ids, valid)
    assert error.value.reason == reason


@pytest.mark.parametrize(("cp", "sp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_targets_equal_the_independent_cut_on_every_rank(cp: int, sp: int) -> None:
    records, _, _, valid = micro_batch()
    seen = 0
    for layout in [Layout(3, R, cp, c, sp, s) for c in range(cp) for s in range(sp)]:
        targets = local_targets(records, layout, LAYERS, E, K)
        expected = expected_routes(records, layout, LAYERS, E, K)
        due = due_tokens(row_lengths(valid), layout)
        seen += int(due.sum())
        for layer in LAYERS:
            assert targets[layer][due].equal(expected[layer][due])
            assert not differs(targets[layer][due], expected[layer][due]).any()
            assert (targets[layer].sort(1).values.diff(dim=1) > 0).all(), "padding must hold distinct ids"
            assert 0 <= int(targets[layer].min()) <= int(targets[layer].max()) < E
    assert seen == sum(LENGTHS)


def test_targets_by_hand() -> None:
    records, *_ = micro_batch()
    targets = local_targets(records, Layout(3, R), (2,), E, K)
    assert targets[2][0].tolist() == records[0].experts[0, 1].tolist()
    assert targets[2][3 * 3 + 1].tolist() == records[1].experts[3, 1].tolist()


def test_a_record_of_another_model_is_refused() -> None:
    records, *_ = micro_batch()
    for arguments, reason in (((1, 2), E, K), "layers"), (((2,), E + 1, K), "shape"), (((2,), E, K + 1), "shape"):
        with pytest.raises(RouteError) as error:
            local_targets(records, Layout(3, R), *arguments)
        assert error.value.reason == reason
    wide = [replace(r, experts=r.experts.astype(np.uint16) + 256) if r else None for r in records]
    with pytest.raises(RouteError) as error:
        local_targets(wide, Layout(3, R), (2,), E, K)
    assert error.value.reason == "dtype"
    with pytest.raises(RouteError) as error:
        local_targets(records, Layout(3, 6), (2,), E, K)
    assert error.value.reason == "rows"


def test_same_set_wants_exactly_the_ids() -> None:
    routing_map = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    assert same_set(routing_map, torch.tensor([[1, 0]] * 4)).tolist() == [True, False, False, False]
    assert same_set(routing_map[3:], torch.tensor([[0, 0]])).tolist() == [False]


def test_batch_digest_sees_tokens_and_shape_but_not_padding() -> None:
    _, input_ids, target_ids, valid = micro_batch()
    first = batch_digest(input_ids, target_ids, valid)
    input_ids[2, 0] = 99
    assert batch_digest(input_ids, target_ids, valid) == first
    input_ids[1, 0] = 99
    assert batch_digest(input_ids, target_ids, valid) != first
