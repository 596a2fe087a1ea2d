"""Support table of model families and engines: runs the checks and writes docs/models.md.

`python -m benchmarks.models [--family NAME ...]` makes a tiny random checkpoint for each family. A real server samples
two training steps from it in float32, with routes and sampling masks, while a learner trains and pushes. Then each
learner is tested on the recorded samples. The results are kept in benchmarks/models.json, family by family. The page is
made from that file alone (`--page-only`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.threads import SINGLE_THREAD
from moe_trm.models.hf_config import read_hf_config, reads_images
from moe_trm.models.registry import MOE_FAMILIES, family_of

FOUND = Path(__file__).parent / "models.json"
FOUND_RELEASES = Path(__file__).parent / "releases.json"
FOUND_PROOFS = Path(__file__).parent / "families.json"
"""Findings of `benchmarks.families`."""
RELEASES = Path(__file__).parents[1] / "moe_trm" / "models" / "published"
"""config.json of published models."""
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TEXT = Path(__file__).parent / "models_page.md"
LEARNERS = ("megatron", "deepspeed")
CHECKS = {
    "sglang": ("serve", "replay R3", "mask", "sync"),
    "learner": ("convert", "replay R2", "replay R3", "mask", "sync"),
    "release": ("convert", "published form", "replay R2", "replay R3", "mask"),
}
SETTINGS: Mapping[str, Any] = {
    "name": "models",
    "task": {"eval_size": 0},
    "rollout": {
        "prompts_per_step": 4,
        "group_size": 4,
        "top_p": 0.95,
        "max_new_tokens": 16,
        "server": {
            "port": 0,
            "dtype": "float32",
            "max_total_tokens": 8192,
            "max_running_requests": 32,
            "startup_timeout_s": 300,
        },
    },
    "replay": {"mode": "R3"},
    "probe": {"every": 0},
    # The entropy bonus moves the weights whatever the rewards are.
    "loss": {"entropy_coef": 0.01},
    "learner": {"minibatches": 1, "micro_batch_rows": 8, "parallel": {"expert": 1}},
    "train": {"steps": 2, "export": False, "export_form": "published"},
}


def examine_family(family: str, folder: Path) -> dict[str, Any]:
    """Run everything for one family."""
    from moe_trm.models.tiny.families import make_family

    return examine(make_family(family, folder / family), folder)


def examine_release(name: str, folder: Path) -> dict[str, Any]:
    """Run everything for a tiny checkpoint of a published model, in its form."""
    from benchmarks.published import make_published

    published = json.loads((RELEASES / f"{name}.json").read_text(encoding="utf-8"))
    return examine(make_published(published, folder / name), folder)


def examine(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Run everything for one checkpoint; by engine, then check: `yes` or the reason why not."""
    settings = {**SETTINGS, "model": {"checkpoint": str(checkpoint)}, "run_dir": str(folder / "runs")}
    if family_of(read_hf_config(checkpoint), str(checkpoint)).not_in_megatron:
        settings["learner"] = {**SETTINGS["learner"], "backend": "deepspeed"}
    settings["record"] = {"bundle": str(folder / "bundle")}
    config = folder / "config.yaml"
    config.write_text(json.dumps(settings), encoding="utf-8")
    results: dict[str, Any] = {"sglang": _live(config, folder)}
    for learner in LEARNERS:
        results[learner] = _learner(learner, settings, folder)
    return results


def _live(config: Path, folder: Path) -> dict[str, Any]:
    """Two steps with the real server, in separate processes."""
    done = _run([sys.executable, "-m", "moe_trm", "train", str(config), "--nproc-per-node=1"])
    metrics = folder / "runs" / "models" / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()][1:] if metrics.is_file() else []
    if done.returncode or len(steps) < 2:
        reason = _reason(done.stderr)
        return {
            **dict.fromkeys(CHECKS["sglang"], reason),
            **({"serve": "yes"} if any((folder / "bundle").glob("step-*")) else {}),
        }
    applied = min(step["replay/applied_fraction"] for step in steps)
    after_push = steps[1]["engine/k3_kl"]
    return {
        "serve": "yes",
        "replay R3": "yes" if applied == 1.0 else f"applied to {applied:.3f}",
        "mask": "yes",
        "sync": "yes" if after_push < 1e-7 else f"k3 {after_push:.1e} after the push",
        "k3 after push": after_push,
    }


def _learner(name: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The learner `name` on the recorded samples, in a separate process."""
    backend = {**settings["learner"], "backend": name}
    config, out = folder / f"{name}.yaml", folder / f"{name}.json"
    backend_settings = {"learner": backend, "replay": {"mode": "R3", "max_local_flip_rate": 1.0}, "record": {}}
    config.write_text(json.dumps({**settings, **backend_settings}), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m"]
    command += ["benchmarks.engines.family_learner", str(config), str(folder / "bundle"), str(out)]
    done = _run(command)
    if done.returncode or not out.is_file():
        return dict.fromkeys(CHECKS["learner"], _reason(done.stderr))
    results: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return results


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**os.environ, **SINGLE_THREAD}, check=False, capture_output=True, text=True)


def _reason(text: str) -> str:
    """The last exception that a log names, in a line."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", text, re.MULTILINE)
    # `moe-trm` names files of this machine in brackets.
    errors += [
        f"{what}: {got}" for what, got in re.findall(r"^error: ([^(\n]*\w).*\n\s+got:\s+(.*)$", text, re.MULTILINE)
    ]
    line = errors[0] if errors else next((line for line in text.splitlines() if line.strip()), "failed without a word")
    return line.strip().replace("|", "/")[:160]


