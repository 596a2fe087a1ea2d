"""Fixed texts under both engines at the same weights: they show what other weights alone make of a mismatch.

The mean over the tokens of the texts is compared with the first measurement of the run, text by text:

    rise = sum_i d_i / sum_i t_i        se^2 = n / (n - 1) sum_i (d_i - rise t_i)^2 / (sum_i t_i)^2

with the change d_i of a text's sum, its tokens t_i and n texts.

Source: Cochran, Sampling Techniques, 1977, 6.4 for the error of a ratio of sums.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_trm.batch.collate import collate
from moe_trm.learner.protocol import Learner
from moe_trm.learner.scoring import FED, on_device
from moe_trm.ratios import k3
from moe_trm.step.probe.flip_causes import flips_of
from moe_trm.step.probe.sample import ProbeChoice
from moe_trm.step.probe.tokens import compared, joined
from moe_trm.types import RolloutRecord, TrainRow
from routing.record.sources import Record

COLUMNS = ("tokens", "native_k3", "replayed_k3", "flips")
"""Sums of a text."""


class BankProbe:
    """Scores of the texts that come with a batch (`TrainBatch.bank`), and their rise since the first."""

    def __init__(self, choice: ProbeChoice) -> None:
        self._choice = choice
        self._first: dict[int, list[float]] = {}

    def run(self, learner: Learner, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """Metrics of the texts of all ranks; empty where there are none. Collective.

        `bank/native_k3_kl`, `bank/replayed_k3_kl` in nats and `bank/flip_rate` of token-layers, with own and with the
        engine's routes; `bank/tokens`; `bank/native_k3_rise` and its standard error `_se` since the first measurement;
        `time/bank_score_s`, seconds of the learner.
        """
        total = int(learner.reduce({"texts": torch.tensor(float(len(records)))})["texts"])
        if not total:
            return {}
        started = time.perf_counter()
        now = self._sums(learner, records)
        tokens, native, replayed, flips = (math.fsum(column) for column in zip(*now.values(), strict=True))
        rise = _rise(self._first, now)
        self._first = self._first or now
        return {
            "bank/tokens": tokens,
            "bank/native_k3_kl": native / tokens,
            "bank/replayed_k3_kl": replayed / tokens,
            "bank/flip_rate": flips / (tokens * len(learner.model_moe_layer_ids)),
            **rise,
            "time/bank_score_s": time.perf_counter() - started,
        }

    def state(self) -> dict[str, Any]:
        """The first measurement as plain data."""
        return {str(text): sums for text, sums in self._first.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Compare with the first measurement of `state`."""
        self._first = {int(text): list(map(float, sums)) for text, sums in state.items()}

    def _sums(self, learner: Learner, records: Sequence[RolloutRecord]) -> dict[int, list[float]]:
        """By text the `COLUMNS`, of all ranks."""
        micros = self._choice.micro_batches(learner, [TrainRow(record) for record in records])
        batches = [on_device(collate(micro, keep_mask=False), learner.device, stay=FED) for micro in micros]
        native = learner.score(batches, [Record() for _ in batches], temperature=1.0)
        replayed = learner.score(batches, [batch.rollout_routes for batch in batches], temperature=1.0)
        learner.replay_report()
        parts = []
        for micro, batch, own, theirs in zip(micros, batches, native, replayed, strict=True):
            rows = [row.record for row in micro.rows]
            parts.append(compared(learner, batch, rows, own, theirs, flips_of(own, batch, learner.moe_layer_ids)))
        tokens = joined(parts)
        columns = (torch.ones(len(tokens.native)), k3(tokens.native), k3(tokens.replayed), tokens.flipped_layers)
        texts, places = torch.unique(tokens.sample_id, return_inverse=True)
        sums = [torch.zeros(len(texts), dtype=torch.float64).index_add_(0, places, part.double()) for part in columns]
        rows_of_all: Tensor = learner.gather(torch.stack([texts.double(), *sums], 1).flatten()).cpu()
        return {int(text): values for text, *values in sorted(rows_of_all.view(-1, 1 + len(COLUMNS)).tolist())}


def _rise(first: Mapping[int, Sequence[float]], now: Mapping[int, Sequence[float]]) -> dict[str, float]:
    """Nothing where other texts were measured first."""
    if len(now) < 2 or first.keys() != now.keys():
        return {}
    tokens = [sums[0] for sums in now.values()]
    changes = [sums[1] - first[text][1] for text, sums in now.items()]
    rise = math.fsum(changes) / math.fsum(tokens)
    squares = math.fsum((change - rise * count) ** 2 for change, count in zip(changes, tokens, strict=True))
    error = math.sqrt(len(now) / (len(now) - 1) * squares) / math.fsum(tokens)
    return {"bank/native_k3_rise": rise, "bank/native_k3_rise_se": error}
