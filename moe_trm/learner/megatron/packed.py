"""Packs in Megatron-Core: its own description of one, and the layers that can be forwarded on them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from moe_trm.errors import ConfigError
from moe_trm.learner.megatron.layers import Layers
from moe_trm.models.registry import family_of
from routing.layout.packed import AnyLayout, PackedLayout

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def packed_parameters(layout: AnyLayout, device: torch.device, *, latent: bool) -> PackedSeqParams | None:
    """The starts of a pack's sequences, for Megatron's rotary embedding and attention; None for padded rows.

    The layers of a CPU get the lengths of the sequences, and no starts: `PolicyModel` gives them the rotary angles of
    every column. Layers with latent attention make these angles themselves, from the starts.

    Alignment columns belong to the sequence before them, as far as attention is concerned: causal attention keeps them
    from every token, and kernels need no gaps between sequences.
    """
    if not isinstance(layout, PackedLayout):
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = max(layout.sequences)
    if device.type == "cpu" and not latent:
        from moe_trm.learner.megatron.cpu_attention import PlainPack

        return PlainPack(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, lengths=layout.sequences)
    starts = torch.tensor([0, *accumulate(layout.sequences)], dtype=torch.int32).to(device, non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def check_packed(layers: Layers, hf_config: Mapping[str, Any]) -> None:
    """Refuse packs where this machine's layers have no attention for them, or none that was ever proved.

    Raises `ConfigError` for Megatron's local layers on CUDA, and for an unusual attention in Transformer Engine's.
    """
    family = family_of(hf_config, "config.json")
    reason = ""
    if layers == "local":
        reason = "Megatron's layers without Transformer Engine have no attention that keeps packed sequences apart"
    elif layers == "transformer_engine" and "latent" in family.attention_kinds(hf_config):
        reason = "latent attention over packs has not been proved with Transformer Engine"
    elif layers == "transformer_engine" and family.sinks:
        reason = "attention with sinks over packs has not been proved with Transformer Engine"
    if reason:
        raise ConfigError(
            reason,
            where="batch.layout",
            got="packed",
            expected="padded",
            fix="Set batch.layout=padded" + (", or install Transformer Engine." if layers == "local" else "."),
        )
