"""The weights that `moe-trm eval` measures, and the configuration that says on what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_trm.config.engines import DEFAULT, LEARNER, may_answer, traits_of
from moe_trm.config.load import read_yaml
from moe_trm.errors import ConfigError, RunError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.tools.export.checkpoint import export_checkpoint
from moe_trm.tools.export.run_folder import BEST, RunFolder, is_model, is_run, open_run, plain_config, run_around

ALL_PROMPTS = 10**9


@dataclass(frozen=True)
class Target:
    """A Hugging Face folder with weights, how to call it, and the run that it belongs to, if there is one."""

    weights: Path
    name: str
    run: RunFolder | None

    @property
    def folder(self) -> Path:
        """The default folder for results of its evaluation."""
        return self.run.path / "eval" if self.run is not None else Path()


def find_target(path: Path, step: int | None, scratch: Path) -> Target:
    """The weights in `path`: a run folder, one of its `step-NNNNNN` folders, or a Hugging Face folder.

    A run has those after `step`. None: the final ones, else those of its newest checkpoint. A checkpoint for training
    becomes a Hugging Face folder in `scratch`. Raises `RunError` for nothing to evaluate there, or not after that step,
    `CheckpointError` for weights that are damaged or missing.
    """
    config = plain_config(path)
    if (path / "manifest.json").is_file() and config is None:
        return Target(export_checkpoint(path, scratch / path.name), path.name, run_around(path))
    if config is not None and is_run(config):
        return _of_run(open_run(path), step, scratch)
    if config is not None and is_model(config):
        if step is not None:
            raise RunError("a Hugging Face folder has no steps", where=str(path), got=f"--step {step}")
        if not HfCheckpoint(path).names:
            raise RunError("there are no weights in this folder", where=str(path))
        return Target(path, path.resolve().name, run_around(path))
    raise RunError(
        "there is nothing to evaluate in this folder",
        where=str(path),
        got=_content(path),
        expected="a run (runs/NAME), one of its checkpoints, or a Hugging Face folder with config.json and safetensors",
    )


def _of_run(run: RunFolder, step: int | None, scratch: Path) -> Target:
    if step is None and (run.final / "config.json").is_file():
        return Target(run.final, run.final.name, run)
    exported = run.checkpoints / f"hf-{step:06d}" if step is not None else None
    if exported is not None and exported.is_dir():
        return Target(exported, exported.name, run)
    if step is None and not run.steps():
        raise RunError(
            "this run has left no weights",
            where=str(run.path),
            got=_content(run.checkpoints) if run.checkpoints.is_dir() else "no folder checkpoints",
            expected=f"checkpoints/final, checkpoints/{BEST} or a step-NNNNNN folder",
            fix="train.export and checkpoint.every say what a run leaves; its start is model.checkpoint.",
        )
    checkpoint = run.checkpoint(step)
    return Target(export_checkpoint(checkpoint, scratch / checkpoint.name), checkpoint.name, run)


def answering(target: Target, config: Path | None, by: str | None) -> str:
    """The engine that answers, or `LEARNER`: `by`, else the run's own where it has servers, else the default one.

    Raises `ConfigError` for an engine that is not known or has no servers.
    """
    path = config or (target.run.path / "config.json" if target.run is not None else None)
    rollout = (read_yaml(path).get("rollout") or {}) if path is not None else {}
    run_engine = str(rollout.get("engine", DEFAULT))
    if by is None:
        return run_engine if traits_of(run_engine).has_servers else DEFAULT
    if not may_answer(by):
        raise ConfigError(
            "this engine has no servers that could answer", where="--by", got=by, expected=f"{DEFAULT}, {LEARNER}"
        )
    return by


def settings_of(
    target: Target, *, by: str, config: Path | None, prompts: Path | None, samples: int | None, scratch: Path
) -> tuple[Path, list[str]]:
    """The configuration file to read, and what is overridden in it before the user's own overrides.

    Raises:
        ConfigError: neither a run nor a configuration nor prompts say what to ask.
    """
    path = config or (target.run.path / "config.json" if target.run is not None else None)
    if path is None and prompts is None:
        raise ConfigError(
            "nothing says what to ask this model",
            where=str(target.weights),
            got="a Hugging Face folder that belongs to no run",
            expected="prompts and rewards",
            fix="Give --config CONFIG.yaml of a run, or --prompts FILE and task.reward=... where it is not `exact`.",
        )
    task = (read_yaml(path).get("task") or {}) if path is not None else {}
    # This evaluation has a server of its own: pushing to the servers of a run would end that run.
    overrides = ["rollout.url=null", "rollout.urls=[]", "rollout.router=null", "rollout.server.port=0"]
    engine = DEFAULT if by == LEARNER else by
    overrides += [
        f"rollout.engine={json.dumps(engine)}",
        "rollout.bundle=null",
        "rollout.colocate=false",
        "record.bundle=null",
    ]
    if path is None:
        path = scratch / "eval.yaml"
        path.write_text(json.dumps({"model": {"checkpoint": str(target.weights)}}), encoding="utf-8")
    overrides.append(f"model.checkpoint={json.dumps(str(target.weights))}")
    if prompts is not None:
        overrides += _asking(prompts, keeps_name=task.get("name") == "gsm8k")
    return path, overrides + ([f"eval.samples={samples}"] if samples is not None else [])


def _asking(prompts: Path, *, keeps_name: bool) -> Sequence[str]:
    """Settings under which `prompts` are the held-out prompts, all of them."""
    quoted = json.dumps(str(prompts))
    name = [] if keeps_name else ["task.name=jsonl"]
    return [
        *name,
        f"task.prompts={quoted}",
        f"task.eval_prompts={quoted}",
        "task.eval_sets={}",
        f"task.eval_size={ALL_PROMPTS}",
    ]


def _content(path: Path) -> str:
    if not path.is_dir():
        return "a file" if path.exists() else "no such folder"
    return ", ".join(sorted(child.name for child in path.iterdir())[:8]) or "an empty folder"
