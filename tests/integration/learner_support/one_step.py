"""The figures of a step on a learner of any kind: anchors, probe, an update with corrections, push."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_trm.batch.plan import plan_step
from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Learner
from moe_trm.models.hf_config import read_hf_config
from moe_trm.step.anchors import Anchors
from moe_trm.step.objective import Objective
from moe_trm.step.probe.run import Probe
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch, TrainBatch, TrainRow
from tests.unit.records import make_record

SETTINGS: dict[str, Any] = {
    "rollout": {"temperature": 0.9, "top_p": 0.9},
    "pipeline": {"mode": "async", "max_staleness": 2, "behavior": "snapshot"},
    "correction": {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 9.0}}, {"name": "token_tis"}]},
    "replay": {"mode": "R3", "max_local_flip_rate": 1.0},
    "loss": {"entropy_coef": 0.01},
    "probe": {"every": 1},
}


def figures_of_a_step(config: Config, learner: Learner, device: torch.device, folder: Path) -> dict[str, float]:
    """Figures of a step with stale rows: of its parts, and of the tensors that were pushed after it."""
    objective, probe = Objective(config), Probe(config, folder, "R3")
    anchors = Anchors(config, "R3", reads_minibatch=objective.reads_minibatch)
    packed = config.batch.layout == "packed"
    layers = range(int(read_hf_config(config.model.checkpoint)["num_hidden_layers"]))
    for step in (1, 2):
        made = [
            make_record(sample_id=i, num_sampled=3 + 2 * i, version=i % step, layers=layers).bound() for i in range(4)
        ]
        plan = plan_step(
            [TrainRow(record) for record in made],
            seed=0,
            step=step,
            minibatches=1,
            data_size=learner.data_size,
            micro_batch_rows=2,
            packed=packed,
        )
        batch = TrainBatch(step, tuple(plan[learner.data_rank]), {}, tuple(range(step)))
        parts = anchors.score(learner, batch, score_all=True)
    [part] = [replace(part, batches=[_valued(each) for each in part.batches]) for part in parts]
    figures = probe.run(2, learner, [part])
    update = learner.update(part.batches, part.sources, objective.bind(part, learner, first=True), entropy=True)
    figures |= objective.take(learner)
    entries = learner.export_shard(str(folder), Rounding("bfloat16"))
    pushed = {name: float(tensor.float().abs().sum()) for name, tensor in learner.owned_tensors()}
    assert {entry.name for entry in entries} == pushed.keys()
    assert part.scores[0].logprobs.device == device
    return figures | pushed | {"norm": update.grad_norm, "replayed": learner.replay_report().applied_fraction or 0.0}


def _valued(batch: TokenBatch) -> TokenBatch:
    """Advantages of both signs."""
    rows = torch.arange(len(batch.mask), device=batch.mask.device)[:, None]
    return replace(batch, advantages=torch.where(batch.mask, 1.0 - 1.5 * (rows % 2), 0.0))
