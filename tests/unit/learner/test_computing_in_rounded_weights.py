"""Passes at the weights of the rollout: straight-through gradients, against rounding by hand in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_trm.config.precision_rules import refusals, surprises
from moe_trm.config.schema import Config
from moe_trm.errors import LearnerError
from moe_trm.learner.snapshots import Snapshots
from moe_trm.step.probe.rounding_shares import roundings
from moe_trm.sync.rounding import Rounding, computes_in, rounding_of
from tests.unit.sections import sections_of

INT8 = Rounding("float32", "int8")


class Small(torch.nn.Module):
    """Names as in a checkpoint: a matrix that is rounded, a norm and an embedding that are not."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.mlp = torch.nn.Module()
        self.mlp.up_proj = torch.nn.Linear(6, 5, bias=False)
        self.norm = torch.nn.Parameter(torch.randn(6, generator=draw))
        self.embed = torch.nn.Parameter(torch.randn(7, 6, generator=draw))
        with torch.no_grad():
            self.mlp.up_proj.weight.copy_(torch.randn(5, 6, generator=draw))
        self.register_buffer("count", torch.tensor(0.123456789))

    def forward(self, ids: Tensor) -> Tensor:
        up: Tensor = self.mlp.up_proj(self.embed[ids] * self.norm)  # type: ignore[operator]
        return (up * self.count).tanh().sum()


IDS = torch.tensor([0, 3, 3, 6])


def by_hand(model: Small) -> dict[str, Tensor]:
    """Gradients in float64 at the rounded matrix, each channel by the loop of the formula."""
    weight = model.mlp.up_proj.weight.detach().double()  # type: ignore[operator]
    rounded = torch.zeros_like(weight)
    for row in range(5):
        scale = max(abs(float(value)) for value in weight[row]) / 127
        for column in range(6):
            rounded[row, column] = round(float(weight[row, column]) / scale) * scale
    leaves = {
        "mlp.up_proj.weight": rounded.requires_grad_(),
        "norm": model.norm.detach().double().requires_grad_(),
        "embed": model.embed.detach().double().requires_grad_(),
    }
    up = (leaves["embed"][IDS] * leaves["norm"]) @ leaves["mlp.up_proj.weight"].T
    (up * model.count.double()).tanh().sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def state(model: torch.nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def test_gradients_are_those_at_the_rounded_weights_and_the_own_weights_come_back() -> None:
    model = Small()
    snapshots, before = Snapshots([model], computes_in=INT8), state(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with snapshots.computing():
        model(IDS).backward()
        assert not torch.equal(model.mlp.up_proj.weight, before[2])  # type: ignore[arg-type]
    assert all(torch.equal(one, two) for one, two in zip(state(model), before, strict=True))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    expected = by_hand(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)
    plain = Small()
    plain(IDS).backward()
    assert not torch.allclose(plain.norm.grad, model.norm.grad, rtol=1e-6)  # type: ignore[arg-type]


def test_a_step_moves_the_exact_weights_by_small_amounts_that_rounding_would_lose() -> None:
    """Many steps far below the grid: the exact weights follow, and at last the rounded ones do."""
    model = Small()
    snapshots, start = Snapshots([model], computes_in=INT8), state(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for _ in range(3):
        optimizer.zero_grad()
        with snapshots.computing():
            model(IDS).backward()
        optimizer.step()
    moved = [(now - before).abs().max() for now, before in zip(state(model), start, strict=True)]
    assert all(0 < float(size) < 1e-2 for size in moved[:3])


def test_an_older_copy_is_rounded_too_and_held_as_it_was() -> None:
    model = Small()
    snapshots = Snapshots([model], computes_in=INT8)
    snapshots.take("old")
    exact = state(model)
    with torch.no_grad():
        model.norm.add_(1)
    with snapshots.computing("old"):
        assert torch.equal(model.norm, exact[0])
        rounded = model.mlp.up_proj.weight.clone()  # type: ignore[operator]
    assert torch.equal(rounded, INT8.held("mlp.up_proj.weight", exact[2]))
    with snapshots.using("old"):
        assert all(torch.equal(one, two) for one, two in zip(state(model), exact, strict=True))
    with pytest.raises(LearnerError), snapshots.computing("never"):
        raise AssertionError("not reached")


def test_the_own_weights_come_back_after_an_error_and_without_rounding_nothing_is_copied() -> None:
    model = Small()
    before = state(model)
    with pytest.raises(RuntimeError, match="mid-pass"), Snapshots([model], computes_in=INT8).computing():
        raise RuntimeError("mid-pass")
    assert all(torch.equal(one, two) for one, two in zip(state(model), before, strict=True))
    with Snapshots([model]).computing():
        assert all(torch.equal(one, two) for one, two in zip(state(model), before, strict=True))


def config(
    fake: str | None = "int8", quantization: str | None = None, block: int | None = None, **learner: object
) -> Config:
    rollout = {"fake_quantization": fake, "quantization": quantization, "fake_quantization_block": block}
    return Config.model_validate(
        {"model": {"checkpoint": "x"}, "rollout": rollout, "learner": {"round_like_rollout": True, **learner}}
    )


def test_passes_round_as_the_push_of_the_run() -> None:
    assert (
        computes_in(*sections_of(config(), "learner", "rollout", "train", "seed"))
        == rounding_of(*sections_of(config(), "rollout", "train", "seed"))
        == Rounding("bfloat16", "int8")
    )
    assert computes_in(*sections_of(config(round_like_rollout=False), "learner", "rollout", "train", "seed")) is None
    # What the learner does itself is no share of the mismatch.
    assert not roundings(*sections_of(config(), "learner", "rollout"))
    assert roundings(*sections_of(config(round_like_rollout=False), "learner", "rollout"))


@pytest.mark.parametrize(
    "chosen",
    [
        {"block": 32},
        {"parallel": {"tensor": 2}},
        {"backend": "deepspeed", "deepspeed": {"zero_stage": 3}},
        {"backend": "deepspeed", "deepspeed": {"zero_stage": 3}, "fake": None},
        {"fake": None, "quantization": "fp8"},
    ],
)
def test_what_the_learner_cannot_repeat_is_refused(chosen: dict[str, object]) -> None:
    keys = [problem.key for problem in refusals(*sections_of(config(**chosen), "rollout", "sync", "learner", "batch"))]  # type: ignore[arg-type]
    assert keys.count("learner.round_like_rollout") == 1


def test_warnings() -> None:
    def said(chosen: Config) -> str:
        return "\n".join(surprises(chosen.learner, chosen.rollout, chosen.replay, chosen.probe, chosen.correction))

    assert "without a correction" not in said(config())
    assert "without a correction" in said(config(round_like_rollout=False))
    assert "round_like_rollout has no effect" in said(config(None, dtype="bfloat16"))
    assert "round_like_rollout has no effect" not in said(config(None))
