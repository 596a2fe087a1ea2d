"""Routes and sampling masks of one answer of vLLM: `python examples/vllm/decode.py examples/vllm/answer.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from moe_trm.sampling_mask.vllm import decode_mask
from routing import encode
from routing.vllm import decode_payload

NUM_LAYERS, LAYERS, EXPERTS, TOP_K, VOCAB = 3, (1, 2), 8, 2, 64
"""The model: decoder layers, the ones with experts (0-based), routed experts, experts of a token, ids."""


def decoded(answer: dict[str, Any]) -> dict[str, Any]:
    """Numbers to look at of the first choice."""
    choice = answer["choices"][0]
    sampled = np.asarray(choice["token_ids"])
    tokens = np.concatenate([answer["prompt_token_ids"], sampled])
    record = decode_payload(
        choice["routed_experts"],
        tokens=tokens,
        num_layers=NUM_LAYERS,
        layer_ids=LAYERS,
        num_experts=EXPERTS,
        top_k=TOP_K,
    )
    mask = decode_mask(choice["sampling_mask"], sampled_ids=sampled, vocab_size=VOCAB)
    return {
        "tokens": len(tokens),
        "routed": record.num_rows,
        "bytes_at_rest": len(encode(record, "set")),
        "first_experts": record.experts[0].tolist(),
        "could_choose_from": np.diff(mask.offsets).tolist(),
    }


if __name__ == "__main__":
    print(json.dumps(decoded(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
