"""The rows of a probe: a random sample of the step's rows, the same however ranks share them and after a resumption.

There are two ways to get one:

- *Minibatches.* The plan of a step deals its rows at random to the minibatches, so the last of them are a sample
  without replacement. Their anchors are scored with the rollout's routes in any case, in the same micro-batches, so
  that the probe needs one pass where it needs two of drawn rows. The mean over the tokens of n rows has a bias of the
  order of 1 / n, which is small against its error of the order of 1 / sqrt(n).
- *A draw.* One row is drawn in proportion to its scored tokens, the others alike and without replacement. Then the mean
  over the tokens of the sample has exactly the mean over all tokens of the step as its expectation.

The standard error of the mean, sum(x) / sum(t) over the rows of the sample, is that of a ratio of sums:

    se^2 = (1 - n / N) * n / (n - 1) * sum((x - r t)^2) / sum(t)^2    with r = sum(x) / sum(t)

Source: Midzuno (1951), Sen (1953) for the draw; Cochran, Sampling Techniques, 1977, 6.4 for the error.

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
from moe_trm.batch.plan import compares_groups, on_one_rank
from moe_trm.config.agent_rules import several_rows
from moe_trm.config.schema import Config, ReplayMode
from moe_trm.learner.protocol import Learner
from moe_trm.learner.scoring import FED, on_device
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.types import MicroBatch, MiniBatch, RolloutRecord, TokenBatch, TrainRow

LEAST_ROWS = 32
"""Rows of a sample at least: a standard error over fewer says little."""
STREAM = 0x9B0BE
"""Third word of the seed, so that these draws differ from the step's plan."""


@dataclass(frozen=True)
class ProbeRows:
    """This rank's share of what a probe looks at.

    Attributes:
        batches: its micro-batches, as many on every rank.
        records: the rows of each.
        minibatches: the minibatches that these are, in the micro-batches of the anchors; none of drawn rows.
        num_rows, total_rows: n and N.
        token_fraction: scored tokens of the sample, divided by the step's.
    """

    batches: Sequence[TokenBatch]
    records: Sequence[Sequence[RolloutRecord]]
    minibatches: Sequence[AnchoredMinibatch]
    num_rows: int
    total_rows: int
    token_fraction: float

    @property
    def is_complete(self) -> bool:
        """True when all rows of the step are looked at."""
        return self.num_rows == self.total_rows


class ProbeChoice:
    """The choice of minibatches or drawn rows for probes, and these rows.

    Of `config`, the sections that make micro-batches are read too. `mode`: whose routes the anchors' passes use.
    """

    def __init__(self, config: Config, mode: ReplayMode) -> None:
        pipeline, self._config = config.pipeline, config
        self._tokens = config.probe.tokens
        measured = pipeline.has_anchor_pass and pipeline.proximal != "average"
        self._replayed = mode == "R3" and measured
        dealt = not (
            pipeline.stream
            or compares_groups(config.loss, config.rollout, config.agent)
            or several_rows(config.rollout, config.agent)
        )
        self._random = self._replayed and dealt

    def num_minibatches(self, minis: Sequence[MiniBatch]) -> int:
        """Number of a step's last minibatches that a probe looks at; 0: it draws rows.

        It takes the fewest that hold `probe.tokens` scored tokens and `LEAST_ROWS` samples, but none of more than twice
        these tokens: drawn rows would be forwarded twice. Parts of a step are taken only where they are random samples
        of rows and their anchors were scored with the rollout's routes.
        """
        if sum(mini.num_sequences for mini in minis) <= LEAST_ROWS:
            return len(minis)
        enough_tokens = self._tokens or sum(mini.num_tokens for mini in minis)
        count = tokens = samples = 0
        while count < len(minis) and not (self._random and tokens >= enough_tokens and samples >= LEAST_ROWS):
            count += 1
            tokens += minis[-count].num_tokens
            samples += minis[-count].num_sequences
        return count if tokens <= enough_tokens * (2 if self._replayed else 1) else 0

    def rows(self, learner: Learner, minibatches: Sequence[AnchoredMinibatch], step: int) -> ProbeRows:
        """The rows of the probe of `step`, of this rank's `minibatches` rows. Collective."""
        number = self.num_minibatches([part.mini for part in minibatches])
        return _last(minibatches, number) if number else self._drawn(learner, minibatches, step)

    def _drawn(self, learner: Learner, minibatches: Sequence[AnchoredMinibatch], step: int) -> ProbeRows:
        micros = [micro for part in minibatches for micro in part.mini.micro_batches]
        rows = [row for micro in micros for row in micro.rows]
        local_rows = torch.tensor([(row.record.row_id, _scored(row)) for row in rows], dtype=torch.int64)
        ids_N, tokens_N = learner.gather(local_rows.flatten()).cpu().view(-1, 2).numpy().T
        order = ids_N.argsort(kind="stable")
        ids_N, tokens_N = ids_N[order], tokens_N[order]
        number = rows_needed(tokens_N, self._config.probe.tokens)
        if number == len(ids_N):
            return _last(minibatches, len(minibatches))
        places = draw(tokens_N, number, (self._config.seed, step, STREAM))
        drawn_ids = set(ids_N[places].tolist())
        packed = self.micro_batches(learner, [row for row in rows if row.record.row_id in drawn_ids])
        padded = [collate(micro, keep_mask=self._config.keeps_masks) for micro in packed]
        return ProbeRows(
            [on_device(batch, learner.device, stay=FED) for batch in padded],
            [_records(micro) for micro in packed],
            (),
            number,
            len(ids_N),
            float(tokens_N[places].sum() / tokens_N.sum()),
        )

    def micro_batches(self, learner: Learner, rows: Sequence[TrainRow]) -> list[MicroBatch]:
        """This rank's rows in micro-batches of the run's size. Collective.

        The last ones may be empty: every rank has as many.
        """
        settings = self._config.learner
        local = on_one_rank(
            rows,
            micro_batch_rows=settings.micro_batch_rows,
            micro_batch_tokens=settings.micro_batch_tokens,
            packed=self._config.batch.layout == "packed",
        )
        most = int(learner.reduce({"micro_batches:max": torch.tensor(float(len(local)))})["micro_batches:max"])
        return [*local, *[MicroBatch(())] * (most - len(local))]


