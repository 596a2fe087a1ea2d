"""Sizes of Nemotron-H (Nemotron-3): layers of one part each, Mamba-2, attention, a dense one or experts.

Learners take it by proof (`routing.hf`), so nothing is converted by these names. They are the general ones, where the
checkpoint has `mixer` for every part. Experts have two matrices, and work on `moe_latent_size` columns where
config.json has it. Source: `NemotronHForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_trm.models.family import GATE, GATE_BIAS, Attention, Family, HfConfig, Layer, Link
from moe_trm.models.hf_config import layer_pattern

_MAMBA, _ATTENTION, _DENSE = ("M", "mamba", "linear_attention"), ("*", "attention", "full_attention"), ("-", "mlp")


def _links(stem: str, names: tuple[str, ...]) -> dict[str, Link]:
    return {f"{stem}.{name}": Link((f"{stem}.{name}",)) for name in names}


_NORM = {"input_layernorm.weight": Link(("input_layernorm.weight",))}
_MIXER = _links("mamba", ("in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight"))
_HEADS = _links("self_attn", tuple(f"{x}_proj.weight" for x in "qkvo"))
_MATRICES = ("up_proj.weight", "down_proj.weight")


def _kind(hf: HfConfig, index: int) -> str:
    pattern = layer_pattern(hf)
    if index >= len(pattern):
        raise KeyError("hybrid_override_pattern")
    return pattern[index]


def _attention(hf: HfConfig, index: int) -> Attention:
    kind = _kind(hf, index)
    if kind in _MAMBA:
        return Attention("mamba", _NORM | _MIXER | (_links("mamba", ("conv1d.bias",)) if _conv_bias(hf) else {}))
    return Attention("full", _NORM | _HEADS) if kind in _ATTENTION else Attention("none", _NORM)


def _conv_bias(hf: HfConfig) -> bool:
    return bool(hf.get("use_conv_bias", True))


def _router(hf: HfConfig) -> Mapping[str, Link]:
    latent = ("fc1_latent_proj.weight", "fc2_latent_proj.weight") if hf.get("moe_latent_size") else ()
    return {**GATE, **GATE_BIAS, **_links("mlp.shared_experts", _MATRICES), **_links("mlp", latent)}


class _OnePart(Family):
    def layer(self, hf: HfConfig, index: int) -> Layer:
        """Decoder layer `index`: attention or a state, or a feed-forward part, never both."""
        layer = super().layer(hf, index)
        if layer.feed_forward == "experts":
            return layer
        tensors = self.attention(hf, index).tensors
        if _kind(hf, index) in _DENSE:
            return replace(layer, tensors={**tensors, **_links("mlp", _MATRICES)})
        return replace(layer, feed_forward="none", tensors=tensors)


def mamba_elements(owner: str, hf: Mapping[str, Any]) -> int:
    """Elements of a tensor of the Mamba-2 part."""
    heads, groups, state = int(hf["mamba_num_heads"]), int(hf["n_groups"]), int(hf["ssm_state_size"])
    inner, hidden = heads * int(hf["mamba_head_dim"]), int(hf["hidden_size"])
    convolved = inner + 2 * groups * state
    return {
        "in_proj.weight": hidden * (inner + convolved + heads),
        "conv1d.weight": convolved * int(hf["conv_kernel"]),
        "conv1d.bias": convolved,
        "norm.weight": inner,
        "out_proj.weight": inner * hidden,
        "dt_bias": heads,
        "A_log": heads,
        "D": heads,
    }[owner]


NEMOTRON_H = _OnePart(
    "nemotron_h",
    "NemotronHForCausalLM",
    _attention,
    router=_router,
    expert=lambda number: _links(f"mlp.experts.{number}", _MATRICES),
    not_in_megatron="Mamba-2 layers, which only transformers computes here",
)
