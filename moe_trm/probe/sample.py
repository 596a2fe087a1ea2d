"""The rows of a probe: a random sample of the step's rows, the same however ranks share them and after a resumption.

One row is drawn in proportion to its scored tokens, the others alike and without replacement. Under this scheme a mean
over the tokens of the sample, sum(x) / sum(t) over its rows, has exactly the mean over all tokens of the step as its
expectation. Its standard error is that of a ratio of sums:

    se^2 = (1 - n / N) * n / (n - 1) * sum((x - r t)^2) / sum(t)^2    with r = sum(x) / sum(t)

Source: Midzuno (1951), Sen (1953) for the scheme; Cochran, Sampling Techniques, 1977, 6.4 for the error.

Shape letters: N rows of the step on all ranks, n rows of the sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_trm.batch.collate import collate
from moe_trm.batch.plan import on_one_rank
from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Learner
from moe_trm.step.passes import Anchored
from moe_trm.types import MicroBatch, RolloutRecord, TokenBatch, TrainRow

LEAST_ROWS = 32
"""Rows of a sample at least: a standard error over fewer says little."""
STREAM = 0x9B0BE
"""Third word of the seed, so that these draws are not those of the step's plan."""


@dataclass(frozen=True)
class ProbeRows:
    """This rank's share of what a probe looks at.

    Attributes:
        batches: its micro-batches, as many on every rank.
        records: the rows of each.
        whole: all rows of the step are in it, in the micro-batches of the anchors.
        num_rows, total_rows: n and N.
        token_fraction: scored tokens of the sample by those of the step.
    """

    batches: Sequence[TokenBatch]
    records: Sequence[Sequence[RolloutRecord]]
    whole: bool
    num_rows: int
    total_rows: int
    token_fraction: float


def probe_rows(config: Config, learner: Learner, anchored: Sequence[Anchored], step: int) -> ProbeRows:
    """The rows of the probe of `step`. Collective.

    Args:
        config: `probe.tokens`, `seed`, and what makes micro-batches are read.
        learner: gathers over the ranks.
        anchored: this rank's rows of the step.
        step: number of the step.
    """
    micros = [micro for part in anchored for micro in part.mini.micro_batches]
    rows = [row for micro in micros for row in micro.rows]
    ids_N = learner.gather(torch.tensor([row.record.row_id for row in rows], dtype=torch.int64)).cpu().numpy()
    tokens_N = learner.gather(torch.tensor([_scored(row) for row in rows], dtype=torch.int64)).cpu().numpy()
    order = ids_N.argsort(kind="stable")
    ids_N, tokens_N = ids_N[order], tokens_N[order]
    number = wanted_rows(tokens_N, config.probe.tokens)
    if number == len(ids_N):
        batches = [batch for part in anchored for batch in part.batches]
        return ProbeRows(batches, [_records(micro) for micro in micros], True, number, number, 1.0)
    places = draw(tokens_N, number, (config.seed, step, STREAM))
    chosen = set(ids_N[places].tolist())
    own = _micro_batches(config, learner, [row for row in rows if row.record.row_id in chosen])
    return ProbeRows(
        [collate(micro, keep_mask=config.keeps_masks) for micro in own],
        [_records(micro) for micro in own],
        False,
        number,
        len(ids_N),
        float(tokens_N[places].sum() / tokens_N.sum()),
    )


def wanted_rows(tokens_N: np.ndarray, wanted_tokens: int) -> int:
    """Rows whose expected number of scored tokens is at least `wanted_tokens`, and `LEAST_ROWS`; N of them at most.

    0 tokens: all rows.
    """
    total = int(tokens_N.sum())
    if not wanted_tokens or not total:
        return len(tokens_N)
    return min(len(tokens_N), max(LEAST_ROWS, math.ceil(wanted_tokens * len(tokens_N) / total)))


def draw(tokens_N: np.ndarray, number: int, seed: Sequence[int]) -> np.ndarray:
    """Places of a sample of `number` rows, ascending: the first in proportion to its tokens, the others alike."""
    rng = np.random.default_rng(seed)
    first = int(rng.choice(len(tokens_N), p=tokens_N / tokens_N.sum()))
    others = np.delete(np.arange(len(tokens_N)), first)
    return np.sort(np.append(rng.permutation(others)[: number - 1], first))


def standard_errors(sums: Mapping[str, float], names: Mapping[str, str], rows: ProbeRows) -> dict[str, float]:
    """Standard error of each `sums[top] / sums[bottom]`, of what the rows that were not drawn would change.

    Empty where all rows were looked at. A ratio whose bottom is 0 is left out.

    Args:
        sums: of the sample, and of the products of row sums as `products` names them.
        names: top -> bottom.
        rows: says n and N.
    """
    if rows.whole or rows.num_rows < 2:
        return {}
    n = rows.num_rows
    factor = (1 - n / rows.total_rows) * n / (n - 1)
    errors = {}
    for top, bottom in names.items():
        if not sums[bottom]:
            continue
        ratio = sums[top] / sums[bottom]
        squares = (
            sums[_product(top, top)]
            - 2 * ratio * sums[_product(top, bottom)]
            + ratio**2 * sums[_product(bottom, bottom)]
        )
        errors[top] = math.sqrt(factor * max(squares, 0.0)) / abs(sums[bottom])
    return errors


def products(columns: Mapping[str, Tensor], row_of: Tensor, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Sums over rows of the products of row sums, by which `standard_errors` finds the spread of rows.

    Args:
        columns: values of tokens.
        row_of: number of each token's row.
        names: top -> bottom, of `columns`.
    """
    _, places = torch.unique(row_of, return_inverse=True)
    count = int(places.max()) + 1 if len(places) else 0
    by_row = {
        name: torch.zeros(count, dtype=torch.float64).index_add_(0, places, columns[name].double())
        for name in {*names, *names.values()}
    }
    pairs = {pair for top, bottom in names.items() for pair in ((top, top), (top, bottom), (bottom, bottom))}
    return {_product(one, other): (by_row[one] * by_row[other]).sum() for one, other in sorted(pairs)}


def _product(one: str, other: str) -> str:
    return f"{one} * {other}"


def _micro_batches(config: Config, learner: Learner, rows: Sequence[TrainRow]) -> list[MicroBatch]:
    """This rank's rows in micro-batches of the run's size. The last ones may be empty: every rank has as many."""
    settings = config.learner
    own = on_one_rank(
        rows,
        micro_batch_rows=settings.micro_batch_rows,
        micro_batch_tokens=settings.micro_batch_tokens,
        packed=config.batch.layout == "packed",
    )
    most = int(learner.reduce({"micro_batches:max": torch.tensor(float(len(own)))})["micro_batches:max"])
    return [*own, *[MicroBatch(())] * (most - len(own))]


def _records(micro: MicroBatch) -> list[RolloutRecord]:
    return [row.record for row in micro.rows]


def _scored(row: TrainRow) -> int:
    return row.record.num_scored
