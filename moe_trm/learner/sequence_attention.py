"""Causal attention inside each sequence of a pack, in plain torch. Nothing is as large as the pack squared.

Shape letters: T tokens of a pack, C columns that ask, S columns of a sequence that are seen, N query heads, G key/value
heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionKind:
    """What a layer's attention is besides causal.

    Attributes:
        scale: of the logits.
        dropout: of the weights; 0 outside of training.
        columns_before: how many columns before its own a token sees; None: all of them.
        sinks: `[N]` a learned logit for each head that takes part in the softmax and has no value; None: none.
    """

    scale: float
    dropout: float = 0.0
    columns_before: int | None = None
    sinks: Tensor | None = None


def attend_within(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, lengths: Sequence[int], kind: AttentionKind
) -> Tensor:
    """Attention of every token over its own sequence, `[T, N, D]`; values may have another D.

    Args:
        query_TND, key_TGD, value_TGD: of the pack.
        lengths: tokens of its sequences in order, T in all.
        kind: of the layer.
    """
    key_TND, value_TND = for_all_heads(query_TND.shape[1], key_TGD, value_TGD)
    # One split and one concatenation: slices would each have a gradient as long as the pack.
    parts = zip(*(values.split(list(lengths)) for values in (query_TND, key_TND, value_TND)), strict=True)
    return torch.cat([attend(query, key, value, kind) for query, key, value in parts])


def for_all_heads(heads: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[..., G, D]` repeated for all `heads` that share them, `[..., N, D]`."""
    if key.shape[-2] == heads:
        return key, value
    repeats = heads // key.shape[-2]
    return key.repeat_interleave(repeats, -2), value.repeat_interleave(repeats, -2)


def attend(
    query_CND: Tensor, key_SND: Tensor, value_SND: Tensor, kind: AttentionKind, before_CS: Tensor | None = None
) -> Tensor:
    """Attention over one sequence, `[C, N, D]`.

    Args:
        query_CND: of the columns that ask.
        key_SND, value_SND: of the whole sequence.
        kind: of the layer.
        before_CS: `[C, S]` int64, how many columns each seen one is before each that asks. None: these are the same
            columns in order.
    """
    query_NCD, key_NSD, value_NSD = (values.transpose(0, 1) for values in (query_CND, key_SND, value_SND))
    hidden_CS = _hidden(len(query_CND), before_CS, kind, query_CND.device)
    if kind.sinks is not None:
        context_NCD = _with_sinks(query_NCD, key_NSD, value_NSD, hidden_CS, kind, kind.sinks)
    else:
        context_NCD = F.scaled_dot_product_attention(
            query_NCD[None],
            key_NSD[None],
            value_NSD[None],
            attn_mask=None if hidden_CS is None else ~hidden_CS,
            dropout_p=kind.dropout,
            is_causal=hidden_CS is None,
            scale=kind.scale,
        )[0]
    return context_NCD.transpose(0, 1)


def _hidden(columns: int, before_CS: Tensor | None, kind: AttentionKind, device: torch.device) -> Tensor | None:
    """`[C, S]` bool, True where a column is not seen; None: just those behind, which torch's own kernel knows."""
    is_plain = kind.sinks is None and (kind.columns_before is None or columns <= kind.columns_before + 1)
    if before_CS is None:
        if is_plain:
            return None
        places = torch.arange(columns, device=device)
        before_CS = places[:, None] - places[None, :]
    hidden_CS = before_CS < 0
    return hidden_CS if kind.columns_before is None else hidden_CS | (before_CS > kind.columns_before)


def _with_sinks(
    query_NCD: Tensor,
    key_NSD: Tensor,
    value_NSD: Tensor,
    hidden_CS: Tensor | None,
    kind: AttentionKind,
    sinks_N: Tensor,
) -> Tensor:
    """`w_s = exp(q.k_s * scale) / (exp(sink) + sum_t exp(q.k_t * scale))`, the softmax in float32."""
    logits_NCS = (query_NCD @ key_NSD.mT * kind.scale).float()
    if hidden_CS is not None:
        logits_NCS = logits_NCS.masked_fill(hidden_CS, -torch.inf)
    sinks_NC1 = sinks_N.float()[:, None, None].expand(-1, query_NCD.shape[1], 1)
    weights_NCS = torch.cat([logits_NCS, sinks_NC1], -1).softmax(-1)[..., :-1].to(value_NSD.dtype)
    if kind.dropout:
        weights_NCS = torch.dropout(weights_NCS, kind.dropout, train=True)
    return weights_NCS @ value_NSD
