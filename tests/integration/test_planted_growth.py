"""Growths planted between two checkpoints of tiny models of three families: each is named rightly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from moe_trm.models.tiny.families import make_family
from moe_trm.tools.growth.cells import Head, ServedText, cell_of
from moe_trm.tools.growth.examine import Growth, StoredTexts
from moe_trm.tools.growth.sentences import cause_of
from moe_trm.types import RolloutRecord
from tests.integration.growth_support import (
    PlainLearner,
    changed,
    examined,
    serve,
    server,
    texts_of,
    trained,
)

FAMILIES = ("qwen3_moe", "mixtral", "olmoe")
LATE = 1e-3
"""Share of a log-prob by which the engines part with each token before it, in texts that show their length."""


@dataclass(frozen=True)
class Pair:
    """A start checkpoint, texts that it sampled, and a folder for what becomes of it."""

    start: Path
    then: StoredTexts
    folder: Path

    @property
    def weights(self) -> Path:
        """The start after a little training."""
        target = self.folder / "trained"
        return target if target.exists() else changed(self.start, target, trained)

    def changed(self, name: str, factor: float, *ends: str) -> Path:
        target = self.folder / name
        return changed(self.start, target, lambda tensor_name, x: x * factor if tensor_name.endswith(ends) else x)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    start = make_family(request.param, folder / "start", tie_word_embeddings=False)
    return Pair(start, texts_of(server(start), 10), folder)


def scored(texts: StoredTexts, weights: Path, shift: int = 0) -> StoredTexts:
    """With the scores that the run's learner saved, `shift` tokens out of place."""
    learner, head = PlainLearner(weights), Head(weights)
    scores = {}
    for record, served in zip(texts.records, serve(weights, texts.records), strict=True):
        logprobs = np.full(record.num_tokens - 1, np.nan)
        native = cell_of(learner, head, record, served).native + served.logprobs
        logprobs[record.sampled[1:]] = np.roll(native, shift)
        scores[record.row_id] = logprobs
    return replace(texts, scores=scores)


def late(record: RolloutRecord) -> np.ndarray:
    factors: np.ndarray = 1 + LATE * np.flatnonzero(record.sampled)
    return factors


def serve_late(folder: Path, records: Sequence[RolloutRecord]) -> list[ServedText]:
    return [
        replace(text, logprobs=text.logprobs * late(record))
        for text, record in zip(serve(folder, records), records, strict=True)
    ]


def recorded_late(texts: StoredTexts) -> StoredTexts:
    records = [
        replace(record, full_logprobs=(record.full_logprobs * late(record)).astype(np.float32))
        for record in texts.records
    ]
    return replace(texts, records=tuple(records))


def still(pair: Pair) -> Growth:
    now = scored(texts_of(server(pair.start), 20), pair.start)
    return examined(pair.start, pair.start, [scored(pair.then, pair.start), now])


def sharper(pair: Pair) -> Growth:
    weights = pair.changed("sharper", 2.0, "lm_head.weight")
    return examined(pair.start, weights, [pair.then, texts_of(server(weights), 20)], replays=True)


def closing(pair: Pair) -> Growth:
    weights = pair.changed("closing", 0.05, "gate.weight", "router.weight")
    return examined(pair.start, weights, [pair.then, texts_of(server(weights), 20)])


def longer(pair: Pair) -> Growth:
    now = recorded_late(texts_of(server(pair.start), 20, length=70))
    return examined(pair.start, pair.start, [recorded_late(pair.then), now], served=serve_late, replays=True)


def lost_layer(pair: Pair) -> Growth:
    start = load_file(pair.start / "model.safetensors")
    served = changed(
        pair.weights, pair.folder / "lost", lambda name, tensor: start[name] if ".layers.1." in name else tensor
    )
    return examined(pair.start, pair.weights, [pair.then, texts_of(server(served), 20)])


def older(pair: Pair) -> Growth:
    return examined(pair.start, pair.weights, [pair.then, texts_of(server(pair.start), 20, label=15)])


def shifted(pair: Pair) -> Growth:
    now = scored(texts_of(server(pair.start), 20), pair.start, shift=1)
    return examined(pair.start, pair.start, [scored(pair.then, pair.start), now])


PLANTED: dict[str, tuple[Callable[[Pair], Growth], str, set[str]]] = {
    "sharper policy": (sharper, "weights", {"output"}),
    "closing margins": (closing, "weights", {"routing"}),
    "longer texts": (longer, "texts", {"position", "length"}),
    "a push that loses a layer": (lost_layer, "push", {""}),
    "older samples": (older, "staleness", {""}),
    "an index error in scoring at learning rate 0": (shifted, "scoring", {""}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANTED))
def test_each_planted_growth_is_named(pair: Pair, name: str) -> None:
    plant, part, details = PLANTED[name]
    growth = plant(pair)
    cause = cause_of(growth.rises[0])
    assert cause is not None, growth.checks[0].says
    assert cause.name == part, growth.checks[0].says
    assert cause.detail in details, growth.checks[0].says
    if name == "closing margins":
        (margins,) = (part for part in growth.rises[2].parts if part.detail == "margins")
        assert margins.size.low > 0


@pytest.mark.slow
def test_learning_rate_0_gives_zero_in_every_part(pair: Pair) -> None:
    growth = still(pair)
    assert growth.because == {}
    assert growth.measured
    assert growth.scored
    for rise in growth.rises:
        for part in rise.parts:
            if part.name in ("weights", "interaction", "scoring"):
                assert part.size.value == part.size.low == part.size.high == 0, part
            elif part.detail == "content":  # by chance, with heavy tails
                continue
            elif part.name == "texts":
                assert part.size.low <= 0 <= part.size.high, part
            else:  # recorded log-probs are float32
                assert abs(part.size.value) < 1e-6, part
