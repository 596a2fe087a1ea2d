"""Fixed texts under both engines: their means, and the rise since the first measurement with its error."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from moe_trm.config.schema import Config
from moe_trm.step.probe.bank import BankProbe
from moe_trm.step.probe.sample import ProbeChoice
from moe_trm.types import RolloutRecord
from tests.unit.records import make_record
from tests.unit.step.probe.test_probe_sample import ProbeLearner
from tests.unit.step.shared_minibatch import Ranks

CONFIG = Config.model_validate({"model": {"checkpoint": "none"}, "learner": {"micro_batch_rows": 2}})


def texts(shift: float = 0.0, number: int = 5) -> list[RolloutRecord]:
    """As an engine scored them; `shift` moves its log-probs, of text n by n times."""
    records = [replace(make_record(sample_id=n, num_sampled=3 + n), sampling_mask=None) for n in range(number)]
    return [
        replace(record, rollout_logprobs=record.rollout_logprobs - np.float32(shift * n))
        for n, record in enumerate(records)
    ]


def measured(probes: list[BankProbe], records: list[RolloutRecord]) -> dict[str, float]:
    """Of as many ranks as there are probes."""
    ranks = Ranks(len(probes))

    def work(rank: int) -> dict[str, float]:
        return probes[rank].run(ProbeLearner(ranks, rank), records[rank :: len(probes)])

    with ThreadPoolExecutor(len(probes)) as pool:
        results = list(pool.map(work, range(len(probes))))
    assert all(metrics.pop("time/bank_score_s", 0.0) >= 0 for metrics in results)
    assert all(metrics == results[0] for metrics in results)
    return results[0]


def fresh(size: int = 1) -> list[BankProbe]:
    return [BankProbe(ProbeChoice(CONFIG, "R3")) for _ in range(size)]


def test_ranks_agree_with_one_alone() -> None:
    alone = measured(fresh(), texts())
    assert alone["bank/tokens"] == sum(3 + n for n in range(5))
    assert alone["bank/native_k3_kl"] > 0
    assert 0 < alone["bank/flip_rate"] < 1
    assert measured(fresh(3), texts()) == pytest.approx(alone)
    assert measured(fresh(2), []) == {}


def test_the_rise_is_text_by_text_with_its_error() -> None:
    probes = fresh(2)
    first, now = measured(probes, texts()), measured(probes, texts(0.3))
    assert "bank/native_k3_rise" not in first
    assert now["bank/native_k3_rise"] == pytest.approx(now["bank/native_k3_kl"] - first["bank/native_k3_kl"])
    assert now["bank/native_k3_rise_se"] > 0
    by_text = [measured(fresh(), [text])["bank/native_k3_kl"] * text.num_sampled for text in (*texts(), *texts(0.3))]
    changes, tokens = [b - a for a, b in zip(by_text[:5], by_text[5:], strict=True)], [3 + n for n in range(5)]
    rise = sum(changes) / sum(tokens)
    squares = sum((change - rise * count) ** 2 for change, count in zip(changes, tokens, strict=True))
    assert now["bank/native_k3_rise_se"] == pytest.approx(math.sqrt(5 / 4 * squares) / sum(tokens))
    assert measured(probes, texts(0.3))["bank/native_k3_rise"] == now["bank/native_k3_rise"], "since the first"


def test_at_the_same_weights_nothing_rises_also_after_a_resumption_on_fewer_ranks() -> None:
    probes = fresh(2)
    measured(probes, texts())
    resumed = fresh()
    resumed[0].restore(probes[0].state())
    again = measured(resumed, texts())
    assert again["bank/native_k3_rise"] == pytest.approx(0)
    assert again["bank/native_k3_rise_se"] == pytest.approx(0)
    assert "bank/native_k3_rise" not in measured(resumed, texts(number=4))
