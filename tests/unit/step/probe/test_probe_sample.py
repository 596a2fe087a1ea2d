"""A probe of part of the rows: unbiased means, honest errors, and the same rows however ranks share them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_trm.batch.collate import collate, forwarded_tokens
from moe_trm.batch.plan import on_one_rank, plan_step
from moe_trm.batch.train_rows import train_rows
from moe_trm.config.schema import Config, ReplayMode
from moe_trm.learner.protocol import Scores
from moe_trm.methods import summable
from moe_trm.ratios import k3
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.probe import sample
from moe_trm.step.probe.run import Probe
from moe_trm.step.probe.sample import ProbeChoice, ProbeRows, draw, products, rows_needed, standard_errors
from moe_trm.sync.rounding import Rounding
from moe_trm.types import MiniBatch, TokenBatch, TrainBatch, TrainRow
from routing.record.sources import Native, Record, Recorded, ReplayReport, RouteSource
from tests.unit.doubles import StandInLearner
from tests.unit.records import EXPERTS, LAYERS, TOP_K, make_record, split_record
from tests.unit.step.shared_minibatch import Ranks, anchor_logprobs, current_logprobs

STEP, VERSION = 3, 2


def test_the_mean_over_a_sample_expects_the_mean_over_all_tokens() -> None:
    """Five short bad rows and a long good one. Drawn alike, two rows would show 0.68 on average; the truth is 0.2."""
    tokens, bad = np.array([1, 1, 1, 1, 1, 20]), np.array([1, 1, 1, 1, 1, 0])
    drawn = [draw(tokens, 2, (0, number)) for number in range(3000)]
    means = [bad[places].sum() / tokens[places].sum() for places in drawn]
    assert np.mean(means) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("number", [60, 300])
def test_the_standard_error_is_the_spread_of_samples(number: int) -> None:
    """Of 400 rows of unlike lengths, whose tokens are alike within a row."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 12, 400)
    bad = np.repeat(rng.gamma(0.5, size=400), tokens)
    row_of = np.repeat(np.arange(400), tokens)
    truth, found, errors = bad.mean(), [], []
    for seed in range(250):
        own = np.isin(row_of, draw(tokens, number, (seed,)))
        columns = {"bad": torch.tensor(bad[own]), "tokens": torch.ones(int(own.sum()))}
        mean, error = estimated(columns, row_of[own], number, 400)
        found.append(mean)
        errors.append(error)
    assert_errors_are_the_spread(found, errors, truth)


def estimated(columns: dict[str, Tensor], rows: Any, number: int, of: int) -> tuple[float, float]:
    """The mean over a sample of `number` rows, and its standard error."""
    parts = products(columns, torch.tensor(rows), {"bad": "tokens"})
    sums = {name: float(value.sum()) for name, value in {**columns, **parts}.items()}
    error = standard_errors(sums, {"bad": "tokens"}, ProbeRows([], [], (), number, of, 0.5))["bad"]
    return sums["bad"] / sums["tokens"], error


def assert_errors_are_the_spread(found: Sequence[float], errors: Sequence[float], truth: float) -> None:
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.15)
    covered = np.mean(np.abs(np.array(found) - truth) < 2 * np.array(errors))
    assert 0.9 < covered < 0.99


def test_how_many_rows() -> None:
    tokens = np.full(1000, 50)
    assert rows_needed(tokens, 8192) == math.ceil(8192 / 50)
    assert rows_needed(tokens, 100) == sample.LEAST_ROWS
    assert rows_needed(tokens, 0) == rows_needed(tokens, 50_000) == 1000
    assert rows_needed(np.zeros(5, int), 100) == 5
    assert rows_needed(np.zeros(0, int), 100) == 0


