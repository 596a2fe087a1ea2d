"""The weights of plain Qwen3-MoE layers as `whole_layers` multiplies by them: in float32, input before output.

Such a product takes half of the time. The copies are made at the first pass, and again after every request to the
scheduler that is not for tokens: only those can change weights.

Shape letters: as in `whole_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KEPT = "moe_trm_matrices"
"""Attribute of a model with its matrices, or None if it is not plain."""
MOST_NUMBERS = 1 << 24
"""Numbers of a model's layers up to which copies are kept."""
FOR_TOKENS = frozenset({"TokenizedGenerateReqInput", "BatchTokenizedGenerateReqInput", "AbortReq"})
"""Names of the requests that leave the weights alone."""


@dataclass(frozen=True)
class LayerMatrices:
    """One layer. All tensors are float32."""

    eps: float
    input_norm: Tensor
    """`[D]`, before the attention."""
    output_norm: Tensor
    """`[D]`, behind it."""
    heads: int
    groups: int
    head_norms: Tensor
    """`[H + G, A]`, of queries and keys."""
    qkv: Tensor
    """`[D, (H + 2 G) A]`."""
    out: Tensor
    """`[H A, D]`."""
    gate: Tensor
    """`[D, E]`."""
    w13: Tensor
    """`[E, D, 2 F]`, gate and then up."""
    each_w13: Sequence[Tensor]
    """The E matrices of it."""
    w2: Tensor
    """`[E, F, D]`."""
    each_w2: Sequence[Tensor]
    """Likewise."""
    top_k: int
    renormalize: bool
    attention: Any
    """SGLang's module, which names the layer to the cache."""


def matrices_of(layer: Any) -> LayerMatrices:
    """The matrices of SGLang's layer."""
    attention, experts, chooser = layer.self_attn, layer.mlp.experts, layer.mlp.topk.topk_config
    heads, groups = attention.num_heads, attention.num_kv_heads
    w13, w2 = _turned(experts.w13_weight), _turned(experts.w2_weight)
    norms = [attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(groups, -1)]
    return LayerMatrices(
        eps=layer.input_layernorm.variance_epsilon,
        input_norm=layer.input_layernorm.weight.float(),
        output_norm=layer.post_attention_layernorm.weight.float(),
        heads=heads,
        groups=groups,
        head_norms=torch.cat(norms).float(),
        qkv=_turned(attention.qkv_proj.weight),
        out=_turned(attention.o_proj.weight),
        gate=_turned(layer.mlp.gate.weight),
        w13=w13,
        each_w13=w13.unbind(),
        w2=w2,
        each_w2=w2.unbind(),
        top_k=chooser.top_k,
        renormalize=chooser.renormalize,
        attention=attention.attn,
    )


def _turned(weight: Tensor) -> Tensor:
    """A copy with the last two dimensions exchanged, in float32."""
    return weight.detach().transpose(-1, -2).float().contiguous()


def kept_matrices(model: Any, is_plain: Callable[[Any], bool]) -> list[LayerMatrices] | None:
    """The matrices of a model's layers, made once; None for a model that is not plain, or too large."""
    if KEPT not in model.__dict__:
        numbers = sum(weight.numel() for weight in model.layers.parameters())
        plain = numbers <= MOST_NUMBERS and is_plain(model)
        model.__dict__[KEPT] = [matrices_of(layer) for layer in model.layers] if plain else None
    found: list[LayerMatrices] | None = model.__dict__[KEPT]
    return found


def forget_after(scheduler: Any, requests: Sequence[Any]) -> None:
    """Drop what is kept of a scheduler's weights and cache if any of these requests may change either."""
    if all(type(request).__name__ in FOR_TOKENS for request in requests):
        return
    runner = scheduler.tp_worker.model_runner
    model = getattr(runner.model, "model", None)
    if model is not None:
        model.__dict__.pop(KEPT, None)
    getattr(runner.attn_backend, "forget", lambda: None)()
