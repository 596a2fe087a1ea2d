"""Rows of unlike lengths as packs under a budget of tokens, shared evenly by data-parallel ranks. Pure integers.

A pack costs the tokens of its rows. Ranks wait for each other, so packs are made as even as they can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moe_trm.batch.partition import Bin


def pack(lengths: Sequence[int], num_ranks: int, budget: int) -> list[list[Bin]]:
    """Cut rows of `lengths` tokens into packs of at most `budget`: `result[rank][i]` are the rows of one, longest
    first.

    Every rank has the same number of packs, the fewest at which the longest row goes to the emptiest pack in turn and
    all stay under the budget. Packs that different ranks compute at the same time have like numbers of tokens. The
    last ones may be empty.
    """
    assert all(0 < length <= budget for length in lengths), "every row fits into a pack"
    num_packs = max(1, -(-sum(lengths) // (budget * num_ranks)))
    packs = _even(lengths, num_ranks * num_packs)
    while max(packed_load(lengths, [rows]) for rows in packs) > budget:
        num_packs += 1
        packs = _even(lengths, num_ranks * num_packs)
    return _dealt(lengths, packs, num_ranks)


def packed_load(lengths: Sequence[int], share: Sequence[Bin]) -> int:
    """Tokens of a rank's packs."""
    return sum(lengths[row] for rows in share for row in rows)


def _even(lengths: Sequence[int], number: int) -> list[Bin]:
    """`number` packs: each row, longest first, into the one that has least."""
    packs: list[Bin] = [[] for _ in range(number)]
    heap = [(0, index) for index in range(number)]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        load, index = heapq.heappop(heap)
        packs[index].append(row)
        heapq.heappush(heap, (load + lengths[row], index))
    return packs


def _dealt(lengths: Sequence[int], packs: list[Bin], num_ranks: int) -> list[list[Bin]]:
    """In turn, the fullest packs left, the fullest of them to the rank that has least so far."""
    packs = sorted(packs, key=lambda rows: -packed_load(lengths, [rows]))
    shares: list[list[Bin]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(packs), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: packed_load(lengths, shares[rank]))
        for rank, rows in zip(lightest_first, packs[start : start + num_ranks], strict=True):
            shares[rank].append(rows)
    return shares
