"""A learner's passes on a device that refuses operands of another: the values of a CPU, padded and packed.

The policy, the replayer, snapshots and the export are real, and so are the collectives (gloo). In place of DeepSpeed's
engine stands the policy itself: ZeRO exchanges the storage of parameters, which no device written in Python allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import routing.hf
from moe_trm.batch.plan import plan_step
from moe_trm.config.schema import Config
from moe_trm.learner.deepspeed.learner import DeepSpeedLearner
from moe_trm.learner.deepspeed.lora import DeepSpeedAdapters
from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.deepspeed.weights import owned_tensors
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.hf_export import HfExporter
from moe_trm.learner.hf_form import ExportForm
from moe_trm.learner.protocol import UpdateResult
from moe_trm.learner.snapshots import Snapshots
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.tiny.families import make_family
from moe_trm.probe.run import Probe
from moe_trm.step.anchors import Anchors
from moe_trm.step.objective import Objective
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch, TrainBatch, TrainRow
from routing.hf import HFReplayer
from tests.unit.other_device import DEVICE, move, other_device
from tests.unit.records import make_record

SETTINGS: dict[str, Any] = {
    "rollout": {"temperature": 0.9, "top_p": 0.9},
    "pipeline": {"mode": "async", "max_staleness": 2, "behavior": "snapshot"},
    "correction": {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 9.0}}, {"name": "token_tis"}]},
    "learner": {"backend": "deepspeed"},
    "replay": {"mode": "R3", "max_local_flip_rate": 1.0},
    "loss": {"entropy_coef": 0.01},
    "probe": {"every": 1},
}


class PlainEngine:
    """DeepSpeed's engine, as far as one rank without ZeRO needs it."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def __call__(self, *inputs: Any) -> Tensor:
        found: Tensor = self.policy(*inputs)
        return found

    def train(self) -> None:
        self.policy.train()

    def eval(self) -> None:
        self.policy.eval()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def backward(self, value: Tensor, *, scale_wrt_gas: bool) -> None:
        value.backward()


class PlainOptimizer:
    """SGD."""

    def __init__(self, policy: nn.Module) -> None:
        self._optimizer = torch.optim.SGD(policy.parameters(), lr=0.5, foreach=False)

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def step(self, lr_scale: float) -> UpdateResult:
        square = sum(
            float(each.grad.square().sum()) for group in self._optimizer.param_groups for each in group["params"]
        )
        self._optimizer.step()
        return UpdateResult(square**0.5, 0.5, applied=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield make_family("qwen3_moe", tmp_path_factory.mktemp("model"), num_hidden_layers=3, num_experts=8)
    dist.destroy_process_group()


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_has_the_values_of_a_cpu(
    checkpoint: Path, tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stepped(checkpoint, torch.device("cpu"), tmp_path / "cpu", packed=packed)
    monkeypatch.setattr(routing.hf, "check_weights", lambda layer, gate: None)  # it knows `DEVICE` as empty
    with other_device():
        found = stepped(checkpoint, DEVICE, tmp_path / "device", packed=packed)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)


def valued(batch: TokenBatch) -> TokenBatch:
    """Advantages of both signs."""
    rows = torch.arange(len(batch.mask), device=batch.mask.device)[:, None]
    return replace(batch, advantages=torch.where(batch.mask, 1.0 - 1.5 * (rows % 2), 0.0))


def stepped(checkpoint: Path, device: torch.device, folder: Path, *, packed: bool) -> dict[str, float]:
    """Figures of a step with stale rows and one after it: anchors, probe, updates, push; and what was pushed."""
    config = Config.model_validate({"model": {"checkpoint": str(checkpoint)}, **SETTINGS})
    policy = load_policy(HfCheckpoint(checkpoint), "float32", recompute=True, packed=packed)
    if device == DEVICE:
        move(policy)
    adapters = DeepSpeedAdapters()
    learner = DeepSpeedLearner(
        PlainEngine(policy),
        PlainOptimizer(policy),  # type: ignore[arg-type]
        HFReplayer(policy.causal, max_local_flip_rate=1.0),
        HfExporter(
            partial(owned_tensors, policy.causal, adapters, partitioned=False),
            read_hf_config(checkpoint),
            ExportForm(HfCheckpoint(checkpoint), "float32"),
        ),
        Snapshots([policy]),
        None,  # type: ignore[arg-type]
        temperature=0.9,
        device=device,
        packed=packed,
    )
    objective, probe = Objective(config), Probe(config, folder, "R3")
    anchors = Anchors(config, "R3", whole=objective.whole)
    for step in (1, 2):
        made = [make_record(sample_id=i, num_sampled=3 + 2 * i, version=i % step).bound() for i in range(3)]
        rows = [TrainRow(record) for record in made]
        [minis] = plan_step(rows, seed=0, step=step, minibatches=1, data_size=1, micro_batch_rows=2)
        batch = TrainBatch(step, tuple(minis), {}, tuple(range(step)))
        parts = anchors.score(learner, batch, every=True)
    [part] = [replace(part, batches=[valued(each) for each in part.batches]) for part in parts]
    figures = probe.run(2, learner, [part])
    update = learner.update(part.batches, part.sources, objective.bind(part, learner, first=True), entropy=True)
    figures |= objective.take(learner)
    entries = learner.export_shard(str(folder), Rounding("bfloat16"))
    pushed = {name: float(tensor.float().abs().sum()) for name, tensor in learner.owned_tensors()}
    assert {entry.name for entry in entries} == pushed.keys()
    assert part.scores[0].logprobs.device == device
    return figures | pushed | {"norm": update.grad_norm, "replayed": learner.replay_report().applied_fraction or 0.0}
