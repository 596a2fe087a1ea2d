"""Experiments whose runs are a small program: it writes `metrics.jsonl` as a run does, and ends as it is told to."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moe_trm.config.schema import Config
from moe_trm.tools.experiment.commands import run_experiment
from moe_trm.tools.experiment.plan import ExperimentPlan, PlannedRun
from moe_trm.tools.experiment.stages import RunStage, result_of

PROGRAM = """
import json, os, pathlib, signal, sys

script, *overrides = sys.argv[1:]
set_to = dict(each.split("=", 1) for each in overrides)
folder = pathlib.Path(set_to["run_dir"]) / set_to["name"]
told = json.loads(pathlib.Path(script).read_text()).get(set_to["name"], {})
folder.mkdir(parents=True, exist_ok=True)
steps, seed, arm = int(set_to["train.steps"]), int(set_to["seed"]), set_to["name"].split("-seed")[0]
path = folder / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.exists() else 0
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
with (folder / "started").open("a") as started:
    started.write(f"{done}\\n")
with (folder / "servers").open("a") as servers:
    servers.write(f"{set_to.get('rollout.url')} {os.environ.get('MOE_TRM_API_KEY')}\\n")
with (folder / "parents").open("a") as parents:
    parents.write(f"{os.getppid()}\\n")
tries = len((folder / "started").read_text().splitlines())
print("begins at", done, flush=True)
for step in range(done, steps + 1):
    row = {"step": step, "time/unix_s": 0.0}
    if step in (0, steps) and "unmeasured" not in told:
        row["eval/prompts"] = told.get("prompts", 10**6)
        row["eval/accuracy"] = told.get("accuracy", 0.5 + 0.01 * seed) if step else 0.1
    if step:
        row |= {
            "reward/mean": 0.1 * step + 0.01 * seed, "engine/k3_kl": 1e-4 * (seed + 1), "time/step_s": 0.5,
            "acceptance/length_1_16": 1.0, "acceptance/length_17_64": 0.5, "acceptance/positive": 0.9,
            "acceptance/negative": 0.7, "correction/kept_fraction": 0.9, "routing/flips/engine": 0.01,
        }
        if arm == "R3":
            row["replay/applied_fraction"] = 1.0
    with path.open("a") as file:
        file.write(json.dumps(row) + "\\n")
    if step == told.get("killed_at") and tries == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == told.get("kills_parent_at") and tries == 1:
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    if step == told.get("fails_at") and tries <= told.get("times", 99):
        print(told.get("says", "error: the loss is not finite\\n  got:      nan"), file=sys.stderr)
        sys.exit(2)
    if step == told.get("stops_all_at") and tries == 1:
        os.kill(told.get("experiment", os.getppid()), signal.SIGTERM)
        while not asked:
            signal.pause()
    if step == told.get("ends_early_at"):
        sys.exit(0)
    if asked:
        sys.exit(143)
"""

EVALUATION = """
import json, pathlib, sys

script, run, by, out = sys.argv[1:]
told = json.loads(pathlib.Path(script).read_text()).get(run, {})
if told.get("no_evaluation") == by:
    print("error: no weights", file=sys.stderr)
    sys.exit(2)
path = pathlib.Path(out)
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps({"metrics": {"eval/accuracy": 0.6 if by == "learner" else 0.7}}))
"""

BASE = "model: {checkpoint: a/model}\nlearner: {dtype: float32, transformer_engine: false}\n"


class Scripted:
    """An experiment in `folder`: its file, what each run is told to do, and its folder of results."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.out = folder, folder / "runs" / "trial"
        self.file, self._script = folder / "trial.yaml", folder / "script.json"
        (folder / "base.yaml").write_text(BASE)
        (folder / "program.py").write_text(PROGRAM)
        self.tell({})
        self.write(**changes)

    def write(self, **changes: Any) -> None:
        """The experiment's file; a change of None leaves the key out."""
        content: dict[str, Any] = {
            "name": "trial",
            "base": str(self.folder / "base.yaml"),
            "arms": {"none": ["replay.mode=none"], "R3": ["replay.mode=R3"]},
            "seeds": [0, 1, 2],
            "steps": 3,
            "primary_metric": "eval/accuracy",
            "run_dir": str(self.folder / "runs"),
            **changes,
        }
        self.file.write_text(
            yaml.safe_dump({key: value for key, value in content.items() if value is not None}, sort_keys=False)
        )

    def tell(self, script: Mapping[str, Mapping[str, Any]]) -> None:
        self._script.write_text(json.dumps(script))

    def run(self, **options: Any) -> int:
        return run_experiment(self.file, check=passes, made_of=self._stages, **options)

    def states(self) -> dict[str, dict[str, Any]]:
        lines = (self.out / "states.jsonl").read_text().splitlines()
        return {state["run"]: state for state in map(json.loads, lines)}

    def starts(self, run: str) -> list[int]:
        """Steps that were there at each start of a run."""
        return [int(line) for line in (self.out / run / "started").read_text().splitlines()]

    def servers(self, run: str) -> list[str]:
        """Address and key of the server at each start of a run."""
        return (self.out / run / "servers").read_text().splitlines()

    def parents(self, run: str) -> list[int]:
        """Process ids of the parents of a run at each start."""
        return [int(line) for line in (self.out / run / "parents").read_text().splitlines()]

    def _stages(self, plan: ExperimentPlan, run: PlannedRun) -> Sequence[RunStage]:
        python = [sys.executable, "-I", "-S"]
        program = str(self.folder / "program.py")
        attach = [f"rollout.url={run.server}"] if run.server else []
        found = [RunStage("training", [*python, program, str(self._script), *run.overrides, *attach])]
        for by in plan.file.evaluations:
            result = result_of(plan, run.name, by)
            command = [*python, "-c", EVALUATION, str(self._script), run.name, by, str(result)]
            found.append(RunStage(f"evaluation by {by}", command, result))
        return found


def passes(config: Config, ranks: int) -> None:
    """A check that nothing fails: there is no model."""
