"""A recording in whatever format it is on disk: one of ours, or the dump of another framework."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_trm.config.schema import Config
from moe_trm.errors import BundleError
from moe_trm.recording.bundle import BundleReader
from moe_trm.recording.scores import CONFIG_FILE, ScoredUpdate, ScoresReader
from moe_trm.tools.whatif import foreign
from routing.layout.row_ids import row_name


@dataclass(frozen=True)
class Recording:
    """Recorded steps that can be judged offline.

    Attributes:
        source: where it comes from, in words.
        config: the configuration that was recorded; of a dump, the defaults.
        steps: the updates of each step.
        trained: whether `config` is what the run trained with, so that its figures must come out again.
        grouped: whether it is known which samples answer the same prompt.
    """

    source: str
    config: Config
    steps: Mapping[int, Sequence[ScoredUpdate]]
    trained: bool
    grouped: bool


def load(path: Path) -> Recording:
    """Read a bundle folder, the folder of a run that recorded one, a folder of dumps, or one dump file.

    Raises:
        BundleError: nothing readable there, damage, another version, or a dump without the log-probs that are needed.
    """
    path = _bundle_of(path) or path
    reader = ScoresReader(path)
    if reader.steps():
        steps = {step: reader.read(step) for step in reader.steps()}
        _check_same_run(path, steps)
        return Recording("a bundle of moe-trm", reader.config(), steps, trained=True, grouped=True)
    if path.is_dir() and any(path.glob("step-*.safetensors")):
        raise BundleError(
            "this bundle holds rollouts but no scores, so there is nothing to compare them with",
            where=str(path),
            expected="files named scores-NNNNNN-rank-RRR.safetensors",
            fix="Record the run again with record.bundle=FOLDER, "
            "or repeat it: rollout.engine=bundle with record.bundle=OTHER.",
        )
    files = sorted(file for file in path.iterdir() if file.suffix in foreign.SUFFIXES) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise BundleError(
            "there is no recording here",
            where=str(path),
            expected="a bundle folder, or a .pt dump of slime, miles or verl",
            fix="Record a run with record.bundle=FOLDER.",
        )
    dumps = [foreign.read(file) for file in files]
    steps = foreign.by_step(dumps)
    config = Config.model_validate({"model": {"checkpoint": "not recorded"}})
    names = ", ".join(sorted({dump.framework for dump in dumps}))
    return Recording(f"a dump of {names}", config, steps, trained=False, grouped=False)


def _bundle_of(folder: Path) -> Path | None:
    """The recording of the run in `folder`; None where there is no run. Raises `BundleError` where it recorded none."""
    if not (folder / "metrics.jsonl").is_file() or not (folder / CONFIG_FILE).is_file():
        return None
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    named: str | None = config.get("record", {}).get("bundle")
    if not named:
        raise BundleError(
            "this run was not recorded",
            where=str(folder),
            got="record.bundle is not set in its config.json",
            expected="a run with record.bundle=FOLDER",
            fix="Run it again with record.bundle=FOLDER. A recording cannot be made afterwards.",
        )
    # As the run saw it, beside the run's own folder, or moved together with it.
    places = [Path(named), folder.parent.parent / named, folder.parent / Path(named).name]
    for place in places:
        if place.is_dir():
            return place
    raise BundleError(
        "the recording of this run is not there",
        where=str(folder),
        got=f"none of {', '.join(map(str, places))}",
        expected="the folder of record.bundle",
        fix="Give the recording's folder itself.",
    )


def _check_same_run(folder: Path, steps: Mapping[int, Sequence[ScoredUpdate]]) -> None:
    """Raise `BundleError` unless the scores are of the rollouts beside them.

    Each scored log-prob must have been recorded for that sample.
    """
    rollouts = BundleReader(str(folder))
    recorded = rollouts.steps()
    for step in steps if recorded else ():
        recorded_logprobs = rollouts.logprobs(step) if step in recorded else {}
        for batch in (batch for update in steps[step] for batch in update.batches):
            for row, sample in enumerate(batch.sample_ids.tolist()):
                row_logprobs = batch.rollout_logprobs[row][batch.mask[row]].numpy()
                if sample >= 0 and not (
                    sample in recorded_logprobs and np.isin(row_logprobs, recorded_logprobs[sample]).all()
                ):
                    raise BundleError(
                        "rollouts and scores of this bundle are of different runs",
                        where=f"{folder}, step {step}, {row_name(sample)}",
                        got="scores of log-probs that the rollouts beside them do not have",
                        expected="both as one run recorded them",
                        fix="Record the run again into an empty folder.",
                    )
