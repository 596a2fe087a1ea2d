"""Layers of Megatron-Core that are not given any packs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_trm.errors import ConfigError
from moe_trm.learner.megatron.layers import Layers
from moe_trm.learner.megatron.packed import check_packed

MODELS = Path(__file__).parents[3] / "moe_trm" / "models" / "published"


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
