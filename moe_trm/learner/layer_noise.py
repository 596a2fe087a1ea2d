"""Noise on the input of every decoder layer in updates, with a size that is trained (ALP).

Shape letters: L decoder layers of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_trm.config.schema import LayerNoiseConfig
from moe_trm.learner.checkpoint.pieces import Piece, PieceReader, whole
from moe_trm.learner.protocol import UpdateResult


class RandomTracker(Protocol):
    """Megatron's random states by name: what ranks of tensor parallelism draw apart."""

    def get_states(self) -> dict[str, Tensor]: ...

    def set_states(self, states: dict[str, Tensor]) -> None: ...


SAVED, STEPS = "layer_noise", "layer_noise_steps"


class LayerNoise:
    """`h_l + sigma_l z` with `z ~ N(0, I)` in the place of `h_l`, the input of layer l, inside of `perturbing`.

    The logarithm of each sigma is trained by Adam on the gradient of the same loss, and is the same on every rank.
    Ranks hold different tokens of a layer, so they draw apart, and their gradients add up. Source: adaptive layerwise
    perturbation (arXiv 2603.19470).

    Args:
        layers: this rank's decoder layers by their 0-based number in the model, of `num_layers` (L).
        tracker: of a Megatron model, whose layers draw from its states where ranks share a sequence.

    Attributes:
        log_sigma: `[L]` float32.
        draw: makes z for a layer's input.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        num_layers: int,
        settings: LayerNoiseConfig,
        seed: int,
        device: torch.device,
        tracker: RandomTracker | None = None,
    ) -> None:
        start = torch.full((num_layers,), math.log(settings.sigma), device=device)
        self.log_sigma = start.requires_grad_()
        self.draw: Callable[[Tensor], Tensor] = torch.randn_like
        self._adam = torch.optim.Adam([self.log_sigma], lr=settings.sigma_lr)
        self._seed, self._device, self._tracker, self._perturbs, self._steps = seed, device, tracker, False, 0
        for number, layer in layers.items():
            layer.register_forward_pre_hook(partial(self._perturb, number), with_kwargs=True)

    @contextmanager
    def perturbing(self) -> Iterator[None]:
        """Layers are perturbed inside, also where a backward computes them again.

        The noise comes from torch's own generators, which activation checkpointing winds back for a recomputation. They
        are seeded by run, update and rank, and go on afterwards as if nothing had been drawn.
        """
        self.log_sigma.grad = None
        words = np.random.SeedSequence([self._seed, self._steps, dist.get_rank()]).generate_state(1, np.uint64)
        on_gpu = self._device.type == "cuda"
        states = self._tracker.get_states() if self._tracker else {}
        with torch.random.fork_rng([self._device] if on_gpu else []):
            torch.manual_seed(int(words[0]))
            if self._tracker:
                state = torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()
                self._tracker.set_states({name: state.clone() for name in states})
            self._perturbs = True
            try:
                yield
            finally:
                self._perturbs = False
                if self._tracker:
                    self._tracker.set_states(states)

    def step(self, result: UpdateResult, scale: float) -> UpdateResult:
        """Train the sizes where the model's own step was made, and tell their mean. Collective over all ranks.

        `scale`: times which backward began at the loss.
        """
        if result.applied:
            gradient = torch.zeros_like(self.log_sigma) if self.log_sigma.grad is None else self.log_sigma.grad / scale
            dist.all_reduce(gradient)
            self.log_sigma.grad = gradient
            self._adam.step()
            self._steps += 1
        return replace(result, layer_noise=float(self.log_sigma.detach().exp().mean()))

    def save(self) -> tuple[list[Piece], dict[str, int]]:
        """Sizes and Adam's moments as one tensor `[3, L]`, which the first rank saves, and the number of steps."""
        if dist.get_rank():
            return [], {STEPS: self._steps}
        zero = torch.zeros_like(self.log_sigma)
        moments = self._adam.state.get(self.log_sigma, {"exp_avg": zero, "exp_avg_sq": zero})
        values = torch.stack([self.log_sigma.detach(), moments["exp_avg"], moments["exp_avg_sq"]])
        return [whole(SAVED, values)], {STEPS: self._steps}

    @torch.no_grad()
    def load(self, reader: PieceReader, counters: Mapping[str, int]) -> None:
        """Take over what `save` gave. A checkpoint of a run without noise has none: sizes begin anew then."""
        if SAVED not in reader:
            return
        self._steps = counters[STEPS]
        values, *moments = reader.read(SAVED, (3, len(self.log_sigma))).to(self._device)
        self.log_sigma.copy_(values)
        step = torch.tensor(float(self._steps))
        self._adam.state[self.log_sigma] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}

    def _perturb(
        self, number: int, _layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._perturbs:
            return None
        hidden = args[0] if args else named["hidden_states"]
        noisy = hidden + self.log_sigma[number].exp() * self.draw(hidden)
        return ((noisy, *args[1:]), named) if args else (args, {**named, "hidden_states": noisy})
