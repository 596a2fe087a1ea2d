"""Noise on the inputs of layers, on both learners and every kind of layout, against a loop over layers in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm.learner.protocol import Scores
from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import load_reference, make_checkpoint
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch, objective

SIGMA, LAYERS = 0.05, 3
LR = 0.1
TENSOR, ZERO = "backend=megatron:tensor=2:expert=2", "backend=deepspeed:stage=2"
AGAIN = {TENSOR: f"{TENSOR}:recompute=full", ZERO: f"{ZERO}:recompute=full"}
"""Runs, and the same where backward computes the layers again."""
FEW = (TENSOR, AGAIN[TENSOR], "backend=deepspeed:stage=2:layout=packed:recompute=full")
DATA = "backend=megatron:expert=2"
MORE = (
    DATA,
    ZERO,
    AGAIN[ZERO],
    "backend=megatron:context=2:layout=packed",
    "backend=megatron:pipeline=2:first_stage_layers=1",
    "backend=deepspeed:stage=3:layout=packed",
)
FLOAT16 = (f"{DATA}:dtype=float16:scale=256", f"{ZERO}:dtype=float16:scale=256")
EXACT = [*FEW, *(pytest.param(run, marks=pytest.mark.slow) for run in MORE)]
Finished = Callable[[str], dict[str, Tensor]]
SCRIPT = Path(__file__).parent / "learner_support" / "perturbed.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("noise") / "main")


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """What the ranks of a run saved; what several of them have is the same."""

    @cache
    def done(runs: tuple[str, ...]) -> Ranks:
        names = [f"{run}:noise={SIGMA}" for run in runs]
        return run_ranks(tmp_path_factory.mktemp("ranks"), checkpoint, 2, *names, script=SCRIPT)

    def saved(run: str) -> dict[str, Tensor]:
        ranks = done(FEW if run in FEW else (*MORE, *FLOAT16))
        first, second = (ranks.saved(f"{run}:noise={SIGMA}", "found", rank) for rank in range(2))
        for name in first.keys() & second.keys():
            torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6)
        return first | second

    return saved


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


@pytest.mark.long
@pytest.mark.parametrize("run", EXACT)
def test_updates_are_perturbed_and_scores_are_not(finished: Finished, by_hand: dict[str, Tensor], run: str) -> None:
    found = finished(run)
    for name, expected in by_hand.items():
        torch.testing.assert_close(found[name].double(), expected, rtol=2e-4, atol=2e-5, msg=f"{run}, {name}")
    assert all((by_hand[f"known.logprobs.{n}"] - by_hand[f"scored.{n}"]).abs().max() > 0.02 for n in range(NUM_BATCHES))
    # Adam's first step is the learning rate, against the gradient.
    moved = found["known.log_sigma"].double() - math.log(SIGMA)
    torch.testing.assert_close(moved, -LR * by_hand["known.gradient"].sign(), rtol=1e-4, atol=1e-4)
    assert float(found["known.mean"]) == pytest.approx(float(found["known.log_sigma"].exp().mean()))


@pytest.mark.slow
@pytest.mark.parametrize("run", FLOAT16)
def test_the_loss_scale_is_not_in_the_gradient(finished: Finished, by_hand: dict[str, Tensor], run: str) -> None:
    found = finished(run)
    torch.testing.assert_close(found["known.gradient"].double(), by_hand["known.gradient"], rtol=0.1, atol=0.02)


@pytest.mark.parametrize("run", EXACT)
def test_noise_differs_by_step_and_comes_again_after_a_resumption(finished: Finished, run: str) -> None:
    found = finished(run)
    for name in ("norm", "gradient", "log_sigma"):
        torch.testing.assert_close(found[f"again.{name}"], found[f"drawn.{name}"], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(found[f"other.{name}"], found[f"drawn.{name}"], rtol=1e-3)


@pytest.mark.parametrize("run", [TENSOR, pytest.param(ZERO, marks=pytest.mark.slow)])
def test_layers_that_are_computed_again_get_the_same_noise(finished: Finished, run: str) -> None:
    kept, again = finished(run), finished(AGAIN[run])
    for name in ("drawn.norm", "drawn.gradient", "other.gradient"):
        torch.testing.assert_close(again[name], kept[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_ranks_draw_apart(finished: Finished) -> None:
    """With like rows on both ranks, like noise would give like changes."""
    found = finished(DATA)
    first, second = (found[f"drawn.logprobs.{n}"] - found[f"scored.{n}"] for n in range(2))
    width = min(first.shape[1], second.shape[1])
    assert not torch.allclose(first[:, :width], second[:, :width], atol=1e-3)
