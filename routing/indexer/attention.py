"""Attention of transformers' sparse models over the positions that it is given, which says what it really saw.

It is named through transformers' own `AttentionInterface`. A model under this name hands the indexer's choice through
to its attention, where the proof of replay compares it with the record. The arithmetic is `sdpa`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NAME = "moe_trm_sparse"
"""Value of transformers' `attn_implementation`."""
PROOF = "indexer_proof"
"""The keyword by which a model hands the proof through to its attention."""


def register() -> str:
    """Make the function known to transformers; its name there."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    indices: Tensor,
    indexer_proof: Callable[[int, Tensor], None] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`query` `[B, N, R, D]`, `key` and `value` `[B, N, C, D]` -> `[B, R, N, D]`, as transformers calls it.

    Args:
        module: the attention module.
        query, key, value: of the layer.
        attention_mask: `[B, 1, R, C]` bool, True on what causality allows.
        indices: `[B, R, K]` positions that the indexer chose.
        indexer_proof: is told the layer, and `[B, R, C]` bool what its tokens see.
        options: of `sdpa`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sees_BRC = torch.zeros_like(attention_mask[:, 0]).expand(len(query), -1, -1).scatter(-1, indices.long(), True)
    sees_BRC = sees_BRC & attention_mask[:, 0]
    if indexer_proof is not None:
        indexer_proof(int(module.layer_idx), sees_BRC)  # type: ignore[arg-type]
    output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, sees_BRC[:, None], **options)
    return output