def test_micro_batches_of_one_rank_keep_to_the_budget() -> None:
    rows = step_rows()
    for settings in ({"micro_batch_rows": 5}, {"micro_batch_tokens": 40}, {"micro_batch_tokens": 40, "packed": True}):
        micros = on_one_rank(rows, **settings)  # type: ignore[arg-type]
        assert sorted(row.record.row_id for micro in micros for row in micro.rows) == sorted(
            row.record.row_id for row in rows
        )
        for micro in micros:
            lengths = [forwarded_tokens(row.record) for row in micro.rows]
            computed = sum(lengths) if "packed" in settings else len(lengths) * max(lengths)
            assert len(lengths) <= 5 if "micro_batch_rows" in settings else computed <= 40
    assert [micro.rows for micro in on_one_rank([], micro_batch_tokens=40)] == [()]


class ProbeLearner(StandInLearner):
    """Log-probs of the token alone, experts that flip at odd targets; it remembers its passes."""

    moe_layer_ids = model_moe_layer_ids = LAYERS

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.data_rank, self.data_size = ranks, rank, ranks.size
        self.passes: list[tuple[type[RouteSource], str, int]] = []

    def snapshot(self, name: str, *, saved: bool = False, rounding: Rounding | None = None) -> int:
        return 0

    def forget(self, name: str) -> None: ...

    def scored(
        self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], weights: str | None
    ) -> list[Scores]:
        self.passes.append((type(sources[0]), weights or "own", len(batches)))
        logprobs = current_logprobs if isinstance(sources[0], Record) else anchor_logprobs
        shift = 0.0 if weights is None else 0.01
        return [
            Scores(torch.where(one.mask, logprobs(one) + shift * (one.target_ids % 3), 0.0), recorded=own_routes(one))
            for one in batches
        ]

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in summable.add(self._ranks.exchange(self.data_rank, sums)).items()}

    def gather(self, values: Tensor) -> Tensor:
        return torch.cat(self._ranks.exchange(self.data_rank, values))

    def replay_report(self) -> ReplayReport:
        return ReplayReport()


def own_routes(batch: TokenBatch) -> Recorded:
    ids = torch.arange(TOP_K).expand(*batch.mask.shape, len(LAYERS), TOP_K).clone()
    for row, record in enumerate(batch.routes):
        if record is not None:
            ids[row, : record.num_rows] = torch.from_numpy(record.experts.astype(np.int64))
    odd = batch.target_ids % 2 == 1
    ids[odd] = (ids[odd] + 1) % EXPERTS
    return Recorded({layer: ids[:, :, place].flatten(0, 1) for place, layer in enumerate(LAYERS)})


def step_rows(number: int = 72) -> list[TrainRow]:
    """Samples of unlike lengths, every third of an older version, and some of several rows."""
    found = []
    for place in range(number):
        count = 3 + place % 7
        record = make_record(
            sample_id=place, group_id=place // 4, num_sampled=count, version=VERSION - (place % 3 == 0)
        )
        found += train_rows(split_record(record, [1, count - 1]) if place % 5 == 0 else replace(record))
    return found


def probed(
    folder: Path,
    rows: Sequence[TrainRow],
    *,
    ranks: int,
    tokens: int,
    step: int = STEP,
    micro_batch_rows: int = 4,
    thorough_every: int = 1,
    mode: ReplayMode = "R3",
) -> tuple[dict[str, float], dict[str, Tensor], list[ProbeLearner]]:
    """Metrics of a probe, its saved arrays, and the ranks."""
    config = Config.model_validate(
        {
            "model": {"checkpoint": "none"},
            "rollout": {"top_p": 0.9},
            "sampling_mask": {"mode": "keep"},
            "probe": {"every": 1, "tokens": tokens, "save": True, "thorough_every": thorough_every},
            "learner": {"micro_batch_rows": micro_batch_rows},
            "pipeline": {"mode": "async", "max_staleness": 2, "behavior": "snapshot"},
        }
    )
    shares = plan_step(rows, seed=0, step=step, minibatches=2, data_size=ranks, micro_batch_rows=micro_batch_rows)
    meeting = Ranks(ranks)
    learners = [ProbeLearner(meeting, rank) for rank in range(ranks)]

    def work(rank: int) -> dict[str, float]:
        minibatches = [anchors(mini) for mini in shares[rank]]
        return Probe(config, folder, mode).run(step, learners[rank], minibatches)

    with ThreadPoolExecutor(ranks) as pool:
        metrics = list(pool.map(work, range(ranks)))
    assert all(one == metrics[0] for one in metrics)
    files = [load_file(path) for path in sorted((folder / "probe").glob(f"step-{step:06d}-rank*"))]
    return metrics[0], {name: torch.cat([one[name] for one in files]) for name in files[0]}, learners


