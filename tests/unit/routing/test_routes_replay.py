"""Targets of a replayed pass: bound to their tokens, cut like them, and cut a second time by other arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from routing import RouteError, RouteRecord, sample_origin, token_digest
from routing.layout.padded import Layout
from routing.record.sources import batch_digest, row_lengths
from routing.replay.proof import due_tokens, same_set, shared
from tests.unit.routing.cuts import check_records, expected_routes, local_targets

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


def test_records_of_the_same_tokens_cannot_be_exchanged() -> None:
    """Two samples, and a sample of older weights, may have the same tokens and other routes."""
    tokens = np.arange(5, dtype=np.int32)
    origins = [
        sample_origin(7, np.array([3, 3])),
        sample_origin(8, np.array([3, 3])),
        sample_origin(7, np.array([2, 3])),
    ]
    records = [record(tokens, seed).bind(tokens, origin) for seed, origin in enumerate(origins)]
    inputs, targets = (torch.from_numpy(part.astype(np.int64)).expand(3, -1) for part in (tokens[:-1], tokens[1:]))
    rows = inputs, targets, torch.ones(3, 4, dtype=torch.bool)
    check_records(records, *rows, origins=origins)
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1), (0, 0, 2)):
        with pytest.raises(RouteError, match="another sample") as error:
            check_records([records[place] for place in order], *rows, origins=origins)
        assert error.value.reason == "digest"
    unbound = [record(tokens, seed) for seed in range(3)]
    check_records(unbound, *rows)
    for some, known in ((unbound, origins), (records, [])):
        with pytest.raises(RouteError) as error:
            check_records(some, *rows, origins=known)
        assert error.value.reason == "digest"
    with pytest.raises(RouteError, match="number of origins"):
        check_records(records, *rows, origins=origins[:2])


@pytest.mark.parametrize("experts", [256, 257, 384, 512])
def test_ids_above_255_are_cut_as_they_are(experts: int) -> None:
    """Ids that differ by 256 would be one id in a byte."""
    ids = np.array([[[0, 255]], [[255, experts - 1 if experts > 256 else 0]], [[experts - 256, experts - 1]]])
    if experts == 256:
        ids[2] = [[0, 255]]
    wide = RouteRecord(ids.astype(np.uint8 if experts == 256 else np.uint16), (0,), experts)
    wide.validate(4)
    layout = Layout(1, 4)
    for cut in (local_targets, expected_routes):
        assert cut([wide], layout, (0,), experts, 2)[0][:3].tolist() == ids[:, 0].tolist()


def test_sets_that_differ_by_256_are_not_the_same() -> None:
    left, right = torch.tensor([[300, 5], [300, 5], [5, 300]]), torch.tensor([[44, 5], [300, 5], [300, 5]])
    assert shared(left, right).tolist() == [1, 2, 2]
    chosen = torch.zeros(2, 384, dtype=torch.bool)
    chosen[0, [300, 5]] = True
    chosen[1, :258] = chosen[1, 300] = True  # 256 more than its two
    chosen[1, 257] = False
    assert same_set(chosen, torch.tensor([[5, 300], [5, 300]])).tolist() == [True, False]


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
            assert (shared(targets[layer][due], expected[layer][due]) == K).all()
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
