"""Packs in Megatron's own words, and the layers that are not given any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_trm.errors import ConfigError
from moe_trm.learner.megatron.layers import Layers
from moe_trm.learner.megatron.packed import check_packed, packed_parameters
from routing.layout import Layout
from routing.packed_layout import PackedLayout

MODELS = Path(__file__).parents[2] / "data" / "models"
CPU = torch.device("cpu")


def test_sequences_begin_where_the_layout_puts_them() -> None:
    found = packed_parameters(PackedLayout((3, 0, 5), 5), CPU)
    assert found is not None
    assert found.qkv_format == "thd"
    assert found.cu_seqlens_q.tolist() == found.cu_seqlens_kv_padded.tolist() == [0, 3, 8]
    assert found.cu_seqlens_q.dtype == torch.int32
    assert found.max_seqlen_q == found.max_seqlen_kv == 5
    shared = packed_parameters(PackedLayout((3, 0, 5), 5, 2, 1), CPU)
    assert shared is not None
    assert shared.cu_seqlens_q.tolist() == [0, 4, 12]
    assert packed_parameters(Layout(2, 4), CPU) is None


def test_a_pack_without_tokens_is_one_sequence() -> None:
    found = packed_parameters(PackedLayout((0, 0), 5), CPU)
    assert found is not None
    assert found.cu_seqlens_q.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("layers", "family", "reason"),
    [
        ("local", "qwen3_30b_a3b", "without Transformer Engine"),
        ("transformer_engine", "deepseek_v3", "latent attention"),
        ("transformer_engine", "gpt_oss_20b", "sinks"),
        ("transformer_engine", "qwen3_30b_a3b", ""),
        ("cpu", "deepseek_v3", ""),
        ("cpu", "gpt_oss_20b", ""),
    ],
)
def test_layers_without_a_proved_attention_over_packs_are_refused(layers: Layers, family: str, reason: str) -> None:
    hf: dict[str, Any] = json.loads((MODELS / f"{family}.json").read_text())
    if not reason:
        check_packed(layers, hf)
        return
    with pytest.raises(ConfigError, match=reason):
        check_packed(layers, hf)
