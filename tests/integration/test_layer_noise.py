"""Noise on the inputs of layers, on both learners and every kind of layout, against a loop over layers in float64."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm.learner.protocol import Scores
from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import SHAPE, load_reference, make_checkpoint
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch, objective

SIGMA, LAYERS = 0.05, SHAPE["num_hidden_layers"]
LR = 0.1
PLAIN = {"backend=megatron:tensor=2:expert=2": "recompute=full", "backend=deepspeed:stage=2": "recompute=full"}
"""Runs, and what may not change their noise."""
SHARED = (
    "backend=megatron:expert=2",
    "backend=megatron:context=2:layout=packed",
    "backend=megatron:pipeline=2:first_stage_layers=1",
    "backend=deepspeed:stage=3:layout=packed",
)
FLOAT16 = ("backend=megatron:expert=2:dtype=float16:scale=256", "backend=deepspeed:stage=2:dtype=float16:scale=256")
EXACT = (*PLAIN, *(f"{run}:{more}" for run, more in PLAIN.items()), *SHARED)
SCRIPT = Path(__file__).parent / "learner_support" / "perturbed.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("noise") / "main")


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    runs = [noisy(run) for run in (*EXACT, *FLOAT16)]
    return run_ranks(tmp_path_factory.mktemp("ranks"), checkpoint, 2, *runs, script=SCRIPT)


@pytest.fixture(scope="module")
def by_hand(checkpoint: Path) -> dict[str, Tensor]:
    """Log-probs of each micro-batch, norm of the model's gradient, gradient of log sigma; float64, one process."""
    model = load_reference(checkpoint).double()
    model.set_experts_implementation("eager")
    log_sigma = torch.full((LAYERS,), math.log(SIGMA), dtype=torch.float64, requires_grad=True)
    found: dict[str, Tensor] = {}

    def add(number: int, _layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        wave = torch.linspace(-1, 1, args[0].shape[-1], dtype=torch.float64)
        return (args[0] + log_sigma[number].exp() * wave, *args[1:])

    plain = [logprobs_of(model, number) for number in range(NUM_BATCHES)]
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(partial(add, number))
    for number in range(NUM_BATCHES):
        own = logprobs_of(model, number)
        torch.autograd.backward(objective([global_batch(number)], [])(0, Scores(own)))
        found |= {f"known.logprobs.{number}": own.detach(), f"scored.{number}": plain[number].detach()}
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    assert log_sigma.grad is not None
    return found | {"known.norm": torch.stack(norms).norm(), "known.gradient": log_sigma.grad}


def logprobs_of(model: Any, number: int) -> Tensor:
    batch = global_batch(number)
    assert batch.kept_ids is not None
    assert batch.kept_offsets is not None
    logits = (model(input_ids=batch.input_ids, use_cache=False).logits / TEMPERATURE)[batch.mask]
    kept = torch.zeros_like(logits, dtype=torch.bool)
    kept[torch.repeat_interleave(batch.kept_offsets.diff()), batch.kept_ids] = True
    own = logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, batch.target_ids[batch.mask][:, None])[:, 0]
    return torch.zeros(batch.mask.shape, dtype=torch.float64).masked_scatter(batch.mask, own)


def noisy(run: str) -> str:
    return f"{run}:noise={SIGMA}"


def merged(finished: Ranks, run: str) -> dict[str, Tensor]:
    """What either rank saved; what both have is the same."""
    parts = [finished.saved(noisy(run), "found", rank) for rank in range(2)]
    for name in parts[0].keys() & parts[1].keys():
        torch.testing.assert_close(parts[0][name], parts[1][name], rtol=1e-5, atol=1e-6)
    return parts[0] | parts[1]


@pytest.mark.parametrize("run", EXACT)
def test_updates_are_perturbed_and_scores_are_not(finished: Ranks, by_hand: dict[str, Tensor], run: str) -> None:
    found = merged(finished, run)
    for name, expected in by_hand.items():
        torch.testing.assert_close(found[name].double(), expected, rtol=2e-4, atol=2e-5, msg=f"{run}, {name}")
    assert all((by_hand[f"known.logprobs.{n}"] - by_hand[f"scored.{n}"]).abs().max() > 0.02 for n in range(NUM_BATCHES))
    # Adam's first step is the learning rate, against the gradient.
    moved = found["known.log_sigma"].double() - math.log(SIGMA)
    torch.testing.assert_close(moved, -LR * by_hand["known.gradient"].sign(), rtol=1e-4, atol=1e-4)
    assert float(found["known.mean"]) == pytest.approx(float(found["known.log_sigma"].exp().mean()))


@pytest.mark.parametrize("run", FLOAT16)
def test_the_loss_scale_is_not_in_the_gradient(finished: Ranks, by_hand: dict[str, Tensor], run: str) -> None:
    found = merged(finished, run)
    torch.testing.assert_close(found["known.gradient"].double(), by_hand["known.gradient"], rtol=0.1, atol=0.02)


@pytest.mark.parametrize("run", EXACT)
def test_noise_differs_by_step_and_comes_again_after_a_resumption(finished: Ranks, run: str) -> None:
    found = merged(finished, run)
    for name in ("norm", "gradient", "log_sigma"):
        torch.testing.assert_close(found[f"again.{name}"], found[f"drawn.{name}"], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(found[f"other.{name}"], found[f"drawn.{name}"], rtol=1e-3)


@pytest.mark.parametrize("run", PLAIN)
def test_layers_that_are_computed_again_get_the_same_noise(finished: Ranks, run: str) -> None:
    kept, again = merged(finished, run), merged(finished, f"{run}:{PLAIN[run]}")
    for name in ("drawn.norm", "drawn.gradient", "other.gradient"):
        torch.testing.assert_close(again[name], kept[name], rtol=1e-4, atol=1e-6)


def test_ranks_draw_apart(finished: Ranks) -> None:
    """With like rows on both ranks, like noise would give like changes."""
    found = merged(finished, "backend=megatron:expert=2")
    first, second = (found[f"drawn.logprobs.{n}"] - found[f"scored.{n}"] for n in range(2))
    width = min(first.shape[1], second.shape[1])
    assert not torch.allclose(first[:, :width], second[:, :width], atol=1e-3)