def anchors(mini: MiniBatch) -> AnchoredMinibatch:
    batches = [collate(micro, keep_mask=True) for micro in mini.micro_batches]
    scores = [Scores(anchor_logprobs(batch)) for batch in batches]
    return AnchoredMinibatch(mini, batches, scores, [Native()] * len(batches), recovery="snapshot", version=VERSION)


def test_figures_are_of_the_sample_and_say_so(tmp_path: Path) -> None:
    rows = step_rows()
    every = sum(int(row.record.scored.sum()) for row in rows)
    found, saved, [learner] = probed(tmp_path / "part", rows, ranks=1, tokens=100)
    count = len(saved["native"])
    assert count < every
    assert found["probe/rows"] == len(saved["sample_id"].unique()) == rows_needed(lengths(rows), 100)
    assert found["probe/token_fraction"] == pytest.approx(count / every)
    native, replayed = k3(saved["native"]), k3(saved["replayed"])
    assert found["probe/native_k3_kl"] == pytest.approx(float(native.mean()), rel=1e-6)
    share = 1 - float(replayed.sum() / native.sum())
    assert found["probe/routing_share"] == pytest.approx(share, rel=1e-6)
    assert found["routing/native_flip_rate"] == pytest.approx(float((saved["flipped_layers"] / 3).mean()), rel=1e-6)
    assert found["routing/flips/engine"] > 0
    for name in ("probe/routing_share", "routing/native_flip_rate", "probe/cast_k3_kl"):
        assert found[f"{name}_se"] > 0, name
    number, mean = int(found["probe/rows"]), float(native.mean())
    residuals = [float((native - mean)[saved["sample_id"] == row].sum()) for row in saved["sample_id"].unique()]
    squares = (1 - number / len(rows)) * number / (number - 1) * sum(residual**2 for residual in residuals)
    assert found["probe/native_k3_kl_se"] == pytest.approx(math.sqrt(squares) / count, rel=1e-6)
    # Drawn rows are in micro-batches of their own: the anchors' are others. Then one for the cast, one for version 1.
    assert [(kind.__name__, weights) for kind, weights, _ in learner.passes] == [
        ("Record", "own"),
        ("ReplayRecords", "own"),
        ("ReplayRecords", "rounded"),
        ("Record", "behavior-1"),
    ]
    assert len({number for *_, number in learner.passes}) == 1


def test_a_probe_of_all_rows_takes_the_anchors_and_has_no_error(tmp_path: Path) -> None:
    rows = step_rows()
    found, saved, [learner] = probed(tmp_path / "all", rows, ranks=1, tokens=0)
    assert len(saved["native"]) == sum(int(row.record.scored.sum()) for row in rows)
    assert found["probe/token_fraction"] == 1.0
    assert found["probe/rows"] == len(rows)
    assert not [name for name in found if name.endswith("_se")]
    assert [kind.__name__ for kind, *_ in learner.passes] == ["Record", "ReplayRecords", "Record"]
    assert probed(tmp_path / "enough", rows, ranks=1, tokens=8192)[0] == found
    _, _, [other] = probed(tmp_path / "R2", rows, ranks=1, tokens=0, mode="R2")
    assert [kind.__name__ for kind, *_ in other.passes] == ["Record", "ReplayRecords", "ReplayRecords", "Record"]


