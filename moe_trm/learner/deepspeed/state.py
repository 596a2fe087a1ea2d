"""Training state of a DeepSpeed learner as pieces of global tensors, for any stage and number of ranks.

The state is weights, Adam's moments and random state. `weight/NAME` is the float32 master weight, from which the
model's own weight is a cast. `exp_avg/NAME` and `exp_avg_sq/NAME` are Adam's moments. `gradient/NAME` is that of the
update before, where the next is compared with it. `snapshot/VERSION/NAME` are older weights of the model itself. NAME
is the parameter's name in the model of transformers. No rank gathers anything: each saves what its part of the
optimizer updates, or what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_trm.learner.checkpoint.pieces import Piece, PieceReader, Place, to_host, whole
from moe_trm.learner.deepspeed.optimizer import DeepSpeedGuardedOptimizer
from moe_trm.learner.deepspeed.weights import is_factor, own_partition
from moe_trm.learner.lora.base import Identity

MOMENTS, GRADIENT = ("exp_avg", "exp_avg_sq"), "gradient"


@dataclass(frozen=True)
class Fragment:
    """Part of one parameter that this rank's optimizer updates.

    Attributes:
        shape: of the whole parameter.
        start: place of the fragment's first element in the flattened parameter.
        numel: elements of the fragment.
        flat: the float32 tensor that the optimizer steps, holding fragments of many parameters.
        offset: place of the fragment's first element in `flat`.
    """

    shape: tuple[int, ...]
    start: int
    numel: int
    flat: Tensor
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """The fragment's elements of `flat` or of a moment like it."""
        return flat.detach().narrow(0, self.offset, self.numel)

    def piece(self, name: str, flat: Tensor) -> Piece:
        """The fragment's elements of `flat` as what is saved under `name`."""
        return Piece(Place(name, self.shape, (0,) * len(self.shape), self.shape, self.start), to_host(self.of(flat)))


