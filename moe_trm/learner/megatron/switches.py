"""Switches that make a step on Megatron-Core faster: those that are on here, and why the others are off.

`transformer_config` and `wrap_model` set them. Imports no Megatron-Core.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_trm.learner.megatron.layers import Layers

_UNPROVED = "has not run on a GPU together with replay"


@dataclass(frozen=True)
class Switch:
    """One switch.

    Attributes:
        name: as Megatron-Core's users call it.
        keys: Megatron-Core's settings.
        why_off: empty where it is on.
    """

    name: str
    keys: tuple[str, ...]
    why_off: str

    def __str__(self) -> str:
        return f"{self.name}: off, {self.why_off}" if self.why_off else f"{self.name}: on"


def switches(layers: Layers, *, packed: bool) -> list[Switch]:
    """The state of each switch with these layers."""
    fused = "" if layers == "transformer_engine" else "needs Transformer Engine's layers"
    unproved = fused or _UNPROVED
    return [
        Switch("grouped GEMM", ("moe_grouped_gemm",), fused),
        Switch("permute fusion", ("moe_permute_fusion",), unproved),
        Switch("fused SwiGLU", ("bias_activation_fusion",), unproved),
        Switch("fused rope", ("apply_rope_fusion",), unproved),
        Switch("gradient accumulation fusion", ("gradient_accumulation_fusion",), unproved),
        Switch(
            "overlapped gradient reduction",
            ("overlap_grad_reduce",),
            "gradients are kept from the optimizer until replay is proved",
        ),
        Switch(
            "overlapped parameter gathering",
            ("overlap_param_gather",),
            "pushes, anchors and snapshots read whole weights between steps",
        ),
        Switch("pinned snapshots", (), "torch pins up to twice their bytes, and the gain has not been measured"),
        Switch("packed rows", (), "" if packed else "batch.layout=padded"),
    ]
