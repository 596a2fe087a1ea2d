"""Packs in models of transformers: attention, and layers with a state, that keep their sequences apart.

It is named through transformers' own `AttentionInterface`, and told of the sequences by a keyword that the models hand
through to it. So no mask of the whole pack is made, and models whose masks would let sequences see each other
(gpt-oss of transformers 5.19) are right too.

Layers with the gated delta rule have no such interface. Their convolution and their state would go on from one
sequence into the next. So they are called with the sequences as rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_trm.errors import LearnerError
from moe_trm.learner.sequence_attention import AttentionKind, attend_within, calls

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


def keep_states_apart(causal: Any) -> None:
    """Give every layer with a state the sequences of a pack as rows of their own."""
    for layer in causal.base_model.layers:
        if (module := getattr(layer, "linear_attn", None)) is not None:
            module.forward = partial(_by_sequence, module.forward)


def _by_sequence(
    forward: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    cache_params: None = None,
    attention_mask: None = None,
    sequence_lengths: Sequence[int] = (),
    **options: Any,
) -> Tensor:
    """`[1, T, H]` of a pack -> `[1, T, H]`. Rows are padded on the right, which no token of theirs looks at."""
    if sum(sequence_lengths) != hidden_states.shape[1] or cache_params is not None or attention_mask is not None:
        raise LearnerError(
            "a layer with a state was not told of the sequences of a pack",
            where="linear_attn",
            got=f"{hidden_states.shape[1]} columns, lengths {tuple(sequence_lengths)[:8]}",
            expected="lengths that add up to them, no mask and no cache",
            fix="Set batch.layout=padded.",
        )
    shapes, tokens_P, places_T = calls(tuple(sequence_lengths))
    tokens_P, places_T = (index.to(hidden_states.device) for index in (tokens_P, places_T))
    sizes = [rows * columns for rows, columns in shapes]
    parts = hidden_states[0].index_select(0, tokens_P).split_with_sizes(sizes)
    outputs = [
        forward(hidden_states=part.view(*shape, -1), **options).flatten(0, 1)
        for part, shape in zip(parts, shapes, strict=True)
    ]
    return torch.cat(outputs).index_select(0, places_T)[None]
