"""Rows of decoded requests against attention of each request alone: who comes, goes, returns and is replaced.

Shape letters: as in `dense_rows`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu import dense_rows
from moe_trm_sglang_cpu.dense_rows import DenseRows

H, G, D, V, LAYERS, SLOTS, SCALING = 4, 2, 8, 8, 2, 3000, 0.3


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests come into rows at once."""
    monkeypatch.setattr(dense_rows, "FEWEST_PLACES", 1)
    monkeypatch.setattr(DenseRows, "_is_steady", lambda self: True)


class Pool:
    """SGLang's cache and table, with the requests that run: their rows there and their lengths."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.table = torch.zeros(40, 400, dtype=torch.int32)
        self.free = torch.randperm(SLOTS, generator=self.generator).tolist()
        self.caches = [(self.random(SLOTS, G, D), self.random(SLOTS, G, V)) for _ in range(LAYERS)]
        self.lengths: dict[int, int] = {}
        self.rows = DenseRows(self.table, LAYERS, G, (D, V), dtype)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def add(self, row: int, length: int) -> None:
        """A prefill of a request into this row of the table."""
        self.table[row, :length] = torch.tensor([self.free.pop() for _ in range(length)])
        for keys, values in self.caches:
            slots = self.table[row, :length].long()
            keys[slots], values[slots] = self.random(length, G, D), self.random(length, G, V)
        self.lengths[row] = length
        self.rows.changed(torch.tensor([row]))

    def drop(self, row: int) -> None:
        """Its slots are the next that are given away, in the same order."""
        self.free += reversed(self.table[row, : self.lengths.pop(row)].tolist())

    def decode(self, *order: int) -> bool:
        """One pass, held against each request alone; True if it went by the rows."""
        owners = list(order) or list(self.lengths)
        for row in owners:
            self.table[row, self.lengths[row]] = self.free.pop()
            self.lengths[row] += 1
        lengths = torch.tensor([self.lengths[row] for row in owners])
        step = self.rows.step(torch.tensor(owners), lengths)
        for layer, (keys, values) in enumerate(self.caches):
            new = self.random(len(owners), H, D), self.random(len(owners), G, D), self.random(len(owners), G, V)
            slots = [self.table[row, : self.lengths[row]].long() for row in owners]
            last = torch.stack([found[-1] for found in slots])
            keys[last], values[last] = new[1], new[2]
            if step is not None:
                got = self.rows.attend(step, layer, new, (keys, values), SCALING)
                atol = 1e-5 if self.dtype == torch.float32 else 0.02
                torch.testing.assert_close(got, alone(new[0], keys, values, slots), atol=atol, rtol=1.6e-2)
        return step is not None


def alone(query: Tensor, keys: Tensor, values: Tensor, slots: list[Tensor]) -> Tensor:
    """Attention of each request by itself."""
    found = []
    for one, places in zip(query, slots, strict=True):
        key, value = (cache[places].transpose(0, 1).unsqueeze(0) for cache in (keys, values))
        found.append(scaled_dot_product_attention(one.view(1, G, H // G, D), key, value, scale=SCALING).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_come_and_go(dtype: torch.dtype) -> None:
    """Late ones, rows without a request between others, another order, and one that is alone in the end."""
    pool = Pool(dtype)
    for row in range(6):
        pool.add(row + 3, 10 + 3 * row)
    for _ in range(3):
        assert pool.decode()
    pool.drop(4)
    pool.drop(7)
    assert pool.decode()
    pool.add(20, 31)
    pool.add(4, 5)
    assert pool.decode(8, 3, 20, 5, 4, 6)
    assert pool.decode()
    for row in (3, 5, 6, 20, 4):
        pool.drop(row)
        assert pool.decode()


def test_a_new_request_with_the_row_the_length_and_the_slots_of_an_old_one() -> None:
    pool = Pool()
    pool.add(1, 12)
    pool.add(2, 12)
    for _ in range(3):
        pool.decode()
    length, slots = pool.lengths[2], pool.table[2].clone()
    pool.drop(2)
    pool.add(2, length)
    assert torch.equal(pool.table[2, :length], slots[:length])
    assert pool.decode()


def test_a_request_whose_tokens_have_moved_is_taken_in_again() -> None:
    """Without a prefill, as when requests exchange their tokens."""
    pool = Pool()
    pool.add(1, 12)
    pool.add(2, 12)
    pool.decode()
    pool.table[[1, 2]] = pool.table[[2, 1]].clone()
    assert pool.decode()


def test_a_request_that_rests_for_a_pass_and_one_that_was_forgotten() -> None:
    pool = Pool()
    for row in range(4):
        pool.add(row, 9 + row)
    pool.decode()
    pool.decode(0, 3)
    pool.decode(3, 1, 0)
    pool.rows.forget()
    assert pool.decode()


def test_most_rows_without_requests_are_given_up() -> None:
    pool = Pool()
    for row in range(30):
        pool.add(row, 6)
    pool.decode()
    for row in range(27):
        pool.drop(row)
    assert pool.decode()
    step = pool.rows.step(torch.tensor([27]), torch.tensor([9]))
    assert step is not None
    assert step.used <= 3


def test_rows_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_rows, "FIRST_WIDTH", 16)
    monkeypatch.setattr(dense_rows, "FIRST_HEIGHT", 2)
    pool = Pool()
    pool.add(0, 14)
    for row in range(5):
        pool.add(row + 1, 13)
        assert pool.decode()


def test_batches_that_are_too_large_or_too_unequal_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    pool.add(0, 300)
    for row in range(30):
        pool.add(row + 1, 10)
    assert not pool.decode()
    assert pool.decode(*range(1, 31))
    monkeypatch.setattr(dense_rows, "MOST_NUMBERS", 128 * 8 * LAYERS * G * (D + V))
    small = Pool()
    small.add(0, 100)
    assert small.decode()
    for row in range(1, 9):
        small.add(row, 100)
    assert not small.decode()
    assert small.decode(0, 1)


def test_requests_come_into_rows_when_hardly_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pool = Pool()
    for row in range(35):
        pool.add(row, 36)
    assert [pool.decode() for _ in range(6)] == [False] * 4 + [True] * 2
    pool.drop(7)
    assert pool.decode()
    pool.add(7, 37)
    assert [pool.decode() for _ in range(6)] == [False] * 4 + [True] * 2
    for row in range(12):
        pool.drop(row)
    assert [pool.decode() for _ in range(5)] == [False] * 4 + [True]
    for row in range(12, 34):
        pool.drop(row)
    assert [pool.decode() for _ in range(6)] == [False] * 6