def _last(minibatches: Sequence[AnchoredMinibatch], number: int) -> ProbeRows:
    last_parts = minibatches[-number:]
    minis = [part.mini for part in minibatches]
    rows, tokens = ([getattr(mini, name) for mini in minis] for name in ("num_sequences", "num_tokens"))
    return ProbeRows(
        [batch for part in last_parts for batch in part.batches],
        [_records(micro) for part in last_parts for micro in part.mini.micro_batches],
        last_parts,
        sum(rows[-number:]),
        sum(rows),
        sum(tokens[-number:]) / max(sum(tokens), 1),
    )


def rows_needed(tokens_N: np.ndarray, tokens_needed: int) -> int:
    """Rows whose expected number of scored tokens is at least `tokens_needed`, and `LEAST_ROWS`; N of them at most.

    0 tokens: all rows.
    """
    total = int(tokens_N.sum())
    if not tokens_needed or not total:
        return len(tokens_N)
    return min(len(tokens_N), max(LEAST_ROWS, math.ceil(tokens_needed * len(tokens_N) / total)))


def draw(tokens_N: np.ndarray, number: int, seed: Sequence[int]) -> np.ndarray:
    """Places of a sample of `number` rows, ascending: the first in proportion to its tokens, the others alike."""
    rng = np.random.default_rng(seed)
    first = int(rng.choice(len(tokens_N), p=tokens_N / tokens_N.sum()))
    remaining = np.delete(np.arange(len(tokens_N)), first)
    return np.sort(np.append(rng.permutation(remaining)[: number - 1], first))


def standard_errors(sums: Mapping[str, float], names: Mapping[str, str], rows: ProbeRows) -> dict[str, float]:
    """Standard error of each `sums[top] / sums[bottom]` of `names`, of what the rows that were not drawn would change.

    `sums` are of the sample, and of the products of row sums as `products` names them. Empty where all rows were looked
    at. A ratio whose bottom is 0 is left out.
    """
    if rows.is_complete or rows.num_rows < 2:
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

    `row_of`: number of each token's row. `names`: top -> bottom, of the columns of token values.
    """
    _, places = torch.unique(row_of, return_inverse=True)
    count = int(places.max()) + 1 if len(places) else 0
    by_row = {
        name: torch.zeros(count, dtype=torch.float64).index_add_(0, places, columns[name].double())
        for name in {*names, *names.values()}
    }
    pairs = {pair for top, bottom in names.items() for pair in ((top, top), (top, bottom), (bottom, bottom))}
    return {_product(first, second): (by_row[first] * by_row[second]).sum() for first, second in sorted(pairs)}


def _product(first: str, second: str) -> str:
    return f"{first} * {second}"


def _records(micro: MicroBatch) -> list[RolloutRecord]:
    return [row.record for row in micro.rows]


def _scored(row: TrainRow) -> int:
    return row.record.num_scored
