"""Tiny random Qwen3-MoE checkpoints with their tokenizers, as ordinary Hugging Face folders.

The same seed gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny Qwen3-MoE model: every layer is a mixture of `experts` with `top_k` used per token."""

    vocab_size: int = 128
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 16
    top_k: int = 2
    expert_ffn: int = 64
    max_positions: int = 512


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one id per printable ASCII character and newline, after the four special ids.

    The beginning token is put in front of every text.
    """
    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {text: index for index, text in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A raw tokenizer with the four special ids as a Hugging Face one that puts the beginning token in front."""
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    pad, bos, eos, unk = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )


def tiny_model(seed: int, shape: TinyShape | None = None) -> Qwen3MoeForCausalLM:
    """A float32 model with random weights."""
    shape = shape or TinyShape()
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        moe_intermediate_size=shape.expert_ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.02,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config)


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config, weights (one tensor per expert and matrix) and tokenizer to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if bars:
            hf_logging.enable_progress_bar()


def make_checkpoint(folder: Path, seed: int = 0, shape: TinyShape | None = None) -> None:
    """A random model with the character tokenizer; `shape.vocab_size` must hold its 100 ids."""
    save(tiny_model(seed, shape), character_tokenizer(), folder)
