"""Updates with noise on the inputs of layers, on real ranks: noise that is known, noise that is drawn, and resumed.

Started by torchrun: `perturbed.py CHECKPOINT OUT RUN [RUN ...]`, a RUN as in `runs.py`. Weights stay where they are.
Nothing is asserted here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.learner.checkpoint.pieces import PieceReader, write_pieces
from moe_trm.learner.deepspeed.learner import DeepSpeedLearner
from moe_trm.learner.layer_noise import LayerNoise
from moe_trm.learner.megatron.learner import MegatronLearner
from routing.record.sources import Native
from tests.integration.learner_support.conformance import build, save, work
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.work import objective


def wave(hidden: Tensor) -> Tensor:
    """The same for every token, so that no layout of tokens on ranks changes it."""
    return torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device).expand_as(hidden)


def perturb(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Log-probs, gradient norms, gradients of the sizes, and the sizes afterwards."""
    learner = build(checkpoint, options, lr=0.0)
    assert isinstance(learner, MegatronLearner | DeepSpeedLearner)
    assert learner._noise is not None
    noise, found = learner._noise, dict[str, Any]()
    batches, _, numbers = work(learner)
    native, drawn, step = [Native()] * len(batches), noise.draw, noise._adam.step

    def update(name: str) -> None:
        def stepping() -> None:
            found[f"{name}.gradient"] = gradient_of(noise)
            step()

        noise._adam.step = stepping  # type: ignore[assignment, method-assign]
        seen: list[Tensor] = []
        result = learner.update(batches, native, objective(batches, seen))
        found.update({f"{name}.norm": result.grad_norm, f"{name}.mean": result.layer_noise})
        found[f"{name}.log_sigma"] = noise.log_sigma.detach().clone()
        found.update({f"{name}.logprobs.{n}": logprobs for n, logprobs in zip(numbers, seen, strict=True)})

    noise.draw = wave
    update("known")
    noise.draw = drawn
    pieces, counters = learner.state()
    write_pieces(out / f"pieces-{dist.get_rank()}.safetensors", pieces)
    dist.barrier()
    update("drawn")
    update("other")
    learner.restore(PieceReader(sorted(out.glob("pieces-*.safetensors"))), counters)
    update("again")
    for number, scores in zip(numbers, learner.score(batches, native), strict=True):
        found[f"scored.{number}"] = scores.logprobs
    save(out, "found", found)


def gradient_of(noise: LayerNoise) -> Tensor:
    """What Adam is about to use."""
    assert noise.log_sigma.grad is not None
    return noise.log_sigma.grad.clone()


if __name__ == "__main__":
    do_runs(perturb)
