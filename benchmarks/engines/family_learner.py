"""One learner on one family, on rollouts that a real server recorded.

`python -m benchmarks.engines.family_learner CONFIG BUNDLE OUT` writes its results to OUT as JSON: for each check `yes`
or the reason why not, and the largest differences.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moe_trm.batch.collate import collate
from moe_trm.batch.plan import plan_step
from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.recording.bundle import BundleReader
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch, TrainRow
from routing.errors import ReplayProofError, ReplayRefusedError
from routing.record.sources import Record, ReplayRecorded

CLOSE = 1e-4
"""Largest difference of a log-prob between two engines in float32 that still counts as the same."""


def examine(config: Config, bundle: Path, scratch: Path) -> dict[str, Any]:
    """Every check of one learner; a refusal at launch is the answer to all of them."""
    from moe_trm.learner.build import build_learner  # imports the engines, which give their notices

    try:
        learner = build_learner(config)
    except (MoeTrmError, ReplayRefusedError) as refused:
        reason = f"refused: {getattr(refused, 'got', None) or refused}"
        return dict.fromkeys(("convert", "replay R2", "replay R3", "mask", "sync"), reason)
    checks: dict[str, Any] = {"convert": _same_tensors(learner, config, scratch)}
    if config.train.export_form == "published":
        checks["published form"] = _same_files(learner, config, scratch / "published")
    checks["sync"] = checks["convert"]
    if not any(bundle.glob("step-*")):
        unknown = "no samples: the engine does not serve it"
        return {**checks, **dict.fromkeys(("replay R2", "replay R3", "mask"), unknown)}
    records = BundleReader(str(bundle)).read(1)
    rows = [TrainRow(record) for record in records]
    micro = plan_step(rows, seed=0, step=0, minibatches=1, data_size=1, micro_batch_rows=8)[0][0].micro_batches
    masked, full = ([collate(part, keep_mask=keep) for part in micro] for keep in (True, False))
    native = learner.score(full, [Record()] * len(full))
    again = learner.score(full, [ReplayRecorded(scores.recorded) for scores in native if scores.recorded is not None])
    same = all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(native, again, strict=True))
    checks["replay R2"] = "yes" if same else "scores differ from the recording pass"
    checks["native"] = _worst(full, native, "full_logprobs")
    checks["replay R3"] = _replayed(learner, full, checks)
    checks["masked"] = _worst(
        masked, learner.score(masked, [part.rollout_routes for part in masked]), "rollout_logprobs"
    )
    learner.replay_report()  # raises where a record was not used
    checks["mask"] = "yes" if checks["masked"] < CLOSE else f"log-probs differ by {checks['masked']:.1e}"
    return checks


def _replayed(learner: Learner, batches: list[TokenBatch], checks: dict[str, Any]) -> str:
    learner.replay_report()
    try:
        scores = learner.score(batches, [batch.rollout_routes for batch in batches])
        report = learner.replay_report()
    except ReplayProofError as error:
        return f"not proved: {error}"
    checks["replayed"], checks["flips"] = _worst(batches, scores, "full_logprobs"), report.local_flip_rate
    if report.applied_fraction != 1.0:
        return f"applied to {report.applied_fraction:.3f} of the token-layers"
    return "yes" if checks["replayed"] < CLOSE else f"log-probs differ by {checks['replayed']:.1e}"


def _worst(batches: list[TokenBatch], scores: list[Scores], of: str) -> float:
    return max(
        float((score.logprobs - getattr(batch, of))[batch.mask].abs().max())
        for batch, score in zip(batches, scores, strict=True)
    )


def _same_tensors(learner: Learner, config: Config, scratch: Path) -> str:
    learner.export_shard(str(scratch), Rounding("float32"))
    exported, source = _stored(scratch), HfCheckpoint(config.model.checkpoint)
    source_tensors = {name: source.read(name).float() for name in source.names}
    if exported.keys() != source_tensors.keys():
        return f"other tensors: {sorted(exported.keys() ^ source_tensors.keys())[:3]}"
    changed = [name for name, value in source_tensors.items() if not torch.equal(exported[name], value)]
    return f"changed: {changed[:3]}" if changed else "yes"


def _same_files(learner: Learner, config: Config, scratch: Path) -> str:
    """A checkpoint in the published form of weights that nothing changed has the bits of the start, MTP layers too."""
    learner.export_checkpoint(str(scratch))
    exported, source_tensors = _stored(scratch), _stored(Path(config.model.checkpoint))
    if exported.keys() != source_tensors.keys():
        return f"other tensors: {sorted(exported.keys() ^ source_tensors.keys())[:3]}"
    changed = [name for name, value in source_tensors.items() if not torch.equal(_bytes(exported[name]), _bytes(value))]
    return f"changed: {changed[:3]}" if changed else "yes"


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def main(config_path: str, bundle: Path, out: Path) -> None:
    """Examine and write."""
    checks = examine(load(config_path), bundle, out.parent / f"{out.stem}-export")
    out.write_text(json.dumps(checks), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
