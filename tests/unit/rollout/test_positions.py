"""Samples of models with sparse attention are admitted with the positions of all of their tokens, or rejected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_trm.errors import RecordRejected
from moe_trm.models.registry import indexer_layers
from moe_trm.rollout.turn import recorded_positions
from moe_trm.types import RolloutRecord
from routing.indexer.record import IndexerRecord
from tests.unit.recording.test_bundle import record

LAYERS, K = (0, 1), 2


def sample() -> RolloutRecord:
    found = record(2)
    rows = found.num_tokens - 1
    assert found.routes is not None
    sets = {layer: np.array([[0, row] for row in range(K, rows)]).reshape(-1, K) for layer in LAYERS}
    return replace(found, routes=replace(found.routes, indexer=IndexerRecord.of(rows, K, sets)))


def test_a_sample_with_positions_is_admitted() -> None:
    recorded_positions(sample(), LAYERS, K)


def test_others_are_rejected_and_counted() -> None:
    whole = sample()
    assert whole.routes is not None
    partly = whole.routes.uncover(slice(0, 1))
    for routes in (None, replace(whole.routes, indexer=None), partly):
        with pytest.raises(RecordRejected, match="lacks positions") as error:
            recorded_positions(replace(whole, routes=routes), LAYERS, K)
        assert error.value.reason == "route_positions"
    for layers, top_k in (((0, 1, 2), K), (LAYERS, K + 1)):
        with pytest.raises(RecordRejected, match="lacks positions"):
            recorded_positions(whole, layers, top_k)


@pytest.mark.parametrize(
    ("hf", "layers"),
    [
        ({"architectures": ["DeepseekV32ForCausalLM"]}, (0, 1, 2, 3, 4)),
        ({"architectures": ["GlmMoeDsaForCausalLM"], "index_topk_freq": 2}, (0, 1, 3)),
        ({"architectures": ["GlmMoeDsaForCausalLM"], "index_topk_pattern": "FSFSS"}, (0, 2)),
        ({"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["full", *["shared"] * 4]}, (0,)),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, ()),
    ],
)
def test_layers_with_an_indexer_of_their_own(hf: dict[str, object], layers: tuple[int, ...]) -> None:
    """As transformers reads them; the others take the choice of the layer before."""
    from transformers import GlmMoeDsaConfig

    hf = {"num_hidden_layers": 5, "kv_lora_rank": 16, **hf}
    assert indexer_layers(hf) == layers
    if "Glm" in str(hf["architectures"]):
        options = {key: value for key, value in hf.items() if key.startswith("index")}
        kinds = GlmMoeDsaConfig(num_hidden_layers=5, **options).indexer_types
        assert tuple(layer for layer, kind in enumerate(kinds) if kind == "full") == layers
