"""SGLang's forward pass on a CPU with the order of sums of `fixed_order`, as Megatron-Core's learner has it.

Registered in place of the kernels that save time where `MOE_TRM_EXACT=1` is in the server's environment. Imported by
SGLang only. Shape letters: N tokens, K experts per token, E experts, D hidden size, F expert width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor
from torch.nn import functional

from moe_trm_sglang_cpu import fixed_order
from moe_trm_sglang_cpu.experts import products


def activate() -> None:
    """Register all of it, in SGLang's own registries and in torch's."""
    activate.kernels = fixed_order.install()  # type: ignore[attr-defined]
    register_attention_backend("torch_native")(FixedAttention)
    around = {
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": experts,
        "sglang.srt.layers.moe.topk.fused_topk_native": gate_weights,
        "sglang.srt.layers.moe.topk.biased_grouped_topk_impl": sigmoid_gate_weights,
        "sglang.srt.models.glm4_moe.Glm4MoeSparseMoeBlock.forward_normal": scaled_gate_weights,
    }
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.__init__", log_softmax_in_decoding, HookType.AFTER)
    logging.getLogger(__name__).info("exact kernels for a CPU are loaded")


class FixedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native` with plain causal attention in a fixed order, alike in prefill and decoding."""

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, keys: Tensor, values: Tensor, *requests: Any, **options: Any
    ) -> Tensor:
        """New tokens of each request over its cached ones, `[tokens, heads, D]` into `output`."""
        slots_of_rows, rows, lengths, prefixes, new_lengths, *_ = requests
        parts = zip(torch.split(query, new_lengths.tolist()), rows, lengths.tolist(), prefixes.tolist(), strict=True)
        outputs = []
        for part, row, length, prefix in parts:
            slots = slots_of_rows[row, :length]
            hidden = torch.arange(length) > torch.arange(prefix, length)[:, None]
            seen = keys[slots][None], values[slots][None]
            outputs.append(fixed_order.attend(part[None], *seen, hidden[None], options["scaling"])[0])
        return output.copy_(torch.cat(outputs))

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, keys: Tensor, values: Tensor, *requests: Any, **options: Any
    ) -> Tensor:
        """The last token of each request over its cached ones, `[requests, heads, D]` into `output`."""
        slots_of_rows, rows, lengths, *_ = requests
        hidden = torch.arange(int(lengths.max())) >= lengths[:, None]
        slots = slots_of_rows[rows, : hidden.shape[1]].to(torch.int64)
        slots = slots.masked_fill(hidden, int(slots[0, 0]))  # the first request has a first token
        seen = keys[slots], values[slots]
        return output.copy_(fixed_order.attend(query[:, None], *seen, hidden[:, None], options["scaling"])[:, 0])


def log_softmax_in_decoding(made: None, sampler: Any) -> None:
    """Hook after the sampler is made: log-probs are a log-softmax in decoding as well, as in SGLang's own deterministic
    mode. They are the logarithm of a softmax otherwise."""
    sampler.enable_deterministic = True


def experts(native: Callable[..., Tensor], layer: Any, x_ND: Tensor, topk_output: Any, config: Any) -> Tensor:
    """Hook around `moe_forward_native`: sum_k W2 (silu(W1 x) * W3 x * w_k), experts in the order of their numbers.

    Megatron applies gate weights before the second product. SGLang's own multiplies what comes out of it.
    """
    weights_NK, ids_NK, _ = topk_output
    if config.activation != "silu" or getattr(layer, "w13_weight_bias", None) is not None:
        raise NotImplementedError("exact: these experts have no fixed order of sums")
    ids = ids_NK.flatten()
    order, sizes = ids.argsort(stable=True), torch.bincount(ids, minlength=len(layer.w2_weight)).tolist()
    tokens = order // ids_NK.shape[1]
    gate, up = products(x_ND[tokens], sizes, layer.w13_weight).chunk(2, -1)
    inner = functional.silu(gate) * up * weights_NK.flatten()[order, None]
    out = products(inner, sizes, layer.w2_weight)
    return torch.zeros_like(x_ND).scatter_add_(0, tokens[:, None].expand_as(out), out)


def gate_weights(
    native: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
    scoring_func: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """Hook around `fused_topk_native`: normalised gate weights are a softmax of the chosen logits, as in Megatron."""
    if scoring_func != "softmax" or not renormalize or correction_bias is not None:
        return native(hidden_states, gating_output, topk, renormalize, correction_bias, scoring_func)
    top_logits, ids = torch.topk(gating_output.float(), topk, dim=-1)
    return top_logits.softmax(-1), ids


def sigmoid_gate_weights(
    native: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    *groups: int,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Hook around `biased_grouped_topk_impl`: experts in the order of their scores, as Megatron adds up their weights.

    SGLang's own have no order, on which the sum of more than two weights depends.
    """
    _, ids = native(hidden_states, gating_output, correction_bias, topk, renormalize, *groups, **more)
    scores = gating_output.float().sigmoid()
    order = (scores + correction_bias).gather(1, ids.long()).argsort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    weights = scores.gather(1, ids.long())
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if apply_routed_scaling_factor_on_output:
        weights = weights * routed_scaling_factor
    return weights, ids


def scaled_gate_weights(native: Callable[..., Tensor], block: Any, hidden_states: Tensor) -> Tensor:
    """Hook around GLM-4-MoE's block: its factor is part of the gate weights, as in Megatron. SGLang's own multiplies
    the sum over experts."""
    block.topk.topk_config.apply_routed_scaling_factor_on_output, block.routed_scaling_factor = True, 1.0
    return native(block, hidden_states)
