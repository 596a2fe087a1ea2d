"""A tiny Qwen3-MoE checkpoint made by transformers, and micro-batches for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from moe_trm_sglang_cpu import torchvision_ops

from moe_trm.types import TokenBatch

VOCAB = 128


def make_checkpoint(folder: Path, **overrides: object) -> Path:
    """Random weights, with norms away from 1 so that a swapped norm shows."""
    torchvision_ops.install()
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, object] = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=256,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.0,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **overrides})).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def make_batch(seed: int, rows: int = 3, length: int = 12, *, keep_mask: bool = True, vocab: int = VOCAB) -> TokenBatch:
    """Random rows of random lengths; the last row is padding only. The policy sampled about half of the targets."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 2, length + 1, size=rows)
    lengths[0], lengths[-1] = length, 0
    valid = np.arange(length)[None] < lengths[:, None]
    mask = valid & (rng.random((rows, length)) < 0.5)
    target_ids = rng.integers(0, vocab, (rows, length))
    kept, offsets = [np.zeros(0, np.int64)], [0]
    for target in target_ids[mask]:
        others = rng.permutation(np.delete(np.arange(vocab), target))[: rng.integers(0, 9)]
        kept.append(rng.permutation(np.append(others, target)).astype(np.int64))
        offsets.append(offsets[-1] + len(kept[-1]))
    zeros = np.zeros((rows, length), np.float32)
    return TokenBatch(
        input_ids=torch.from_numpy(rng.integers(0, vocab, (rows, length))),
        target_ids=torch.from_numpy(target_ids),
        valid=torch.from_numpy(valid),
        mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(zeros),
        full_logprobs=torch.from_numpy(zeros),
        versions=torch.from_numpy(np.where(mask, 0, -1).astype(np.int32)),
        turn_ids=torch.from_numpy(np.zeros((rows, length), np.int16)),
        advantages=torch.from_numpy(np.where(mask, rng.normal(size=(rows, length)), 0).astype(np.float32)),
        routes=(None,) * rows,
        kept_ids=torch.from_numpy(np.concatenate(kept)) if keep_mask else None,
        kept_offsets=torch.tensor(offsets) if keep_mask else None,
    )
