"""Bytes of routes and sampling masks per token, on the wire, in the controller and at rest."""

from __future__ import annotations

from collections.abc import Mapping
from math import comb
from typing import Any

from moe_trm.models.hf_config import moe_layers, num_experts
from moe_trm.tools.plan.figures import Figure

ENVELOPE = 86 / 81.1
"""JSON of an answer over the base64 of its routes: 86 MB for 81.1 MB (benchmarks/RESULTS.md, memory of routes)."""


def route_bytes(hf: Mapping[str, Any]) -> dict[str, Figure]:
    """Bytes per token: `json` from the engine, `wire` between controller and ranks and in the store, `bundle` at rest.

    SGLang sends int32 ids in base64. The controller keeps an id in one byte, or two beyond 256 experts. At rest a set
    is its rank among all sets (docs/routes.md). A dense model has none.
    """
    layers, experts = len(moe_layers(hf)), num_experts(hf)
    if not layers:
        return {}
    sets = layers * int(hf["num_experts_per_tok"])
    return {
        "json": Figure(sets * 4 * 4 / 3 * ENVELOPE, "measured", "int32 in base64, with the answer's JSON"),
        "wire": Figure(sets * (1 if experts <= 256 else 2), "given", "engine order"),
        "bundle": Figure(layers * rank_bits(experts, int(hf["num_experts_per_tok"])) / 8, "given", "sets"),
    }


def rank_bits(experts: int, top_k: int) -> int:
    """Bits of one set, as `routing.record.combinations.rank_bits`, which needs torch to be imported."""
    return max(1, (comb(experts, top_k) - 1).bit_length())


def mask_bytes(kept_ids: float) -> dict[str, Figure]:
    """Bytes per sampled token: `wire` of int32 ids, float32 log-probs and an int64 offset; `bundle` as measured.

    `kept_ids`: mean ids of a mask.
    """
    return {
        "wire": Figure(8 * kept_ids + 8, "assumed", "--kept-ids"),
        "bundle": Figure(5.72, "measured", "quickstart, 3.3 ids in the mean"),
    }