def test_ranks_micro_batches_and_a_resumption_draw_the_same_rows(tmp_path: Path) -> None:
    rows = step_rows()
    one, saved, _ = probed(tmp_path / "one", rows, ranks=1, tokens=100)
    for number, (ranks, micro) in enumerate([(1, 4), (2, 3), (3, 100)]):
        again, others, learners = probed(
            tmp_path / str(number), rows[::-1], ranks=ranks, tokens=100, micro_batch_rows=micro
        )
        assert set(others["sample_id"].tolist()) == set(saved["sample_id"].tolist())
        assert again == {name: pytest.approx(value, rel=1e-5, abs=1e-9) for name, value in one.items()}
        assert len({tuple(number for *_, number in learner.passes) for learner in learners}) == 1
    other = probed(tmp_path / "next", rows, ranks=1, tokens=100, step=STEP + 1)[1]
    assert set(other["sample_id"].tolist()) != set(saved["sample_id"].tolist())


@pytest.mark.parametrize("drawn", [2, 7])
def test_ranks_with_fewer_drawn_rows_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: int) -> None:
    """Two rows leave a rank without any; of seven, one rank has more than the others."""
    monkeypatch.setattr(sample, "LEAST_ROWS", drawn)
    found, saved, learners = probed(tmp_path, step_rows(12), ranks=3, tokens=1, micro_batch_rows=1)
    assert found["probe/rows"] == len(saved["sample_id"].unique()) == drawn
    [passes] = {tuple(number for *_, number in learner.passes) for learner in learners}
    assert max(passes) * 3 > drawn


def settings(**sections: Any) -> Config:
    return Config.model_validate({"model": {"checkpoint": "none"}, **sections})


def minis(*tokens: int, samples: int = 40) -> list[MiniBatch]:
    return [MiniBatch((), samples, number) for number in tokens]


@pytest.mark.parametrize(
    ("tokens", "of", "expected"),
    [
        (500, minis(600, 600), 1),
        (500, minis(600, 1001), 0),  # a draw of 500 is forwarded twice
        (500, minis(300, 300, 300), 2),
        (500, minis(600, 300, samples=17), 2),  # one has too few rows for an error
        (500, minis(600, 500, samples=17), 0),
        (500, minis(900), 1),
        (500, minis(1001), 0),
        (500, minis(9000, samples=32), 1),
        (500, minis(10, 10), 2),
        (0, minis(9000, 9000), 2),
    ],
)
def test_the_last_minibatches_are_the_sample_where_they_hold_little_more(
    tokens: int, of: list[MiniBatch], expected: int
) -> None:
    assert ProbeChoice(settings(probe={"tokens": tokens}), "R3").num_minibatches(of) == expected


@pytest.mark.parametrize(
    ("mode", "sections"),
    [
        ("none", {}),
        ("R2", {}),
        ("R3", {"pipeline": {"mode": "async", "max_staleness": 1, "behavior": "bypass"}}),
        ("R3", {"pipeline": {"mode": "async", "max_staleness": 1, "behavior": "merged", "proximal": "average"}}),
        ("R3", {"pipeline": {"mode": "async", "max_staleness": 1, "behavior": "merged", "stream": True}}),
        ("R3", {"loss": {"name": "quatro_query"}}),
        ("R3", {"rollout": {"agent": "agent.py:act"}, "agent": {"rows": "trajectory"}}),
    ],
)
def test_rows_are_drawn_where_minibatches_are_no_sample_with_anchors(mode: ReplayMode, sections: Any) -> None:
    chosen = ProbeChoice(settings(probe={"tokens": 500}, **sections), mode)
    assert chosen.num_minibatches(minis(600, 600)) == 0
    assert chosen.num_minibatches(minis(100, 100)) == 2
    assert ProbeChoice(settings(probe={"tokens": 0}, **sections), mode).num_minibatches(minis(600, 600)) == 2


