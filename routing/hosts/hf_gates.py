"""The contract between a gate and its experts, found when the hooks are attached.

A copy of the block is forwarded with random weights and inputs on the CPU, up to its experts. What they get shows which
of the gate's values are the ids and the weights. The third of its values with the shape of logits is the logits, and
one of these formulas must give the weights:

| formula | weights of ids `I` from logits `l`, times a factor |
|---|---|
| softmax, normalised | `p[I] / sum(p[I])` with `p = softmax(l)` |
| softmax of the chosen | `softmax(l[I])`: the same but for rounding |
| softmax | `p[I]` |
| sigmoid, normalised | `s[I] / sum(s[I])` with `s = sigmoid(l)` |
| sigmoid | `s[I]` |

The factor is 1 or a number that the gate has as an attribute. Nothing of the model is read or changed, and no rank
waits for another. So the weights may be shared, and any gate is refused before a forward.

Shape letters: N tokens, K experts per token, E experts, H hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from routing.errors import ReplayRefusedError
from routing.hosts.hf_blocks import gate_of, selection_bias

NUM_TOKENS = 64
TOLERANCE = 1e-4
"""Relative; of float32 weights, whose formulas differ by far more."""
_FORMULAS = ("softmax, normalised", "softmax of the chosen", "softmax", "sigmoid, normalised", "sigmoid")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class GateContract:
    """The form of a gate's answer and of the call of its experts.

    Attributes:
        logits, weights, ids: places in the tuple that the gate returns.
        weights_argument, ids_argument: places, or names, of the experts' arguments.
        formula: one of the table above.
        factor: of all weights.
        takes_best: the ids are the best K of the scores, with the selection bias where there is one. False: groups
            or anything else come into it.
    """

    logits: int
    weights: int
    ids: int
    weights_argument: int | str
    ids_argument: int | str
    formula: str
    factor: float
    takes_best: bool = False

    @property
    def sigmoid(self) -> bool:
        """True where experts are scored one by one."""
        return self.formula.startswith("sigmoid")

    @property
    def normalised(self) -> bool:
        """True where the weights of a token add up to the factor, whatever the logits are."""
        return self.formula not in ("softmax", "sigmoid")

    def read(self, output: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[N, E]`, weights and ids `[N, K]` of what the gate returned."""
        return output[self.logits], output[self.weights], output[self.ids]

    def write(self, output: tuple[Any, ...], weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
        """The values that the gate returned, with other weights and ids."""
        replaced = {self.weights: weights, self.ids: ids}
        return tuple(replaced.get(place, value) for place, value in enumerate(output))

    def passed_weights_and_ids(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Weights and ids `[N, K]` among the arguments of the experts."""
        weights, ids = (
            args[place] if isinstance(place, int) else kwargs[place]
            for place in (self.weights_argument, self.ids_argument)
        )
        return weights, ids

    def gate_weights(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Gate weights `[N, K]` of `ids` from live `logits` `[N, E]`. Differentiable in `logits`."""
        if self.formula == "softmax of the chosen":
            return logits.gather(1, ids).softmax(-1) * self.factor
        scores = logits.float().sigmoid() if self.sigmoid else logits.softmax(-1, dtype=torch.float32)
        weights = scores.gather(1, ids)
        if self.normalised:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + 1e-20 if self.sigmoid else total)
        return weights * self.factor

    def selection_scores(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """`[N, E]` that a gate which `takes_best` takes the best of."""
        logits = logits.detach().float()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        return scores if bias is None else scores + bias


def contract_of(layer: int, block: nn.Module) -> GateContract:
    """The contract of the gate of `block`.

    Raises:
        ReplayRefusedError: a gate that breaks it, with what it does instead.
    """
    block = getattr(block, "_checkpoint_wrapped_module", block)
    gate = gate_of(block)
    returned, args, kwargs, bias = _answer(layer, block)
    values = returned if isinstance(returned, tuple) else (returned,)
    num_experts, top_k = int(gate.num_experts), int(gate.top_k)
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    ids = _passed_on(values, arguments, (NUM_TOKENS, top_k), floating=False)
    weights = _passed_on(values, arguments, (NUM_TOKENS, top_k), floating=True)
    shape = (NUM_TOKENS, num_experts)
    logits = [
        place
        for place, value in enumerate(values)
        if _is(value, shape, floating=True) and (weights is None or place != weights[0])
    ]
    if ids is None or weights is None or len(logits) != 1:
        raise _refused(
            layer,
            gate,
            f"it returns {_shapes(values)} and its experts get {_shapes(arguments.values())}, where N={NUM_TOKENS} "
            f"tokens, {num_experts} experts and {top_k} of them for each token should give logits [N, {num_experts}] "
            f"and, to the experts, ids and weights [N, {top_k}]",
        )
    return _with_formula(
        layer, gate, GateContract(logits[0], weights[0], ids[0], weights[1], ids[1], "", 1.0), values, bias
    )


def contracts_of(blocks: Mapping[int, nn.Module]) -> dict[int, GateContract]:
    """Layer -> the contract of its gate.

    Raises:
        ReplayRefusedError: as `contract_of`, or layers with other numbers of experts than the first.
    """
    contracts = {layer: contract_of(layer, block) for layer, block in blocks.items()}
    sizes = {layer: (int(gate_of(block).num_experts), int(gate_of(block).top_k)) for layer, block in blocks.items()}
    if len(set(sizes.values())) > 1:
        raise ReplayRefusedError(
            f"layers have different numbers of experts, or use different numbers of them: {sizes}. A record of routes "
            "has one of each."
        )
    return contracts


def gate_weights(block: nn.Module, logits: Tensor, ids: Tensor) -> Tensor:
    """Gate weights `[N, K]` of `ids` from live `logits` `[N, E]`, as the gate of `block` weighs its choice.

    Differentiable in `logits`.
    """
    return contract_of(0, block).gate_weights(logits, ids)


class _Reached(Exception):
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.positional, self.named = args, kwargs


class _Experts(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(args, kwargs)


def _answer(layer: int, block: nn.Module) -> tuple[Any, tuple[Any, ...], dict[str, Any], Tensor | None]:
    """The values that a copy of the gate returned, the arguments of its experts, and its selection bias."""
    gate, generator = gate_of(block), torch.Generator().manual_seed(layer)
    copied = _bare(block, generator, {"experts": _Experts()})
    name = next(name for name, child in block.named_children() if child is gate)
    copied._modules[name] = asked = _bare(gate, generator)
    returned: list[Any] = []
    asked.register_forward_hook(lambda _gate, _args, output: returned.append(output))
    hidden = torch.randn(1, NUM_TOKENS, _shape(gate.weight)[-1], generator=generator, device="cpu")
    try:
        with torch.no_grad():
            copied(hidden)
    except _Reached as reached:
        if len(returned) == 1:
            return returned[0], reached.positional, reached.named, selection_bias(copied)
        problem = f"{len(returned)} forwards of it come before its experts"
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"its block cannot be forwarded with hidden states alone ({type(error).__name__}: {error})"
    else:
        problem = "its block does not call its experts as a module"
    raise _refused(layer, gate, problem)


def _bare(module: nn.Module, generator: torch.Generator, children: dict[str, nn.Module] | None = None) -> nn.Module:
    """A copy of `module` on the CPU with random weights and no hooks.

    `children` replace those of the same name, and the rest becomes `nn.Identity`; None: copies of all of them.
    """
    # `copy.copy` would make a module that `fully_shard` has wrapped anew, without its arguments.
    copied: nn.Module = object.__new__(type(module))
    # What a library put in the place of the forward works on the model itself.
    copied.__dict__.update({name: value for name, value in vars(module).items() if name != "forward"})
    for hooks in _HOOKS:
        setattr(copied, hooks, OrderedDict())
    copied._parameters = {name: _random(value, generator) for name, value in module._parameters.items()}
    copied._buffers = {name: _random(value, generator) for name, value in module._buffers.items()}
    copied._modules = {
        name: None
        if child is None
        else (_bare(child, generator) if children is None else children.get(name, nn.Identity()))
        for name, child in module._modules.items()
    }
    copied.training = False
    return copied


def _random(tensor: Tensor | None, generator: torch.Generator) -> Any:
    if tensor is None:
        return None
    shape = _shape(tensor)
    if not tensor.is_floating_point():
        drawn = torch.zeros(shape, dtype=tensor.dtype, device="cpu")
    elif len(shape) == 2:
        drawn = torch.randn(shape, generator=generator, device="cpu") * 1.5 / shape[-1] ** 0.5
    else:
        drawn = torch.rand(shape, generator=generator, device="cpu")
    return nn.Parameter(drawn, requires_grad=False) if isinstance(tensor, nn.Parameter) else drawn


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """That of the whole tensor, also where DeepSpeed's ZeRO 3 has shared it out."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _is(value: object, shape: tuple[int, ...], *, floating: bool) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.is_floating_point() == floating


def _passed_on(
    values: tuple[Any, ...], arguments: Mapping[int | str, Any], shape: tuple[int, ...], *, floating: bool
) -> tuple[int, int | str] | None:
    """The place among the gate's values, and among the experts' arguments, of one that is in both; None: no one is."""
    places = [
        (place, argument)
        for place, value in enumerate(values)
        for argument, got in arguments.items()
        if _is(value, shape, floating=floating) and _is(got, shape, floating=floating) and torch.equal(value, got)
    ]
    return places[0] if len(places) == 1 else None


def _with_formula(
    layer: int, gate: nn.Module, places: GateContract, values: tuple[Any, ...], bias: Tensor | None
) -> GateContract:
    logits, weights, ids = places.read(values)
    best: tuple[float, GateContract | None] = (TOLERANCE, None)
    for contract in _candidates(places, gate, sigmoid_first=bias is not None):
        formula = contract.gate_weights(logits, ids).to(weights.dtype)
        error = float(((formula - weights).abs() / weights.abs().clamp(min=1e-6)).max())
        if error < best[0]:
            best = error, contract
    if best[1] is None:
        raise _refused(
            layer, gate, f"its weights are none of these functions of its logits and ids: {'; '.join(_FORMULAS)}"
        )
    contract = best[1]
    chosen = contract.selection_scores(logits, bias).topk(ids.shape[1], dim=-1).indices
    return replace(contract, takes_best=torch.equal(chosen.sort(-1).values, ids.sort(-1).values))


def _candidates(places: GateContract, gate: nn.Module, *, sigmoid_first: bool) -> Iterator[GateContract]:
    numbers = [value for value in vars(gate).values() if isinstance(value, int | float) and not isinstance(value, bool)]
    for formula in sorted(_FORMULAS, key=lambda name: name.startswith("softmax") if sigmoid_first else 0):
        for factor in dict.fromkeys([1.0, *map(float, numbers)]):
            yield replace(places, formula=formula, factor=factor)


def _shapes(values: Any) -> str:
    shapes = [
        f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
        for value in values
    ]
    return f"({', '.join(shapes)})"


def _refused(layer: int, gate: nn.Module, problem: str) -> ReplayRefusedError:
    return ReplayRefusedError(
        f"the gate of layer {layer} is a {type(gate).__name__} that cannot be replayed: {problem}. Routes of this "
        "model can be neither recorded nor replayed by hooks."
    )
