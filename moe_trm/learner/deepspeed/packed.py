"""Packs in models of transformers: an attention function that keeps their sequences apart.

It is named through transformers' own `AttentionInterface`, and told of the sequences by a keyword that the models hand
through to it. So no mask of the whole pack is made, and models whose masks would let sequences see each other
(gpt-oss of transformers 5.19) are right too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from moe_trm.errors import LearnerError
from moe_trm.learner.sequence_attention import AttentionKind, attend_within

NAME = "moe_trm_packed"
"""Value of transformers' `attn_implementation`."""


def register() -> str:
    """Make the function known to transformers; its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    return NAME


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    sequence_lengths: Sequence[int] = (),
    **_options: Any,
) -> tuple[Tensor, None]:
    """`query` `[1, N, T, D]`, `key` and `value` `[1, G, T, D]` -> `[1, T, N, D]`, as transformers calls it.

    Args:
        module: the attention module.
        query, key, value: of a pack.
        scaling, dropout: of the layer.
        sliding_window: columns that a token sees, its own among them; None: all before it.
        s_aux: `[N]` logits of sinks.
        sequence_lengths: tokens of each sequence, T in all.

    Raises:
        LearnerError: a model that did not hand the lengths through, or a batch that is no pack.
    """
    if query.shape[0] != 1 or sum(sequence_lengths) != query.shape[2]:
        raise LearnerError(
            "attention over a pack was not told of its sequences",
            where=type(module).__name__,
            got=f"{query.shape[0]} rows of {query.shape[2]} columns, lengths {tuple(sequence_lengths)[:8]}",
            expected="one row, and lengths that add up to it",
            fix="Set batch.layout=padded: this model does not hand keywords through to its attention.",
        )
    kind = AttentionKind(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout,
        None if sliding_window is None else sliding_window - 1,
        s_aux,
    )
    query_TND, key_TGD, value_TGD = (values[0].transpose(0, 1) for values in (query, key, value))
    return attend_within(query_TND, key_TGD, value_TGD, sequence_lengths, kind)[None], None