def page(families: Mapping[str, Any], releases: Mapping[str, Any], proofs: Mapping[str, Any]) -> str:
    """The page: the text of `models_page.md`, and the tables."""
    lines = [
        "| family | engine | serve | convert | replay R2 | replay R3 | mask | sync |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reasons: list[str] = []

    def cell(result: str) -> str:
        if result in ("yes", "-"):
            return result
        if result not in reasons:
            reasons.append(result)
        return f"no ({reasons.index(result) + 1})"

    for family, engines in families.items():
        for engine, label in (("sglang", "SGLang"), ("megatron", "Megatron-Core"), ("deepspeed", "DeepSpeed")):
            checks = CHECKS["sglang" if engine == "sglang" else "learner"]
            cells = [
                cell(engines[engine][check]) if check in checks else "-"
                for check in ("serve", "convert", "replay R2", "replay R3", "mask", "sync")
            ]
            lines.append(f"| {family} | {label} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    lines += ["", "| family | learner | own routes | replayed routes | over the kept ids |", "|---|---|---|---|---|"]
    for family, engines in families.items():
        for engine in LEARNERS:
            if "native" in engines[engine]:
                figures = [
                    f"{engines[engine].get(name, float('nan')):.1e}" for name in ("native", "replayed", "masked")
                ]
                lines.append(f"| {family} | {engine} | " + " | ".join(figures) + " |")
    head, rest = TEXT.read_text(encoding="utf-8").split("<!-- tables -->\n")
    middle, tail = rest.split("<!-- releases -->\n")
    released, proved = "\n".join(release_lines(releases)), "\n".join(proof_lines(proofs))
    return head + "\n".join(lines) + f"\n{middle}{released}\n" + tail.replace("<!-- proofs -->", proved)


def proof_lines(proofs: Mapping[str, Any]) -> list[str]:
    """The table of transformers' families: `proved`, or the step that failed and why."""
    lines = ["| family of transformers | replay | why |", "|---|---|---|"]
    for name, proof in proofs.items():
        result = f"refused at `{proof['step']}`" if proof["step"] else "proved"
        lines.append(f"| {name} | {result} | {proof['problem']} |")
    return lines


def release_lines(releases: Mapping[str, Any]) -> list[str]:
    """The table of published models: `yes` where the engine, or every learner that does not refuse it, passed."""
    checks = CHECKS["release"]
    lines = [f"| release | weights | serve | sync | {' | '.join(checks)} |", "|---" * (len(checks) + 4) + "|"]
    for name, engines in releases.items():
        cells = [engines["sglang"]["serve"], engines["sglang"]["sync"]]
        learners = [learner for learner in LEARNERS if not engines[learner]["convert"].startswith("refused")]
        only = "" if learners == list(LEARNERS) else f" ({', '.join(learners)} only)"
        for check in checks:
            results = {learner: engines[learner].get(check, engines[learner]["convert"]) for learner in learners}
            reasons = [f"{learner}: {reason}" for learner, reason in results.items() if reason != "yes"]
            alike = len(set(results.values())) == 1
            cells.append((results[learners[0]] if alike else "; ".join(reasons)) + only)
        lines.append(f"| {name} | {_form(name)} | " + " | ".join(cells) + " |")
    return lines


def _form(name: str) -> str:
    published = json.loads((RELEASES / f"{name}.json").read_text(encoding="utf-8"))
    form = str((published.get("quantization_config") or {}).get("quant_method", "bf16"))
    if reads_images(published):
        return f"{form} + MTP + images"
    return form + (" + MTP" if published.get("num_nextn_predict_layers") else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument(
        "--family", nargs="*", choices=MOE_FAMILIES, default=list(MOE_FAMILIES), help="families to run (default: all)"
    )
    parser.add_argument(
        "--release", nargs="*", help="published models to run, by the names in moe_trm/models/published, and no family"
    )
    parser.add_argument("--page-only", action="store_true", help="write the page from what was found before")
    args = parser.parse_args(argv)
    families = [] if args.page_only or args.release is not None else args.family
    _run_all(examine_family, families, MOE_FAMILIES, FOUND)
    names = tuple(sorted(path.stem for path in RELEASES.glob("*.json")))
    requested = [] if args.page_only or args.release is None else args.release or names
    _run_all(examine_release, requested, names, FOUND_RELEASES)
    PAGE.write_text(page(found_in(FOUND), found_in(FOUND_RELEASES), found_in(FOUND_PROOFS)), encoding="utf-8")
    return 0


def _run_all(
    run: Callable[[str, Path], dict[str, Any]], names: Sequence[str], order: Sequence[str], place: Path
) -> None:
    """Run each of `names`, and keep the results in `place`, in this order."""
    results = found_in(place)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run(name, Path(folder))
        print(f"{name}: {json.dumps(results[name])}", flush=True)
        ordered = {entry: results[entry] for entry in order if entry in results}
        place.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def found_in(place: Path) -> dict[str, Any]:
    """The contents of a file of results; empty where there is none."""
    return json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}


if __name__ == "__main__":
    sys.exit(main())
