"""Causal attention over padded rows and over packs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DotProductAttention(nn.Module):
    """Queries, keys and values `[S, B, heads, D]` (`sbhd`), or `[T, heads, D]` (`thd`) of sequences in a row."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert (attn_mask_type, attention_type, softmax_type) == ("causal", "self", "vanilla")
        assert window_size is None
        assert cp_group is None
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor:
        operands = (query_layer, key_layer, value_layer)
        if qkv_format != "thd":
            assert attn_mask_type == "causal"
            return self._attend(*operands).flatten(2)
        assert attn_mask_type == "padding_causal"
        assert cu_seqlens_q is not None
        assert cu_seqlens_kv is not None
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
        ends = cu_seqlens_q.tolist()
        assert (cu_seqlens_q.dtype, ends[0], ends[-1]) == (torch.int32, 0, len(query_layer))
        lengths = [end - start for start, end in pairwise(ends)]
        assert max_seqlen_q is not None
        assert max(lengths) <= max_seqlen_q
        parts = zip(*(operand.split(lengths) for operand in operands), strict=True)
        return torch.cat([self._attend(*(part[:, None] for part in sequence))[:, 0] for sequence in parts]).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (operand.permute(1, 2, 0, 3) for operand in (query, key, value))
        scale = self.softmax_scale
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return output.permute(2, 0, 1, 3)