class DeepSpeedState:
    """The state of one rank's model and optimizer.

    Args:
        model: the model of transformers.
        engine: DeepSpeed's engine around it.
        optimizer: counts the steps.
        identity: of the model that adapters belong to, where nothing else trains.
    """

    def __init__(
        self, model: nn.Module, engine: Any, optimizer: DeepSpeedGuardedOptimizer, identity: Identity | None = None
    ) -> None:
        self._model, self._zero, self._optimizer, self._identity = model, engine.optimizer, optimizer, identity

    def save(self) -> tuple[list[Piece], dict[str, int]]:
        """Host copies of the tensors that this rank saves, and the counters. Training may continue at once."""
        pieces = [whole(f"{_random()}/{name}", state) for name, state in _random_states().items()]
        gradients = self._optimizer.previous_gradients()
        for name, _, fragment in self._fragments():
            if fragment is not None:
                pieces.append(fragment.piece(f"weight/{name}", fragment.flat))
                state = self._zero.optimizer.state.get(fragment.flat, {})
                pieces += [fragment.piece(f"{kind}/{name}", state[kind]) for kind in MOMENTS if kind in state]
                if fragment.flat in gradients:
                    pieces.append(fragment.piece(f"{GRADIENT}/{name}", gradients[fragment.flat]))
        return pieces, self._optimizer.counters() | (self._identity.counters() if self._identity else {})

    @torch.no_grad()
    def load(self, reader: PieceReader, counters: Mapping[str, int]) -> None:
        """Take over what any stage saved.

        Raises `CheckpointError` for a missing tensor, one of another shape, or adapters of another model.
        """
        if self._identity is not None:
            self._identity.check(counters)
        steps, gradients = counters["optimizer_steps"], dict[Tensor, Tensor]()
        for name, parameter, fragment in self._fragments():
            weight = reader.read(f"weight/{name}", _shape(parameter)).flatten()
            _set_weight(parameter, weight)
            if fragment is None:
                continue
            part = slice(fragment.start, fragment.start + fragment.numel)
            fragment.of(fragment.flat).copy_(weight[part])
            if steps:
                state = self._moments(fragment.flat, steps)
                for kind in MOMENTS:
                    fragment.of(state[kind]).copy_(reader.read(f"{kind}/{name}", fragment.shape).flatten()[part])
            if f"{GRADIENT}/{name}" in reader:
                gradient = gradients.setdefault(fragment.flat, torch.zeros_like(fragment.flat.detach()))
                fragment.of(gradient).copy_(reader.read(f"{GRADIENT}/{name}", fragment.shape).flatten()[part])
        self._optimizer.restore(counters)
        self._optimizer.remember(gradients)
        if f"{_random()}/torch" in reader:
            prefix = f"{_random()}/"
            _set_random_states({name.removeprefix(prefix): reader.read(name) for name in reader.names(prefix)})

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """See `base.Training`: at ZeRO 1 and 2 the whole model. At ZeRO 3 each part of a parameter is on one rank."""
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if not hasattr(tensor, "ds_tensor"):
                yield name, tensor

    def save_weights(self, kind: str) -> list[Piece]:
        """See `snapshots.Weights`. Weights that every rank holds are saved by the first."""
        pieces = []
        for name, parameter, _ in self._fragments():
            partition, shape = own_partition(parameter), _shape(parameter)
            start = 0 if partition is parameter else partition.numel() * dist.get_rank()
            if partition is not parameter or dist.get_rank() == 0:
                place = Place(f"{kind}/{name}", shape, (0,) * len(shape), shape, start)
                # The last rank's partition ends in padding.
                pieces.append(Piece(place, to_host(partition)[: max(0, math.prod(shape) - start)]))
        return pieces

    @torch.no_grad()
    def load_weights(self, kind: str, reader: PieceReader) -> None:
        """See `snapshots.Weights`."""
        for name, parameter, _ in self._fragments():
            _set_weight(parameter, reader.read(f"{kind}/{name}", _shape(parameter)).flatten())

    def _moments(self, flat: Tensor, steps: int) -> dict[str, Tensor]:
        """Adam's state of `flat`, made where no step has made it yet."""
        state: dict[str, Tensor] = self._zero.optimizer.state[flat]
        if not state:
            state |= {kind: torch.zeros_like(flat.detach()) for kind in MOMENTS}
        state["step"] = torch.tensor(float(steps))
        return state

    def _fragments(self) -> Iterator[tuple[str, nn.Parameter, Fragment | None]]:
        """The trained parameters, with the part that this rank updates; None where it updates nothing."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, self._fragment(parameter)

    def _fragment(self, parameter: Any) -> Fragment | None:
        shape = _shape(parameter)
        if hasattr(parameter, "ds_tensor"):
            group, offset, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
            start = size * dist.get_rank()
            # The last rank's share ends in padding.
            numel = min(size, math.prod(shape) - start)
            return (
                Fragment(shape, start, numel, self._zero.fp32_partitioned_groups_flat[group], offset)
                if numel > 0
                else None
            )
        link = parameter._hp_mapping
        if link is None:
            return None
        flat = self._zero.single_partition_of_fp32_groups[link.param_group_index]
        whole_part, flat_part = link.lp_fragment_address, link.hp_fragment_address
        return Fragment(shape, whole_part.start, whole_part.numel, flat, flat_part.start)


def base_parts(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters as `base_checksum` takes them: each element of the model on one rank."""
    for name, parameter in model.named_parameters():
        partition = own_partition(parameter)
        if not is_factor(name) and (partition is not parameter or dist.get_rank() == 0):
            # The last rank's partition ends in padding.
            start = 0 if partition is parameter else partition.numel() * dist.get_rank()
            yield name, partition.flatten()[: max(0, math.prod(_shape(parameter)) - start)]


def _set_weight(parameter: Any, weight: Tensor) -> None:
    """Give this rank's part of the model's parameter its share of the whole flattened `weight`."""
    partition = own_partition(parameter)
    if partition is parameter:
        parameter.copy_(weight.view(parameter.shape))
        return
    first = partition.numel() * dist.get_rank()
    share = weight[first : first + partition.numel()]
    partition.copy_(F.pad(share, (0, partition.numel() - share.numel())))


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _random() -> str:
    return f"random/rank-{dist.get_rank():05d}"


def _random_states() -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
