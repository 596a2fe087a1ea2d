"""Training state of a Megatron learner as pieces of global tensors, saved and restored on any layout.

The state is weights, Adam's moments and random state. `weight/NAME` is the float32 master weight, from which the
model's own weight is a cast. `exp_avg/NAME` and `exp_avg_sq/NAME` are Adam's moments. `gradient/NAME` is that of the
update before, where the next is compared with it. `snapshot/VERSION/NAME` are older weights of the model itself. NAME
has global layer and expert numbers; of an adapter's factor it is peft's. Gate and up rows of one matrix are stored as
`[2, rows, columns]`, because tensor parallelism cuts each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from moe_trm.learner.checkpoint.pieces import Piece, PieceReader, Place, to_host, whole
from moe_trm.learner.lora.base import Identity
from moe_trm.learner.megatron import convert
from moe_trm.learner.megatron.lora import Factor
from moe_trm.learner.megatron.model import EMBEDDING, OUTPUT, global_parameters, global_tensors, tensor_group
from moe_trm.learner.megatron.optimizer import MegatronGuardedOptimizer
from moe_trm.learner.megatron.policy import PolicyModel

MOMENTS, GRADIENT = ("exp_avg", "exp_avg_sq"), "gradient"


@dataclass(frozen=True)
class OptimizerShare:
    """Place of a rank's parameter in the whole one: a box.

    Its flattened elements come first in the flattened parameter.

    The elements after them are padding of the vocabulary.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    box: tuple[int, ...]

    def piece(self, kind: str, values: Tensor, start: int) -> Piece:
        """Elements `start` and after of the flattened parameter."""
        flat = values.detach().reshape(-1)[: max(0, math.prod(self.box) - start)]
        return Piece(Place(f"{kind}/{self.name}", self.global_shape, self.offset, self.box, start), to_host(flat))

    def flat(self, kind: str, reader: PieceReader, numel: int) -> Tensor:
        """This rank's share of the saved tensor, flattened, with zeros for padding."""
        box = tuple(slice(first, first + size) for first, size in zip(self.offset, self.box, strict=True))
        share = reader.read(f"{kind}/{self.name}", self.global_shape)[box].reshape(-1)
        return F.pad(share, (0, numel - share.numel()))


@dataclass(frozen=True)
class Master:
    """Part of a parameter that this rank's optimizer updates: a flat float32 tensor that begins at element `start`.

    Attributes:
        values, start: the tensor; of an offloaded optimizer, on the host.
        optimizer: that has its moments.
        speaks: this rank saves the part; several ranks may hold the same one.
        listed: the tensor in the groups of Megatron's optimizer, which has the gradient.
    """

    values: Tensor
    start: int
    optimizer: torch.optim.Optimizer
    is_writer: bool
    listed: Tensor

    def set_moments(self, moments: dict[str, Tensor], steps: int) -> None:
        """Give the optimizer its moments and the number of steps they stand for."""
        if isinstance(self.optimizer, torch.optim.AdamW | torch.optim.Adam):
            moments["step"] = torch.tensor(float(steps))
        else:  # fused optimizers count per group
            for group in self.optimizer.param_groups:
                group["step"] = steps
        self.optimizer.state[self.values] = moments


class MegatronState:
    """The state of one rank's model and optimizer. With `factors` of adapters, nothing else trains.

    `chunks`: one for each virtual pipeline stage. `identity`: of the model that adapters belong to.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        optimizer: MegatronGuardedOptimizer,
        hf: Mapping[str, Any],
        factors: Sequence[Factor] = (),
        identity: Identity | None = None,
    ) -> None:
        self._chunks, self._optimizer, self._hf = chunks, optimizer, hf
        self._factors, self._identity = factors, identity

    def save(self) -> tuple[list[Piece], dict[str, int]]:
        """Host copies of the tensors that this rank saves, and the counters. Training may continue at once."""
        masters, gradients = _masters(self._optimizer.megatron), self._optimizer.previous_gradients()
        pieces = [whole(f"{_random(dist.get_rank())}/{name}", state) for name, state in _random_states().items()]
        for share, parameter in self._trained():
            master = masters.get(parameter)
            if master is None or not master.is_writer:
                continue
            state = master.optimizer.state.get(master.values, {})
            pieces.append(share.piece("weight", master.values, master.start))
            pieces += [share.piece(kind, state[kind], master.start) for kind in MOMENTS if kind in state]
            if master.listed in gradients:
                pieces.append(share.piece(GRADIENT, gradients[master.listed], master.start))
        return pieces, self._optimizer.counters() | (self._identity.counters() if self._identity else {})

    @torch.no_grad()
    def load(self, reader: PieceReader, counters: Mapping[str, int]) -> None:
        """Take over what any layout saved.

        Raises `CheckpointError` for a missing tensor, one of another shape, or adapters of another model.
        """
        if self._identity is not None:
            self._identity.check(counters)
        steps, masters = counters["optimizer_steps"], _masters(self._optimizer.megatron)
        gradients: dict[Tensor, Tensor] = {}
        for share, parameter in self._trained():
            master = masters.get(parameter)
            weight = share.flat("weight", reader, parameter.numel())
            parameter.copy_(weight.view(parameter.shape))
            if master is None:
                continue
            span, shape = slice(master.start, master.start + master.values.numel()), master.values.shape
            master.values.copy_(weight[span].view(shape))
            if steps:
                moments = {kind: share.flat(kind, reader, parameter.numel())[span].view(shape) for kind in MOMENTS}
                master.set_moments({kind: value.to(master.values.device) for kind, value in moments.items()}, steps)
            if f"{GRADIENT}/{share.name}" in reader:
                own_gradient = share.flat(GRADIENT, reader, parameter.numel())[span]
                gradients[master.listed] = own_gradient.to(master.listed.device)
        self._optimizer.restore(counters)
        self._optimizer.remember(gradients)
        prefix = f"{_random(dist.get_rank())}/"
        if f"{prefix}torch" in reader:
            _set_random_states({name.removeprefix(prefix): reader.read(name) for name in reader.names(prefix)})

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """See `base.Training`. Embedding and output weight of a tied model count as one tensor of two stages."""
        tied = bool(self._hf.get("tie_word_embeddings", False))
        for name, tensor in global_tensors(self._chunks):
            part = 0 if convert.split_dim(name) is None else tensor_group(name).rank()
            yield f"{EMBEDDING if tied and name == OUTPUT else name}, part {part}", tensor
        for factor in self._factors:
            yield f"{factor.name} from {factor.offset}", factor.parameter

    def save_weights(self, kind: str) -> list[Piece]:
        """See `snapshots.Weights`. Replicas of a parameter save it once."""
        return [share.piece(kind, parameter, 0) for share, parameter in self._trained() if _replica(parameter) == 0]

    @torch.no_grad()
    def load_weights(self, kind: str, reader: PieceReader) -> None:
        """See `snapshots.Weights`."""
        for share, parameter in self._trained():
            parameter.copy_(share.flat(kind, reader, parameter.numel()).view(parameter.shape))

    def _trained(self) -> Iterator[tuple[OptimizerShare, Tensor]]:
        """The trained tensors. All else is still as in the checkpoint that the run started from."""
        for name, parameter in global_parameters(self._chunks):
            if parameter.requires_grad:
                yield _share(name, parameter, self._hf), parameter
        for factor in self._factors:
            place = OptimizerShare(factor.name, factor.shape, factor.offset, tuple(factor.parameter.shape))
            yield place, factor.parameter


def base_parts(chunks: Sequence[PolicyModel], hf: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Parameters as `base_checksum` takes them: each element of the model on one rank."""
    tied = bool(hf.get("tie_word_embeddings", False))
    for name, parameter in global_parameters(chunks):
        is_copy = tied and name == OUTPUT
        has_part = convert.split_dim(name) is not None or tensor_group(name).rank() == 0
        if has_part and not is_copy and _replica(parameter) == 0:
            yield name, parameter


