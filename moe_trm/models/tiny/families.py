"""Tiny random checkpoints of every family with the character tokenizer, as ordinary Hugging Face folders.

The same seed gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_trm.models.registry import FAMILIES
from moe_trm.models.tiny.checkpoint import BOS, EOS, PAD, character_tokenizer, save

COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.2, "num_experts_per_tok": 2,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip


def tiny_family(name: str, seed: int = 0, **options: Any) -> Any:
    """A float32 model of the family `name` with random weights; `options` override its config.json.

    Router weights, selection biases and attention sinks that transformers leaves at zero are random, too: at zero every
    expert ties.
    """
    import transformers

    family = FAMILIES[name]
    prefix = family.architecture.removesuffix("ForCausalLM")
    kind = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    config = kind(**{**COMMON, **family.tiny, **options}, dtype="float32")
    return random_model(family.architecture, config, seed)


def random_model(architecture: str, config: Any, seed: int) -> Any:
    """transformers' model of this class and configuration with random weights; the same seed gives the same."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
        with torch.no_grad():
            for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor_name.endswith(("gate.weight", "router.weight", "sinks")):
                    tensor.normal_(std=0.2)
                elif tensor_name.endswith(("e_score_correction_bias", "proj.bias", "proj_bias", "router.bias")):
                    tensor.normal_(std=0.05)
                if tensor_name.endswith("sinks"):
                    # SGLang holds them in bfloat16 in every dtype, as published checkpoints do.
                    tensor.copy_(tensor.bfloat16())
    return model


def make_family(name: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    """Write `tiny_family(...)` with its tokenizer to `folder`, which is returned."""
    save(tiny_family(name, seed, **options), character_tokenizer(), folder)
    return folder
