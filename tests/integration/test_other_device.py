"""A learner's passes on a device that refuses operands of another: the values of a CPU, padded and packed.

The policy, the replayer, snapshots and the export are real, and so are the collectives (gloo). In place of DeepSpeed's
engine stands the policy itself: ZeRO exchanges the storage of parameters, which no device written in Python allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import routing.hf
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
from moe_trm.models.tiny.families import make_family
from routing.hf import HFReplayer
from tests.integration.learner_support.one_step import SETTINGS, figures_of_a_step
from tests.unit.other_device import DEVICE, move, other_device


class PlainEngine:
    """DeepSpeed's engine, as far as one rank without ZeRO needs it."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = self.module = policy

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

    scale = 1.0

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


def stepped(checkpoint: Path, device: torch.device, folder: Path, *, packed: bool) -> dict[str, float]:
    """Figures of a step with stale rows and one after it: anchors, probe, updates, push; and what was pushed."""
    config = Config.model_validate(
        {
            "model": {"checkpoint": str(checkpoint)},
            **SETTINGS,
            "learner": {"backend": "deepspeed"},
            "batch": {"layout": "packed" if packed else "padded"},
        }
    )
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
            ExportForm(HfCheckpoint(checkpoint), "float32"),
        ),
        Snapshots([policy]),
        None,  # type: ignore[arg-type]
        temperature=0.9,
        device=device,
        packed=packed,
    )
    return figures_of_a_step(config, learner, device, folder)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(2), "on the CPU"),
        (torch.zeros(2, dtype=torch.int16), "no torch.int16"),
        (torch.zeros(2, 2).T, "not contiguous"),
    ],
)
def test_groups_refuse_what_nccl_refuses(checkpoint: Path, tensor: torch.Tensor, why: str) -> None:
    with other_device():
        there = tensor if "CPU" in why else tensor.to(DEVICE)
        dist.all_reduce(torch.zeros(2, device=DEVICE))
        with pytest.raises(RuntimeError, match=why):
            dist.all_reduce(there)
        on_the_cpu: Any = dist.new_group(backend="gloo")
        dist.all_reduce(torch.zeros(2), group=on_the_cpu)
