"""The plan of an experiment: every run resolved and checked before the first one starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.start.preflight import check_start, load_here, smallest_world
from moe_trm.config.flat import as_yaml, different_keys, flatten
from moe_trm.config.load import InvalidOverrideError, parse_override
from moe_trm.config.problems import Problem, refuse
from moe_trm.config.schema import Config, RolloutConfig, SyncConfig
from moe_trm.errors import ConfigError, MoeTrmError, refuse_together
from moe_trm.tools.experiment.definition import ExperimentFile, read_file
from moe_trm.tools.experiment.primary import metric_problem

OWN = {
    "name": "name and arms name the runs",
    "run_dir": "run_dir of the experiment says where",
    "seed": "seeds lists them",
    "train.steps": "steps says how many",
    "rollout.server.port": "every run takes a free one",
}
"""Settings that the experiment makes, and which of its keys does."""
ONE_PLACE = ("checkpoint.dir", "record.bundle", "sync.dir")
"""Folders that the runs of an experiment would share."""
PLACES = {"base", "overrides", "arms", "baseline", "run_dir", "shared_server"}
"""Keys of the file that say where and by what, or are resolved in the arms."""
SERVED = ("model.", "rollout.server.", "rollout.quantization")
"""Settings that make a server what it is."""

Check = Callable[[Config, int], None]
"""Raises the error that refuses a run of this configuration on this many ranks."""


@dataclass(frozen=True)
class PlannedRun:
    """One run: an arm with a seed. `again`: a second run of the baseline with this seed (`repeated_seeds`)."""

    arm: str
    seed: int
    overrides: tuple[str, ...]
    server: str | None = None
    """Address of a server that all runs share; none: the run starts its own."""
    again: bool = False

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}{'-again' if self.again else ''}"


@dataclass(frozen=True)
class ExperimentPlan:
    """The runs of an experiment's file and their folder, with the resolved configuration of each arm, of its first
    seed.

    Runs are seed by seed, so that what is done after any number of them can be compared.
    """

    file: ExperimentFile
    folder: Path
    runs: tuple[PlannedRun, ...]
    configs: Mapping[str, Config]

    def settings(self) -> dict[str, Any]:
        """Everything that decides about the outcome, by dotted key; places are no part of it."""
        arms = {arm: _apart_from_place(config.dump()) for arm, config in self.configs.items()}
        # Experiments that began before there was this key have no such seeds.
        absent = set() if self.file.repeated_seeds else {"repeated_seeds"}
        file = self.file.model_dump(mode="json", exclude=PLACES | absent)
        flat = flatten({**file, "baseline": self.file.against, "order": list(arms)})
        return flat | {f"arms.{arm}.{key}": value for arm, flat in arms.items() for key, value in flat.items()}

    def apart(self, arm: str) -> dict[str, tuple[Any, Any]]:
        """Settings of `arm` that differ from the baseline's: theirs and its own."""
        first, settings = (_apart_from_place(self.configs[name].dump()) for name in (self.file.against, arm))
        return {key: (first.get(key), settings.get(key)) for key in different_keys(first, settings)}


def make_plan(path: str | Path, folder: Path | None = None, check: Check = check_start) -> ExperimentPlan:
    """Read the file, resolve every arm, and refuse what cannot run or cannot be compared.

    `folder` is where everything goes; None: `run_dir/name` of the file. `check` is made of each arm's first run. Raises
    `ConfigError` with all that is wrong with the file, the arms or this machine, as far as it can be told at once.
    """
    file = read_file(path)
    folder = folder or Path(file.run_dir) / file.name
    refuse(str(path), _overrides_of_its_own(file))
    configs: dict[str, Config] = {}

    def resolve(arm: str) -> None:
        run = _planned(file, folder, arm, file.seeds[0])
        with _naming(arm):
            config, _ = load_here(file.base, run.overrides)
            check(config, file.ranks or smallest_world(config.learner.parallel))
        configs[arm] = config

    refuse_together(*(lambda arm=arm: resolve(arm) for arm in file.arms))
    settings = {arm: config.dump() for arm, config in configs.items()}
    refuse(str(path), [*_shared_places(settings[file.against]), *_same_arms(settings)])
    refuse(str(path), [*_arms(file, configs), *_server(file, configs)])
    return ExperimentPlan(file, folder, tuple(_runs(file, folder)), configs)


