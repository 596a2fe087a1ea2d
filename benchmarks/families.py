"""Tiny random checkpoints of the families that Hugging Face replay covers, with the quickstart's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moe_trm.quickstart.checkpoint import BOS, EOS, PAD, character_tokenizer, make_checkpoint, save
from moe_trm.quickstart.hf import qwen3_moe

COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.2, "num_experts_per_tok": 2,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False,
}  # fmt: skip


def olmoe(folder: Path) -> Path:
    """OLMoE: 16 experts, no normalisation of gate weights, norms of queries and keys."""
    qwen3_moe()  # the model classes can be imported
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return _save(OlmoeForCausalLM, OlmoeConfig, {"num_experts": 16, "norm_topk_prob": False}, folder)


def mixtral(folder: Path) -> Path:
    """Mixtral: 8 experts, always normalised."""
    qwen3_moe()
    from transformers import MixtralConfig, MixtralForCausalLM

    return _save(MixtralForCausalLM, MixtralConfig, {"num_local_experts": 8}, folder)


def qwen3(folder: Path) -> Path:
    """The quickstart's shape with random weights."""
    make_checkpoint(folder)
    return folder


FAMILIES: Mapping[str, Callable[[Path], Path]] = {"olmoe": olmoe, "mixtral": mixtral, "qwen3_moe": qwen3}


def _save(model: Any, config: Any, options: Mapping[str, Any], folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model(config(**(COMMON | dict(options)), dtype="float32"))
    save(made, character_tokenizer(), folder)
    return folder
