"""Megabytes per second from the bytes of one engine answer to a validated record, in one process.

`python -m benchmarks.intake [--tokens N] [--repeats N] [--json FILE]` makes one answer of DeepSeek-V3, with 61 layers,
58 of them with 256 experts (8 per token), log-probs and routes. The parts are timed alone, too: the JSON scan, and
base64 by the standard library and by the vectorised one. A plain copy of the bytes shows what memory allows.
"""

from __future__ import annotations

import base64
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import orjson
import pybase64

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.parse import decode_answer, parse_turn

MODEL = ServedModel("DeepseekV3ForCausalLM", 129280, 61, tuple(range(3, 61)), 256, 8)
PROMPT_TOKENS = 512


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of prompt and answer (default: 32768)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each part (default: 5)")
    args = parser.parse_args(argv)
    report("One answer, medians of one process", measure(args.tokens, args.repeats), args.json)
    return 0


def measure(tokens: int, repeats: int) -> list[Row]:
    """One row per part: milliseconds, and megabytes of the answer per second."""
    context, body = list(range(PROMPT_TOKENS)), answer(PROMPT_TOKENS, tokens - PROMPT_TOKENS)
    routes: bytes = orjson.loads(body)["meta_info"]["routed_experts"].encode()
    requested = RequestedFields(routes=True, mask=False)
    parts: dict[str, Callable[[], object]] = {
        "bytes to a validated record": lambda: parse_turn(body, context, MODEL, requested),
        "JSON alone": lambda: decode_answer(body),
        "base64 alone, standard library": lambda: base64.b64decode(routes, validate=True),
        "base64 alone, vectorised": lambda: pybase64.b64decode(routes, validate=True),
        "a copy of the bytes": lambda: bytearray(body),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, part in parts.items():  # in turn: a neighbour slows all alike
            began = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - began)
    return [
        {"part": name, "ms": round(1e3 * median, 1), "mb_per_s": round(len(body) / 1e6 / median)}
        for name, median in ((name, statistics.median(values)) for name, values in seconds.items())
    ]


def answer(context: int, sampled: int) -> bytes:
    """One answer of DeepSeek-V3 to `context` ids, as SGLang sends it."""
    rng, rows = np.random.default_rng(0), context + sampled - 1
    output = rng.integers(0, MODEL.vocab_size, sampled).tolist()
    # Eight neighbours from a random first one on: distinct, and of every expert.
    first = rng.integers(0, MODEL.num_experts, (rows, MODEL.num_layers, 1), np.int32)
    experts = (first + np.arange(MODEL.top_k, dtype=np.int32)) % MODEL.num_experts
    meta = {
        "finish_reason": {"type": "stop", "message": ""},
        "prompt_tokens": context,
        "num_retractions": 0,
        "output_token_logprobs": [
            [-float(value), token, None] for value, token in zip(rng.random(sampled), output, strict=True)
        ],
        "weight_versions": [{"version": "0", "start": 0, "end": sampled}],
        "routed_experts": base64.b64encode(experts.tobytes()).decode(),
    }
    return orjson.dumps({"output_ids": output, "prompt_token_ids": list(range(context)), "meta_info": meta})


if __name__ == "__main__":
    sys.exit(main())
