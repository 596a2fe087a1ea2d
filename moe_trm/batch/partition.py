"""Rows of unlike lengths as micro-batches under a budget of padded tokens, shared evenly by data-parallel ranks.

A micro-batch costs its number of rows times its longest row. Ranks wait for each other (for the gradient, and with
expert parallelism in every micro-batch), so what counts is the most loaded one. Pure integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

Bin = list[int]
"""Indices of rows, longest row first."""

ENOUGH = 1.05
"""Bound on the load of the most loaded rank over the mean.

More micro-batches than the minimum are made only until the ratio is below this.
"""


def partition(lengths: Sequence[int], num_ranks: int, budget: int) -> list[list[Bin]]:
    """Cut rows of `lengths` tokens into micro-batches: `result[rank][i]` are the rows of one, at most `budget` padded
    tokens.

    Every rank has the same number of micro-batches; the last ones may be empty. Rows are sorted by length and cut into
    runs, so that little is padded. The number of micro-batches is the smallest that the budget allows, or a little more
    where that balances the ranks. For that number, the largest micro-batch is as small as possible.
    """
    assert all(0 < length <= budget for length in lengths), "every row fits into a micro-batch"
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    fewest = max(1, -(-len(_runs(lengths, order, budget)) // num_ranks))
    best, best_load = _shares(lengths, order, num_ranks, fewest, budget), float("inf")
    for num_micro in range(fewest, max(fewest + 3, 2 * fewest) + 1):
        shares = _shares(lengths, order, num_ranks, num_micro, budget)
        load = imbalance(lengths, shares)
        if load < best_load:
            best, best_load = shares, load
        if load < ENOUGH:
            break
    return best


def cost(lengths: Sequence[int], rows: Bin) -> int:
    """Padded tokens of a micro-batch of `rows`."""
    return len(rows) * max((lengths[i] for i in rows), default=0)


def imbalance(lengths: Sequence[int], shares: Sequence[Sequence[Bin]]) -> float:
    """Padded tokens of the most loaded rank over the mean of all ranks; 1 is even."""
    loads = [sum(cost(lengths, rows) for rows in share) for share in shares]
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


def _shares(
    lengths: Sequence[int], order: Sequence[int], num_ranks: int, num_micro: int, budget: int
) -> list[list[Bin]]:
    """`num_micro` micro-batches for each rank: in turn, the costliest left for the rank that has least so far."""
    num_bins = num_ranks * num_micro
    bins = _split(lengths, _runs(lengths, order, _smallest_limit(lengths, order, num_bins, budget)), num_bins)
    bins.sort(key=lambda rows: -cost(lengths, rows))
    shares: list[list[Bin]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for start in range(0, num_bins, num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: loads[rank])
        for rank, rows in zip(lightest_first, bins[start : start + num_ranks], strict=True):
            shares[rank].append(rows)
            loads[rank] += cost(lengths, rows)
    return shares


def _runs(lengths: Sequence[int], order: Sequence[int], limit: int) -> list[Bin]:
    """Runs of `order` (longest first), each as long as `limit` padded tokens allow: no other cut makes fewer."""
    runs, start = [], 0
    while start < len(order):
        size = limit // lengths[order[start]]
        runs.append(list(order[start : start + size]))
        start += size
    return runs


def _smallest_limit(lengths: Sequence[int], order: Sequence[int], num_bins: int, budget: int) -> int:
    """The smallest limit at which `_runs` makes at most `num_bins` runs."""
    low, high = lengths[order[0]] if order else budget, budget
    while low < high:
        middle = (low + high) // 2
        if len(_runs(lengths, order, middle)) <= num_bins:
            high = middle
        else:
            low = middle + 1
    return low


def _split(lengths: Sequence[int], bins: Sequence[Bin], num_bins: int) -> list[Bin]:
    """`num_bins` bins: again and again the cut that saves most padding, and empty bins once every bin has one row.

    Where several cuts save the same, the last one is made. A bin is known by its first row's place among all rows.
    """
    places = accumulate((len(rows) for rows in bins), initial=0)
    bin_at = dict(zip(places, bins, strict=False))
    cuts = [_best_cut(lengths, rows, place) for place, rows in bin_at.items() if len(rows) > 1]
    heapify(cuts)
    while cuts and len(bin_at) < num_bins:
        _, last, later = heappop(cuts)
        place, at = -last, -later
        rows = bin_at[place]
        for begin, part in ((place, rows[:at]), (place + at, rows[at:])):
            bin_at[begin] = part
            if len(part) > 1:
                heappush(cuts, _best_cut(lengths, part, begin))
    return [bin_at[place] for place in sorted(bin_at)] + [[] for _ in range(num_bins - len(bin_at))]


def _best_cut(lengths: Sequence[int], rows: Bin, place: int) -> tuple[int, int, int]:
    """Padded tokens that the best cut of a bin saves, the bin's place, and the rows before the cut: all negative."""
    longest = lengths[rows[0]]
    saved, at = max(((len(rows) - at) * (longest - lengths[rows[at]]), at) for at in range(1, len(rows)))
    return -saved, -place, -at
