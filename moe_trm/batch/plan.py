"""Plan of a step: minibatches, data-parallel ranks, micro-batches or packs. Deterministic in (seed, step).

Ranks wait for each other, so packs, which cost the tokens of their rows, are made as even as they can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from moe_trm.batch.collate import SHORTEST, forwarded_tokens
from moe_trm.batch.partition import Bin, partition
from moe_trm.config.agent_rules import several_rows
from moe_trm.config.schema import AgentConfig, LossConfig, RolloutConfig
from moe_trm.errors import ConfigError, ControllerError
from moe_trm.methods.losses import needs
from moe_trm.methods.own import is_own
from moe_trm.types import MicroBatch, MiniBatch, TrainRow
from routing.layout.packed import packed_places
from routing.layout.row_ids import row_name

DEFAULT_ROWS = 32
"""Rows of a micro-batch where neither rows nor tokens are given."""


def plan_step(
    rows: Sequence[TrainRow],
    *,
    seed: int,
    step: int,
    minibatches: int,
    data_size: int,
    micro_batch_rows: int | None = None,
    micro_batch_tokens: int | None = None,
    whole_groups: bool = False,
    packed: bool = False,
) -> list[list[MiniBatch]]:
    """Cut one step's rows into `plan[data_rank][minibatch]`. Raises `ControllerError` for a row above
    `micro_batch_tokens`.

    Samples with all their rows are shuffled into minibatches, or with `whole_groups` the prompts with all their
    samples. The ranks share each minibatch by rows, so that one sample's may be on several. With
    `micro_batch_tokens` see `batch.partition`. Else rows are sorted by length and dealt to the ranks back and forth, so
    that ranks get like numbers of tokens and micro-batches like lengths. With `packed` micro-batches get like numbers
    of tokens, and `micro_batch_tokens` counts tokens without padding (`batch.packs`). Every rank gets the same number
    of micro-batches: the last ones may be empty. No minibatch is: where samples, or prompts, are fewer than
    `minibatches`, each of them is one.
    """
    units = _together(rows, (lambda row: row.record.group_id) if whole_groups else (lambda row: row.record.sample_id))
    order = np.random.default_rng((seed, step)).permutation(len(units))
    plan: list[list[MiniBatch]] = [[] for _ in range(data_size)]
    for index in range(min(minibatches, len(units))):
        mini = [row for i in order[index::minibatches] for row in units[i]]
        mini.sort(key=lambda row: -row.record.num_tokens)
        num_tokens = sum(row.record.num_scored for row in mini)
        num_samples = len({row.record.sample_id for row in mini})
        shares = _shares(mini, data_size, micro_batch_rows, micro_batch_tokens, packed=packed)
        for rank, micro in enumerate(shares):
            plan[rank].append(MiniBatch(micro, num_sequences=num_samples, num_tokens=num_tokens))
    return plan


def on_one_rank(
    rows: Sequence[TrainRow],
    *,
    micro_batch_rows: int | None = None,
    micro_batch_tokens: int | None = None,
    packed: bool = False,
) -> tuple[MicroBatch, ...]:
    """Micro-batches of rows that stay on their rank, at least one. The settings are as for `plan_step`."""
    ordered = sorted(rows, key=lambda row: -row.record.num_tokens)
    [micro_batches] = _shares(ordered, 1, micro_batch_rows, micro_batch_tokens, packed=packed)
    return micro_batches


def compares_groups(loss: LossConfig, rollout: RolloutConfig, agent: AgentConfig) -> bool:
    """True when the run's loss compares the samples of a prompt, which must then be in one minibatch.

    Raises `ConfigError` for a loss of the user's own that does, where a sample may be several rows.
    """
    name = loss.name
    if name is None or not is_own(name):
        return "groups" in needs(name)
    from moe_trm import losses  # a loss of the user's own says itself what it needs, and imports torch

    compares = "groups" in losses.get(name).needs
    if compares and several_rows(rollout, agent):
        raise ConfigError(
            "the loss compares the samples of a prompt row by row, and a session may be several rows",
            where="config key loss.name",
            got=f"{name} with agent.rows={agent.rows}",
            expected="agent.rows=last, or a loss that does not compare samples",
        )
    return compares


def plan_metrics(
    plan: Sequence[Sequence[MiniBatch]], *, packed: bool = False, context: int = 1, tensor: int = 1
) -> dict[str, float]:
    """Balance of the step's plan, in columns that the learner computes: padded tokens, or columns of packs.

    Packs have alignment columns where `context` or `tensor` ranks share them. It has the micro-batches per rank, the
    share of padding and alignment, and the imbalance. The imbalance is the excess of the most loaded rank over the mean
    in the least even minibatch (0: even).
    """
    real = computed = 0
    uneven = 0.0
    for parts in zip(*plan, strict=True):
        loads = []
        for part in parts:
            lengths = [[row.record.num_tokens - 1 for row in micro.rows] for micro in part.micro_batches]
            real += sum(map(sum, lengths))
            if packed:
                columns = [sum(packed_places(rows, context, tensor)) for rows in lengths if rows]
            else:
                columns = [len(rows) * max(SHORTEST, *rows, 0) for rows in lengths]
            loads.append(sum(columns))
        computed += sum(loads)
        uneven = max(uneven, max(loads) * len(loads) / sum(loads) - 1 if any(loads) else 0.0)
    return {
        "batch/micro_batches": float(sum(len(mini.micro_batches) for mini in plan[0])),
        "batch/padding_fraction": 1 - real / computed if computed else 0.0,
        "batch/rank_imbalance": uneven,
    }


def _together(rows: Sequence[TrainRow], unit: Callable[[TrainRow], int]) -> list[list[TrainRow]]:
    """The rows of each unit, in the order in which these come first."""
    units: dict[int, list[TrainRow]] = {}
    for row in rows:
        units.setdefault(unit(row), []).append(row)
    return list(units.values())


def _shares(
    rows: Sequence[TrainRow], data_size: int, limit: int | None, budget: int | None, *, packed: bool
) -> list[tuple[MicroBatch, ...]]:
    """The micro-batches of each rank, of rows sorted by length."""
    if budget is None:
        shares = _by_rows(rows, data_size, limit or DEFAULT_ROWS, packed=packed)
    else:
        shares = _by_tokens(rows, data_size, budget, packed=packed)
    return [tuple(MicroBatch(tuple(part)) for part in share) for share in shares]


def _by_tokens(rows: Sequence[TrainRow], data_size: int, budget: int, *, packed: bool) -> list[list[list[TrainRow]]]:
    lengths = [forwarded_tokens(row.record) for row in rows]
    if lengths and max(lengths) > budget:
        raise ControllerError(
            "a sequence is longer than a micro-batch may be",
            where=row_name(rows[lengths.index(max(lengths))].record.row_id),
            got=f"{max(lengths)} forwarded tokens",
            expected=f"at most learner.micro_batch_tokens={budget}",
            fix="raise learner.micro_batch_tokens, or lower rollout.max_new_tokens or the length of prompts",
        )
    shares = pack(lengths, data_size, budget) if packed else partition(lengths, data_size, budget)
    return [[[rows[i] for i in part] for part in share] for share in shares]


def _by_rows(rows: Sequence[TrainRow], data_size: int, limit: int, *, packed: bool) -> list[list[list[TrainRow]]]:
    shares = _deal(rows, data_size)
    num_micro = max(1, -(-max(map(len, shares)) // limit))
    if packed:
        return [[share[i::num_micro] for i in range(num_micro)] for share in shares]
    return [[share[i * limit : (i + 1) * limit] for i in range(num_micro)] for share in shares]


def _deal(rows: Sequence[TrainRow], hands: int) -> list[list[TrainRow]]:
    """Deal rows 0..n-1, n-1..0, ... so that sorted lengths even out."""
    dealt: list[list[TrainRow]] = [[] for _ in range(hands)]
    for i, row in enumerate(rows):
        lap, seat = divmod(i, hands)
        dealt[seat if lap % 2 == 0 else hands - 1 - seat].append(row)
    return dealt


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
