"""Replay on an unpatched Hugging Face model with more experts than a byte can name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from routing import RouteRecord, sample_origin, token_digest
from routing.errors import RouteError
from routing.hf import HFReplayer, moe_blocks
from routing.record.sources import Record, ReplayRecorded, ReplayRecords
from tests.integration.rows import Rows

R, K, LAYERS = 6, 2, (0, 1)
ORIGINS = tuple(sample_origin(number, np.zeros(3, np.int64)) for number in range(2))


def build(experts: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=K,
        norm_topk_prob=True,
        max_position_embeddings=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    return Qwen3MoeForCausalLM(config).eval()


def batch() -> Rows:
    tokens = torch.randint(3, 32, (1, R + 1), generator=torch.Generator().manual_seed(0)).expand(2, -1)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "target_ids": tokens[:, 1:].contiguous(),
        "valid": torch.ones(2, R, dtype=torch.bool),
    }


def source(experts: int, data: Rows) -> tuple[ReplayRecords, np.ndarray]:
    """Records of two samples with the same tokens. In one the ids of a row differ by 256; in the other they are any."""
    rng = np.random.default_rng(0)
    low = rng.integers(0, experts - 256, (R, len(LAYERS), 1))
    any_ids = np.argsort(rng.random((R, len(LAYERS), experts)), axis=-1)[..., :K]
    ids = np.stack([np.concatenate([low, low + 256], axis=-1), any_ids]).astype(np.uint16)
    assert (ids[1] > 255).any()
    tokens = np.append(data["input_ids"][0].numpy(), data["target_ids"][0, -1].item())
    records = [RouteRecord(ids[row], LAYERS, experts, token_digest(tokens)) for row in range(2)]
    bound = tuple(record.bind(tokens, origin) for record, origin in zip(records, ORIGINS, strict=True))
    return ReplayRecords(bound, ORIGINS), ids


@pytest.mark.parametrize("experts", [384, 512])
def test_ids_above_255_reach_the_experts_as_they_are(experts: int) -> None:
    model, data = build(experts), batch()
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    given: dict[int, Tensor] = {}
    for layer, block in moe_blocks(model).items():
        block.experts.register_forward_pre_hook(
            lambda _module, args, kept=layer: given.__setitem__(kept, args[1].clone())
        )
    records, ids = source(experts, data)
    with torch.no_grad(), replayer.use(records, **data):
        model(input_ids=data["input_ids"], use_cache=False)
    report = replayer.report()
    assert report.applied_fraction == 1.0
    assert report.replayed == 2 * R * len(LAYERS)
    for column, layer in enumerate(LAYERS):
        assert given[layer].view(2, R, K).tolist() == ids[:, :, column].tolist()

    # R2: what was recorded is replayed as it was.
    with torch.no_grad(), replayer.use(Record(), **data) as running:
        first = model(input_ids=data["input_ids"], use_cache=False).logits
    recorded = running.recorded()
    assert max(int(chosen.max()) for chosen in recorded.experts.values()) > 255
    with torch.no_grad(), replayer.use(ReplayRecorded(recorded), **data):
        assert torch.equal(model(input_ids=data["input_ids"], use_cache=False).logits, first)
    assert replayer.report().local_flips == 0


def test_routes_of_samples_with_the_same_tokens_cannot_be_exchanged() -> None:
    model, data = build(384), batch()
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    records, _ = source(384, data)
    with (
        pytest.raises(RouteError, match="another sample"),
        replayer.use(ReplayRecords(records.records[::-1], ORIGINS), **data),
    ):
        model(input_ids=data["input_ids"], use_cache=False)
