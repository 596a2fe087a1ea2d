"""The file of an experiment: what runs and what counts is fixed in it before the first run."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moe_trm.config.engines import DEFAULT, LEARNER, may_answer
from moe_trm.config.load import read_yaml
from moe_trm.config.problems import Problem, refuse
from moe_trm.config.schema.section import Count, Positive, Section
from moe_trm.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
"""Names of arms and experiments: they become folders."""


class ExperimentFile(Section):
    """Arms x seeds of one base configuration."""

    name: str
    """Name of the experiment: its folder is `run_dir/name`."""
    base: str
    """Configuration file of every run; relative to the working directory, as all paths in it."""
    overrides: tuple[str, ...] = ()
    """`section.key=value` of every run."""
    arms: dict[str, tuple[str, ...]]
    """By name: the overrides that make an arm, after the overrides of every run. An empty list is the base as it is."""
    baseline: str | None = None
    """The arm that the others are compared with; none: the first."""
    seeds: tuple[Count, ...]
    """Every arm runs with each of them; differences are taken between runs of the same seed."""
    repeated_seeds: tuple[Count, ...] = ()
    """Seeds that the baseline runs a second time. The second run is in no difference: it shows how far runs of the same
    settings and seed are from each other."""
    steps: Positive
    """Training steps of each run."""
    primary_metric: str
    """The metric that decides, e.g. `eval/accuracy`. All others are shown beside it."""
    evaluations: tuple[str, ...] = ()
    """Engines that answer the held-out prompts with each run's final weights, by `moe-trm eval`: names of engines with
    servers, e.g. `sglang`, or `learner`."""
    ranks: Positive | None = None
    """Learner ranks of a run; none: the fewest that hold the model."""
    run_dir: str = "runs"
    """Folder that holds the experiment's folder."""
    shared_server: bool = False
    """One rollout server for all runs, started once. Each run gives it its own start before it samples."""

    @property
    def against(self) -> str:
        """The arm that the others are compared with."""
        return self.baseline or next(iter(self.arms))


def read_file(path: str | Path) -> ExperimentFile:
    """Read and check the file alone; its configurations are resolved by `plan`.

    Raises:
        ConfigError: no such file, or not YAML; a key given twice, such as two arms of one name.
        InvalidConfigError: unknown keys, bad values, duplicate seeds and names that are no folder, all at once.
    """
    data = read_yaml(path)
    try:
        file = ExperimentFile.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        refuse(str(path), [_problem(details) for details in error.errors(include_url=False)])
        raise
    refuse(str(path), _contradictions(file))
    return file


def _problem(details: Any) -> Problem:
    key = ".".join(str(part) for part in details["loc"])
    keys = list(ExperimentFile.model_fields)
    if details["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, keys, n=1)
        return Problem(
            key,
            "unknown key of an experiment",
            fix=f"did you mean {close[0]}?" if close else f"known here: {', '.join(keys)}; settings go into overrides",
        )
    if details["type"] == "missing":
        return Problem(key, "required and missing", fix=str(ExperimentFile.model_fields[key].description))
    return Problem(
        key, "bad value", got=repr(details["input"])[:80], expected=details["msg"].removeprefix("Input should be ")
    )


def _answering(by: str) -> Iterator[Problem]:
    """The reason why `by` cannot answer evaluations, if there is one."""
    try:
        able, reason = may_answer(by), "has no servers that could answer"
    except ConfigError as error:
        able, reason = False, error.what
    if not able:
        yield Problem("evaluations", reason, got=by, expected=f"{DEFAULT}, {LEARNER}, or another engine with servers")


def _contradictions(file: ExperimentFile) -> Iterator[Problem]:
    for key, name in (("name", file.name), *(("arms", arm) for arm in file.arms)):
        if not NAME.fullmatch(name):
            yield Problem(key, "this name becomes a folder", got=repr(name), expected="letters, digits and _ . + -")
    if not file.arms:
        yield Problem("arms", "there is nothing to run", got="no arm", expected="name: [section.key=value, ...]")
    if not file.seeds:
        yield Problem("seeds", "there is nothing to run", got="no seed", expected="a list such as [0, 1, 2]")
    twice = sorted({seed for seed in file.seeds if file.seeds.count(seed) > 1})
    if twice:
        yield Problem(
            "seeds",
            "a seed that is given twice is no second observation",
            got=f"{', '.join(map(str, twice))} more than once",
            expected="different seeds",
        )
    if len(set(file.repeated_seeds)) < len(file.repeated_seeds) or set(file.repeated_seeds) - set(file.seeds):
        yield Problem(
            "repeated_seeds",
            "each is a seed of the experiment that the baseline runs once more",
            got=", ".join(map(str, file.repeated_seeds)),
            expected=f"different ones of {', '.join(map(str, file.seeds))}",
        )
    if len(set(file.evaluations)) < len(file.evaluations):
        yield Problem("evaluations", "given twice", got=", ".join(file.evaluations), expected=f"{DEFAULT}, {LEARNER}")
    for by in file.evaluations:
        yield from _answering(by)
    if file.baseline is not None and file.baseline not in file.arms:
        yield Problem("baseline", "no arm has this name", got=file.baseline, expected=" or ".join(file.arms))