def test_a_probe_of_a_minibatch_takes_its_anchors(tmp_path: Path) -> None:
    rows = [row for row in step_rows(84) if row.record.row_id == row.record.sample_id]
    [shares] = plan_step(rows, seed=0, step=STEP, minibatches=2, data_size=1, micro_batch_rows=4)
    found, saved, [learner] = probed(tmp_path / "one", rows, ranks=1, tokens=200)
    chosen = [row for micro in shares[-1].micro_batches for row in micro.rows]
    assert set(saved["sample_id"].tolist()) == {row.record.row_id for row in chosen}
    assert found["probe/rows"] == len(chosen) == shares[-1].num_sequences
    assert found["probe/token_fraction"] == shares[-1].num_tokens / lengths(rows).sum()
    assert found["probe/native_k3_kl_se"] > 0
    assert [(kind.__name__, weights) for kind, weights, _ in learner.passes] == [
        ("Record", "own"),
        ("ReplayRecords", "rounded"),
        ("Record", "behavior-1"),
    ]
    for number, (ranks, micro) in enumerate([(2, 3), (3, 100)]):
        again, others, _ = probed(tmp_path / str(number), rows[::-1], ranks=ranks, tokens=200, micro_batch_rows=micro)
        assert len(others["sample_id"].unique()) == again["probe/rows"]


def test_rounded_weights_are_scored_by_every_so_many_probes(tmp_path: Path) -> None:
    rows = step_rows()
    for step in range(1, 8):
        folder = tmp_path / str(step)
        found, _, [learner] = probed(folder, rows, ranks=1, tokens=100, step=step, thorough_every=3)
        assert ("probe/cast_k3_kl" in found) == (step in (1, 4, 7))
        assert any(weights == "rounded" for _, weights, _ in learner.passes) == (step in (1, 4, 7))
        assert "probe/routing_share" in found


def test_the_first_minibatch_has_a_pass_where_a_probe_compares_or_takes_it() -> None:
    def passed(mode: ReplayMode = "R3", step: int = 6, tokens: int = 500, of: Sequence[int] = (600, 600)) -> bool:
        config = settings(probe={"every": 2, "tokens": tokens, "thorough_every": 3})
        return Probe(config, Path(), mode).anchors_all(TrainBatch(step, tuple(minis(*of)), {}))

    assert [passed(step=step) for step in range(1, 10)] == [step in (2, 8) for step in range(1, 10)]
    assert passed(tokens=0)
    assert passed(of=(700,))
    assert not passed(of=(1100,))
    assert not passed("none", tokens=0)
    assert passed("none", step=8)
    assert not passed(step=7, tokens=0)


@pytest.mark.parametrize("minibatches", [2, 6])
def test_the_standard_error_of_a_minibatch_is_the_spread_of_plans(minibatches: int) -> None:
    """Of 240 rows of unlike lengths, whose tokens are alike within a row and rows within a prompt."""
    rng = np.random.default_rng(2)
    rows = [
        TrainRow(make_record(sample_id=place, group_id=place // 8, num_sampled=1 + place % 11)) for place in range(240)
    ]
    tokens = lengths(rows)
    bad = rng.gamma(2.0, size=240) * np.repeat(rng.gamma(8.0, size=30), 8) * tokens
    truth, found, errors = bad.sum() / tokens.sum(), [], []
    for step in range(400):
        [shares] = plan_step(rows, seed=0, step=step, minibatches=minibatches, data_size=1)
        own = [row.record.row_id for micro in shares[-1].micro_batches for row in micro.rows]
        columns = {"bad": torch.tensor(bad[own]), "tokens": torch.tensor(tokens[own]).double()}
        mean, error = estimated(columns, own, len(own), 240)
        found.append(mean)
        errors.append(error)
    assert np.mean(found) == pytest.approx(truth, rel=0.02)
    assert_errors_are_the_spread(found, errors, truth)


def lengths(rows: Sequence[TrainRow]) -> Any:
    return np.array([int(row.record.scored.sum()) for row in rows])
