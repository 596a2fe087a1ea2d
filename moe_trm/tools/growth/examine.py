"""The examination of a run between two checkpoints: its texts and weights, both engines, and what the split says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from launch.start.checks import Check
from launch.start.preflight import load_here
from moe_trm.config.schema import Config, LoraConfig, ParallelConfig
from moe_trm.errors import ConfigError, RunError
from moe_trm.learner.build import build_learner
from moe_trm.learner.protocol import Learner
from moe_trm.recording.bundle import BundleReader
from moe_trm.recording.scores import ScoresReader
from moe_trm.rollout.build import build_engine
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.servers.backend import Served
from moe_trm.tools.evaluate.measure import BARE
from moe_trm.tools.evaluate.subject import Target, answering, find_target, settings_of
from moe_trm.tools.export.run_folder import RunFolder, open_run
from moe_trm.tools.growth.cells import (
    Head,
    LearnerAt,
    Serve,
    ServedText,
    cell_of,
    choices,
    flips,
    learner_by,
    native_pass,
    score_again,
    served_texts,
)
from moe_trm.tools.growth.sentences import TITLES, because, cause_of, checks_of
from moe_trm.tools.growth.split import Array, CellTokens, Rise, TextTokens, split
from moe_trm.types import RolloutRecord

SERVED: Mapping[str, Mapping[str, Any]] = MappingProxyType({**BARE, "replay": {"mode": "R3"}})
"""Settings that leave out what only training needs of an engine, but for routes."""


@dataclass(frozen=True)
class Growth:
    """The growth of the mismatch: rises with their parts, and means of then and of now by name.

    `because`: the cause in words, by the title of each figure that has one with evidence.
    """

    steps: tuple[int, int]
    texts: tuple[int, int]
    rises: tuple[Rise, ...]
    facts: Mapping[str, tuple[float, float]]
    measured: bool
    scored: bool
    checks: tuple[Check, ...]
    because: Mapping[str, str]


@dataclass(frozen=True)
class StoredTexts:
    """Rows that a run recorded in the step after a checkpoint, and its learner's scores of them.

    Attributes:
        version: of the checkpoint's weights.
        scores: by row id, `[T - 1]` log-probs at the start of the step, NaN where nothing was scored; empty: not saved.
    """

    version: int
    records: tuple[RolloutRecord, ...]
    scores: Mapping[int, Array]


def examine_growth(run: Path, steps: tuple[int, int], rows: int, scratch: Path) -> Growth:
    """Examine the run in `run` between the checkpoints of two steps, with `rows` texts of each.

    Raises:
        RunError: no run, no checkpoint of a step, or no recorded texts of the step after it.
        ConfigError: steps in the wrong order, or an engine that cannot be started here.
        MoeTrmError: an engine does not come up.
    """
    if not 0 <= steps[0] < steps[1]:
        raise ConfigError("two steps, the earlier one first", where="--grown", got=steps)
    folder = open_run(run)
    texts = [stored_texts(folder, step, rows) for step in steps]
    targets = [_target(folder, step, scratch) for step in steps]
    config = _config(targets[1], scratch)
    if config.task.has_pictures:
        raise ConfigError(
            "texts are served again without their pictures",
            where="config key task.image_field",
            got=config.task.image_field,
            expected="a run on prompts of text alone",
        )
    measures = config.rollout.temperature == 1.0

    def at(weights: Path) -> Config:
        return config.model_copy(update={"model": config.model.model_copy(update={"checkpoint": str(weights)})})

    def serve(weights: Path, records: Sequence[RolloutRecord]) -> Sequence[ServedText]:
        sections = {name: getattr(config, name).model_copy(update=values) for name, values in SERVED.items()}
        served = at(weights).model_copy(update=sections)

        def connect(url: str, key: str) -> RolloutEngine:
            rollout = served.rollout.model_copy(update={"url": url})
            return build_engine(served.model_copy(update={"rollout": rollout}), key)

        return served_texts(Served.of(served), connect, weights, records)

    weights = [target.weights for target in targets]
    cells, tokens = measure(
        texts,
        weights,
        serve,
        learner_by(lambda weights: build_learner(at(weights)), config.learner.backend),
        replays=config.replay.mode == "R3",
        keeps_masks=config.keeps_masks,
        measures=measures,
    )
    return judge(steps, tokens, cells, [len(part.records) for part in texts], replays=config.replay.mode == "R3")


def judge(
    steps: tuple[int, int],
    tokens: Sequence[TextTokens],
    cells: Sequence[Sequence[CellTokens]],
    texts: Sequence[int],
    *,
    replays: bool,
) -> Growth:
    """The split of what was measured, in words."""
    rises, facts = split(tokens, cells, replays=replays)
    measured, scored = (all(getattr(part, name) for part in tokens) for name in ("measured", "scored"))
    absent = {*(() if measured else ("push", "staleness")), *(() if measured and scored else ("scoring",))}
    rises = tuple(replace(rise, parts=tuple(p for p in rise.parts if p.name not in absent)) for rise in rises)
    checks = tuple(checks_of(rises, facts, sorted(absent)))
    causes = {TITLES[rise.figure]: cause_of(rise) for rise in rises}
    words = {title: because(cause, facts) for title, cause in causes.items() if cause is not None}
    return Growth(steps, (texts[0], texts[1]), rises, facts, measured, scored, checks, words)


def stored_texts(run: RunFolder, step: int, rows: int) -> StoredTexts:
    """At most `rows` rows of the step after the checkpoint of `step`, the same in every call. Raises `RunError`."""
    named = run.config.get("record", {}).get("bundle")
    bundle = BundleReader(str(named)) if named else None
    if bundle is None or step + 1 not in bundle.steps():
        raise RunError(
            "the run recorded no texts after this checkpoint",
            where=str(named or run.path),
            got="no record.bundle" if bundle is None else f"steps {bundle.steps()}",
            expected=f"step {step + 1}, the first that checkpoint {step} sampled or trained on",
            fix="Record the run with record.bundle=FOLDER, and name checkpoints with a recorded step after them.",
        )
    records = [record for record in bundle.read(step + 1) if record.num_sampled and record.num_tokens > 1]
    order = np.sort(np.random.default_rng(0).permutation(len(records))[:rows])
    return StoredTexts(step, tuple(records[place] for place in order), run_scores(Path(str(named)), step + 1))


def run_scores(bundle: Path, step: int) -> dict[int, Array]:
    """By row id `[T - 1]` learner log-probs at the start of the step, as the run saved them; empty where it did not."""
    reader = ScoresReader(bundle)
    if step not in reader.steps():
        return {}
    scores: dict[int, Array] = {}
    for update in reader.read(step):
        for batch in update.batches:
            values = batch.current_logprobs if batch.anchor_logprobs is None else batch.anchor_logprobs
            values = values.double().masked_fill(~batch.mask, float("nan"))
            scores |= {int(row): line.numpy() for row, line in zip(batch.sample_ids, values, strict=True) if row >= 0}
    return scores


def measure(
    texts: Sequence[StoredTexts],
    weights: Sequence[Path],
    serve: Serve,
    learner_at: LearnerAt,
    *,
    replays: bool,
    keeps_masks: bool,
    measures: bool = True,
) -> tuple[list[list[CellTokens]], list[TextTokens]]:
    """The four cells, `[s][w]`, and the tokens of both sets of texts.

    Args:
        weights: folders of then and of now.
        replays, keeps_masks: of the run.
        measures: recorded log-probs are over the temperature of the cells, so they can be compared.
    """
    cells: list[list[CellTokens]] = [[], []]
    tokens: list[TextTokens] = []
    for w, folder in enumerate(weights):
        served = [serve(folder, part.records) for part in texts]
        head = Head(folder)
        with learner_at(folder) as learner:
            for s, part in enumerate(texts):
                rows = [
                    cell_of(learner, head, record, text) for record, text in zip(part.records, served[s], strict=True)
                ]
                cells[s].append(_joined(CellTokens, rows))
            text_rows = [
                _text_tokens(learner, texts[w], record, replays=replays, keeps_masks=keeps_masks)
                for record in texts[w].records
            ]
        joined = _joined(TextTokens, text_rows)
        cell = cells[w][w]
        if not (measures and np.isfinite(joined.sampled).all()):
            log_ratio = cell.replayed if replays else cell.native
            joined = replace(joined, sampled=log_ratio, recorded=log_ratio, flipped=cell.flipped, measured=False)
        tokens.append(joined)
    return cells, tokens


def _text_tokens(
    learner: Learner, texts: StoredTexts, record: RolloutRecord, *, replays: bool, keeps_masks: bool
) -> TextTokens:
    full, scored = score_again(learner, record, replays=replays and record.routes is not None, keeps_masks=keeps_masks)
    sampled = full - record.full_logprobs.astype(np.float64)
    saved = texts.scores.get(record.row_id)
    recorded = sampled
    if saved is not None:
        # What the run's scores differ by, on the tokens that it scored.
        gap = saved[: record.num_tokens - 1][record.sampled[1:]] - scored
        recorded = sampled + np.where(np.isnan(gap), 0.0, gap)
    flipped = np.zeros((record.num_sampled, len(learner.moe_layer_ids)), bool)
    if record.routes is not None:
        experts, _ = choices(native_pass(learner, record), learner.moe_layer_ids, record)
        flipped = flips(record.routes, experts, learner.moe_layer_ids, record)
    places = np.flatnonzero(record.sampled)
    return TextTokens(
        group=np.full(record.num_sampled, record.group_id),
        length=np.full(record.num_sampled, record.num_tokens),
        position=places,
        stale=record.versions < texts.version,
        sampled=sampled,
        recorded=recorded,
        flipped=flipped,
        measured=record.routes is not None,
        scored=saved is not None,
    )


def _joined(kind: type[Any], parts: Sequence[Any]) -> Any:
    """One of all tokens; what is true of a set of texts has to be true of each."""
    values = {field.name: [getattr(part, field.name) for part in parts] for field in fields(kind)}
    return kind(
        **{name: all(rows) if isinstance(rows[0], bool) else np.concatenate(rows) for name, rows in values.items()}
    )


def _target(run: RunFolder, step: int, scratch: Path) -> Target:
    """The weights after `step`; of step 0 those that the run started from."""
    if step == 0:
        return Target(Path(run.config["model"]["checkpoint"]), "start", run)
    return find_target(run.path, step, scratch)


def _config(target: Target, scratch: Path) -> Config:
    """The run's settings with a server of this command's own, and a learner on one rank without bounds on flips.

    Its adapters are merged in the checkpoints. Raises `ConfigError` where no server can be started.
    """
    engine = answering(target, None, None)
    path, overrides = settings_of(target, by=engine, config=None, prompts=None, samples=None, scratch=scratch)
    config, _ = load_here(str(path), overrides)
    traits = config.rollout.traits
    missing = [name for package in traits.packages if find_spec(name := package.partition("==")[0]) is None]
    if missing or not traits.scores_tokens or not traits.records_routes:
        raise ConfigError(
            "the served side of the four cells cannot be measured here",
            where="config key rollout.engine",
            got=f"{engine}, {f'{missing[0]} is not installed' if missing else 'which scores no given tokens'}",
            expected="an engine whose servers give log-probs and routes of given tokens",
            fix="Run this where the run's engine is installed.",
        )
    unsplit = config.learner.model_copy(update={"parallel": ParallelConfig(), "lora": LoraConfig()})
    unbound = config.replay.model_copy(update={"max_local_flip_rate": 1.0})
    return config.model_copy(update={"learner": unsplit, "replay": unbound})