@contextmanager
def _naming(arm: str) -> Iterator[None]:
    """Errors inside the `with` name the arm."""
    try:
        yield
    except MoeTrmError as error:
        raise ConfigError(f"arm {arm} is refused: {error}") from error


def _runs(file: ExperimentFile, folder: Path) -> Iterator[PlannedRun]:
    for seed in file.seeds:
        yield from (_planned(file, folder, arm, seed) for arm in file.arms)
        if seed in file.repeated_seeds:
            yield _planned(file, folder, file.against, seed, again=True)


def _planned(file: ExperimentFile, folder: Path, arm: str, seed: int, *, again: bool = False) -> PlannedRun:
    run = PlannedRun(arm, seed, (), again=again)
    run_settings = (
        f"name={run.name}",
        f"run_dir={folder}",
        f"seed={seed}",
        f"train.steps={file.steps}",
        "rollout.server.port=0",
    )
    return PlannedRun(arm, seed, (*file.overrides, *file.arms[arm], *run_settings), again=again)


def _overrides_of_its_own(file: ExperimentFile) -> Iterator[Problem]:
    for place, overrides in (("overrides", file.overrides), *((f"arms.{a}", o) for a, o in file.arms.items())):
        for override in overrides:
            try:
                key, _ = parse_override(override)
            except InvalidOverrideError as error:
                yield Problem(place, str(error.problem))
                continue
            if key in OWN:
                yield Problem(place, f"{key} is set by the experiment itself", got=override, expected=OWN[key])


def _shared_places(settings: dict[str, Any]) -> Iterator[Problem]:
    flat = flatten(settings)
    for key in ONE_PLACE:
        if flat.get(key):
            yield Problem(key, "all runs would share this folder", got=str(flat[key]), expected="none")


def _same_arms(settings: Mapping[str, dict[str, Any]]) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for arm, arm_settings in settings.items():
        key = json.dumps(_apart_from_place(arm_settings), sort_keys=True)
        if key in seen:
            yield Problem(
                "arms",
                f"{arm} and {seen[key]} differ by name only",
                got="the same settings",
                expected="arms with different settings",
                fix="`auto` may have become what the other says: see moe-trm config show",
            )
        seen.setdefault(key, arm)


def _arms(file: ExperimentFile, configs: Mapping[str, Config]) -> Iterator[Problem]:
    """Arms that do not measure the metric or that leave nothing to evaluate."""
    problems = (
        metric_problem(file.primary_metric, config.eval, config.task, config.rollout) for config in configs.values()
    )
    yield from dict.fromkeys(problem for problem in problems if problem is not None)
    for arm, config in configs.items():
        if file.evaluations and not config.train.export and not config.checkpoint.every:
            yield Problem(
                "evaluations",
                f"runs of arm {arm} leave no weights to evaluate",
                got="train.export=false and checkpoint.every=0",
                expected="train.export=true",
            )
        if file.evaluations and not config.task.has_evaluation:
            yield Problem("evaluations", f"runs of arm {arm} have no held-out prompts", got="none", expected="some")


def _server(file: ExperimentFile, configs: Mapping[str, Config]) -> Iterator[Problem]:
    """Arms that cannot share the server of the baseline."""
    first = _apart_from_place(configs[file.against].dump())
    for arm, config in configs.items() if file.shared_server else ():
        needs = _own_server(config.rollout, config.sync)
        if needs:
            yield Problem("shared_server", f"runs of arm {arm} cannot share a server", got=needs, expected="false")
            continue
        settings = _apart_from_place(config.dump())
        distinct = [key for key in different_keys(first, settings) if key.startswith(SERVED)]
        if distinct:
            listed = ", ".join(f"{key}={as_yaml(settings.get(key))}" for key in distinct)
            yield Problem(
                "shared_server", f"arm {arm} needs another server than {file.against}", got=listed, expected="false"
            )


def _own_server(rollout: RolloutConfig, sync: SyncConfig) -> str:
    """The reason why runs of `config` cannot share one server; empty where they can."""
    if not rollout.starts_server:
        return "they start none"
    if rollout.colocate:
        return "rollout.colocate=true"
    return f"sync.method={sync.method}" if sync.method == "distributed" else ""


def _apart_from_place(settings: dict[str, Any]) -> dict[str, Any]:
    flat = flatten(json.loads(json.dumps(settings)))
    return {key: value for key, value in flat.items() if key not in (*OWN, "rollout.api_key")}
