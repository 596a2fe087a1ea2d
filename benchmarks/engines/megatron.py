"""Megatron-Core in any layout as scorer: ranks under torchrun, texts and scores through files.

`python -m benchmarks.engines.megatron CONFIG FOLDER` is one rank. Shape letters: T tokens, L MoE layers, K experts per
token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from benchmarks.engines.scored import Scored, Setting, Text
from launch.start.preflight import smallest_world
from launch.threads import SINGLE_THREAD
from moe_trm.batch.collate import collate
from moe_trm.batch.plan import plan_step
from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.recording.bundle import BundleReader, BundleWriter
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.types import RolloutRecord, TrainRow
from routing import RouteRecord, token_digest
from routing.record.record import expert_dtype
from routing.record.sources import Record, ReplayRecords


class MegatronScorer:
    """See `Scorer`. Each call starts the ranks anew."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.local_flips: float | None = None

    def score(self, texts: Sequence[Text], routes: Sequence[RouteRecord] | None = None) -> list[Scored]:
        """See `Scorer.score`."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            records = [_record(number, text, routes[number] if routes else None) for number, text in enumerate(texts)]
            BundleWriter(str(folder)).write(1, records)
            settings, overrides = folder / "config.yaml", [f"learner.parallel.{size}" for size in self._setting.layout]
            settings.write_text(json.dumps(self._config()), encoding="utf-8")
            ranks = smallest_world(load(settings, overrides).learner.parallel)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command += ["-m", "benchmarks.engines.megatron", str(settings), str(folder), *overrides]
            done = subprocess.run(
                command, env={**os.environ, **SINGLE_THREAD}, check=False, capture_output=True, text=True
            )
            if done.returncode:
                raise MoeTrmError("the Megatron ranks failed", where=" ".join(command), got=done.stderr[-2000:])
            return self._collect(folder, texts)

    def _config(self) -> dict[str, object]:
        return {
            "model": {"checkpoint": str(self._setting.checkpoint.resolve())},
            "sampling_mask": {"mode": "off"},
            "replay": {"max_local_flip_rate": 1.0},
            "learner": {"dtype": self._setting.dtype, "micro_batch_rows": self._setting.together},
        }

    def _collect(self, folder: Path, texts: Sequence[Text]) -> list[Scored]:
        parts = [load_file(path) for path in sorted(folder.glob("rank-*.safetensors"))]
        flips = parts[0].get("local_flips")
        self.local_flips = None if flips is None else float(flips[0])
        model, scored = ServedModel.from_checkpoint(self._setting.checkpoint), []
        for number, text in enumerate(texts):
            mine = [part for part in parts if f"{number}/logprobs" in part]
            # Each rank has its own layers and columns, -1 elsewhere.
            routes = np.max([part[f"{number}/routes"] for part in mine], axis=0)
            ids, experts = model.moe_layer_ids, model.num_experts
            record = RouteRecord(routes.astype(expert_dtype(experts)), ids, experts, token_digest(text.tokens))
            scored.append(Scored(mine[0][f"{number}/logprobs"], record))
        return scored


def main(config_path: str, folder: Path, overrides: Sequence[str]) -> None:
    """One rank: score its share of the records in `folder` and write `rank-N.safetensors` there."""
    torch.distributed.init_process_group("gloo")
    from moe_trm.learner.build import build_learner  # imports Megatron-Core, which gives its notices

    config: Config = load(config_path, overrides)
    learner = build_learner(config)
    records = BundleReader(str(folder)).read(1)
    plan = plan_step(
        [TrainRow(record) for record in records],
        seed=0,
        step=0,
        minibatches=1,
        data_size=learner.data_size,
        micro_batch_rows=config.learner.micro_batch_rows,
    )
    micro = plan[learner.data_rank][0].micro_batches
    batches = [collate(part, keep_mask=False) for part in micro]
    replay = all(record.routes is not None for record in records)
    scores = learner.score(batches, [ReplayRecords(batch.routes) if replay else Record() for batch in batches])
    arrays: dict[str, np.ndarray] = {}
    if replay:
        arrays["local_flips"] = np.array([learner.replay_report().local_flip_rate])
    for part, batch, score in zip(micro, batches, scores, strict=True):
        for row, item in enumerate(part.rows):
            rows, number = item.record.num_tokens - 1, item.record.sample_id
            arrays[f"{number}/logprobs"] = score.logprobs[row, :rows].numpy()
            if item.record.routes is not None:
                arrays[f"{number}/routes"] = item.record.routes.experts.astype(np.int64)
                continue
            assert score.recorded is not None
            routes_RLK = torch.full((rows, len(learner.model_moe_layer_ids), 1), -1)
            for layer in score.recorded.experts:
                ids_RK = score.recorded.by_row(layer, *batch.mask.shape)[row, :rows]
                routes_RLK = (
                    routes_RLK.expand(-1, -1, ids_RK.shape[-1]).clone() if routes_RLK.shape[-1] == 1 else routes_RLK
                )
                routes_RLK[:, learner.model_moe_layer_ids.index(layer)] = ids_RK
            arrays[f"{number}/routes"] = routes_RLK.numpy()
    save_file(arrays, folder / f"rank-{torch.distributed.get_rank()}.safetensors")
    torch.distributed.destroy_process_group()


def _record(number: int, text: Text, routes: RouteRecord | None) -> RolloutRecord:
    zeros = np.zeros(int(text.sampled.sum()), np.float32)
    return RolloutRecord(
        sample_id=number,
        group_id=text.prompt,
        prompt_id=str(text.prompt),
        tokens=text.tokens,
        sampled=text.sampled,
        turn_ids=np.zeros(len(text.tokens), np.int16),
        rollout_logprobs=zeros,
        full_logprobs=zeros,
        versions=zeros.astype(np.int32),
        routes=routes,
        sampling_mask=None,
        finish_reason="stop",
        reward=0.0,
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