def _share(name: str, parameter: Tensor, hf: Mapping[str, Any]) -> OptimizerShare:
    group, dim, box = tensor_group(name), convert.split_dim(name), list(parameter.shape)
    if convert.is_gated(name):
        # Rows are the second dimension then, columns the third.
        box, dim = [2, box[0] // 2, *box[1:]], None if dim is None else dim + 1
    shape, offset = list(box), [0] * len(box)
    if dim is not None:
        shape[dim] *= group.size()
        offset[dim] = box[dim] * group.rank()
    if name in (EMBEDDING, OUTPUT):
        shape[0] = int(hf["vocab_size"])
        offset[0] = min(offset[0], shape[0])
        box[0] = min(box[0], shape[0] - offset[0])
    return OptimizerShare(name, tuple(shape), tuple(offset), tuple(box))


def _masters(optimizer: MegatronOptimizer) -> dict[Tensor, Master]:
    """By parameter; what other ranks update is absent."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return {parameter: master for part in parts for parameter, master in _masters_of(part)}


def _masters_of(part: Any) -> Iterator[tuple[Tensor, Master]]:
    if getattr(part, "is_stub_optimizer", False):
        return  # nothing on this rank trains
    if isinstance(part, DistributedOptimizer):
        on_host = _on_host(part.optimizer)
        for parameter, (group, place) in part.model_param_group_index_map.items():
            start = part._get_model_param_range_map(parameter)["param"].start
            listed = part.optimizer.param_groups[group]["params"][place]
            values, optimizer = on_host.get(listed, (listed, part.optimizer))
            yield parameter, Master(values, start, optimizer, is_writer=True, listed=listed)
        return
    pairs = [(values, values) for group in part.param_groups for values in group["params"]]
    if isinstance(part, Float16OptimizerWithFloat16Params):
        models = (*part.float16_groups, *part.fp32_from_fp32_groups)
        mains = (*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups)
        pairs = [pair for model, main in zip(models, mains, strict=True) for pair in zip(model, main, strict=True)]
    for parameter, values in pairs:
        yield parameter, Master(values, 0, part.optimizer, is_writer=_replica(parameter) == 0, listed=values)


def _on_host(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[Tensor, torch.optim.Optimizer]]:
    """The float32 tensor that an offloaded optimizer updates for each in Megatron's groups, and what updates it."""
    if not isinstance(optimizer, HybridDeviceOptimizer):
        return {}
    owners = {
        values: sub_optimizer
        for sub_optimizer in optimizer.sub_optimizers
        for group in sub_optimizer.param_groups
        for values in group["params"]
    }
    return {listed: (values, owners[values]) for listed, values in optimizer.param_to_inner_param.items()}


def _replica(parameter: Tensor) -> int:
    """This rank's number among those that hold the same parameter of the same data-parallel model."""
    if not getattr(parameter, "allreduce", True):
        return parallel_state.get_expert_data_parallel_rank()  # type: ignore[no-any-return]
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)  # type: ignore[no-any-return]


def _random(rank: int) -> str:
    return f"random/rank-{rank:05d}"


def _random_states() -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
        states |= {f"tracker/{name}": state for name, state in _tracker().get_states().items()}
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
        prefix = "tracker/"
        _tracker().set_states(
            {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
        )


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()
