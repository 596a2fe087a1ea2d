"""Tiny Qwen3-MoE and Qwen3 checkpoints made by transformers, and micro-batches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_trm.types import TokenBatch
from routing import RouteRecord, expert_dtype, token_digest
from routing.indexer.record import IndexerRecord

VOCAB = 128
EXPERTS, TOP_K = 8, 2
INDEX_TOP_K = 8
"""Positions that an indexer of sparse attention chooses."""
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    # An id that the global work has: its embedding is zero, and transformers gives it no gradient.
    "pad_token_id": 37,
}


def make_checkpoint(folder: Path, **overrides: object) -> Path:
    """Random weights, with norms away from 1 so that a swapped norm shows."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    moe = {"moe_intermediate_size": 32, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**{**SHAPE, **moe, "norm_topk_prob": True, "router_aux_loss_coef": 0.0, **overrides})
    return save_model(Qwen3MoeForCausalLM, config, folder)


def make_dense_checkpoint(folder: Path) -> Path:
    """A Qwen3 model without experts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return save_model(Qwen3ForCausalLM, Qwen3Config(**SHAPE), folder)


def save_model(model_class: Any, config: Any, folder: Path) -> Path:
    """A checkpoint with random weights, also of norms and of experts' selection biases."""
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A large constant in every hidden state would make routers choose the same for every token.
            if parameter.dim() == 1:
                parameter.uniform_(*((-0.1, 0.1) if name.endswith("bias") else (0.5, 1.5)))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    model.save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> Any:
    """The checkpoint as transformers runs it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


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
    support = np.log(np.concatenate([np.zeros(0), *(rng.dirichlet(np.ones(n)) for n in np.diff(offsets))]))
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
        kept_logprobs=torch.from_numpy(support.astype(np.float32)) if keep_mask else None,
    )


def random_routes(
    batch: TokenBatch, layer_ids: tuple[int, ...], seed: int, indexers: tuple[int, ...] = ()
) -> tuple[RouteRecord | None, ...]:
    """Valid routes that no router chose, one record per row, none for padding rows.

    With `indexers`, layers that have one, also positions that none chose.
    """
    rng = np.random.default_rng(seed)
    records: list[RouteRecord | None] = []
    for inputs, targets, valid in zip(batch.input_ids, batch.target_ids, batch.valid, strict=True):
        rows = int(valid.sum())
        if rows == 0:
            records.append(None)
            continue
        experts = rng.permuted(np.broadcast_to(np.arange(EXPERTS), (rows, len(layer_ids), EXPERTS)), axis=-1)[
            ..., :TOP_K
        ]
        tokens = np.append(inputs[:rows].numpy(), targets[rows - 1].item())
        sets = IndexerRecord.of(rows, INDEX_TOP_K, {layer: random_positions(rows, rng) for layer in indexers})
        ids, digest = experts.astype(expert_dtype(EXPERTS)), token_digest(tokens)
        records.append(RouteRecord(ids, layer_ids, EXPERTS, digest, indexer=sets if indexers else None))
    return tuple(records)


def random_positions(rows: int, rng: np.random.Generator) -> np.ndarray:
    """`[M, K]` positions of the rows that see more than K."""
    found = [rng.permutation(row + 1)[:INDEX_TOP_K] for row in range(INDEX_TOP_K, rows)]
    return np.array(found, np.int64).reshape(-1, INDEX_TOP_K)
