"""The model classes of transformers, whose import needs torchvision to import first."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def qwen3_moe() -> tuple[type[Qwen3MoeConfig], type[Qwen3MoeForCausalLM]]:
    """Configuration and model class.

    With a CPU build of torch, torchvision's ordinary wheel cannot be imported until its operators are declared. The CPU
    support package declares them, and does nothing where the real operators load.
    """
    if find_spec("moe_trm_sglang_cpu") is not None:
        from moe_trm_sglang_cpu.torchvision_ops import install

        install()
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeConfig, Qwen3MoeForCausalLM
