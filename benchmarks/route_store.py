"""Codecs of routes: size against the information limit, speed, groups of samples, and decoding into a rank's tensor.

`python -m benchmarks.route_store --json FILE`. Speeds are MB/s of raw one- or two-byte ids, by CPU time of this process
(medians). The wall time beside it shows the effect of other load. Routes are random legal ones; the set codec's size
does not depend on them. `benchmarks.route_memory` measures memory.

Shape letters: T tokens, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb, log2
from statistics import median

import numpy as np
import torch

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.rollout.sglang.parse import decode_answer
from routing import Layout, RouteRecord, decode, encode, expert_dtype
from routing.record.groups import encode_group
from routing.replay.cut import by_layer, first_cut, stacked_routes
from routing.sglang import decode_payload

MB = 1e6


@dataclass(frozen=True)
class Model:
    """Sizes of a published model: MoE layers, experts per token, experts."""

    layers: int
    top_k: int
    experts: int


MODELS = {
    "Qwen3-30B-A3B": Model(48, 8, 128),
    "DeepSeek-V3": Model(58, 8, 256),
    "OLMoE": Model(16, 8, 64),
    "gpt-oss": Model(36, 4, 128),
    "Qwen3-Next": Model(48, 10, 512),
}


def random_record(rows: int, model: Model, seed: int = 0) -> RouteRecord:
    """Uniform random sets in random order."""
    draw = np.random.default_rng(seed).random((rows, model.layers, model.experts), dtype=np.float32)
    experts = np.argpartition(draw, model.top_k, axis=-1)[..., : model.top_k]
    return RouteRecord(
        experts.astype(expert_dtype(model.experts)), tuple(range(model.layers)), model.experts, bytes(16)
    )


def seconds(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median CPU and wall seconds of one call."""
    taken = []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        taken.append((time.process_time() - cpu, time.perf_counter() - wall))
    return median(cpu for cpu, _ in taken), median(wall for _, wall in taken)


def codec_row(name: str, model: Model, rows: int, repeats: int) -> Row:
    record = random_record(rows, model)
    wire, stored = encode(record), encode(record, "set")
    raw, limit = record.experts.nbytes, model.layers * log2(comb(model.experts, model.top_k)) / 8
    encoding, decoding = seconds(lambda: encode(record), repeats), seconds(lambda: decode(wire), repeats)
    return {
        "model": name,
        "int32": 4 * model.layers * model.top_k,
        "wire": len(wire) / rows,
        "set": len(stored) / rows,
        "limit": limit,
        "set/limit": len(stored) / rows / limit,
        "enc MB/s": raw / MB / encoding[0],
        "dec MB/s": raw / MB / decoding[0],
        "enc wall": raw / MB / encoding[1],
        "dec wall": raw / MB / decoding[1],
        "set enc": raw / MB / seconds(lambda: encode(record, "set"), 3)[0],
        "set dec": raw / MB / seconds(lambda: decode(stored), 3)[0],
    }


def group_row(name: str, model: Model, prompt: int, answer: int, samples: int = 8) -> Row:
    """`samples` answers to one prompt, whose rows the engine took from its prefix cache."""
    shared = random_record(prompt, model)
    records = [
        replace(shared, experts=np.concatenate([shared.experts, random_record(answer, model, seed).experts]))
        for seed in range(1, samples + 1)
    ]
    separate_bytes, group_bytes = sum(len(encode(r, "set")) for r in records), len(encode_group(records, "set"))
    raw = sum(r.experts.nbytes for r in records)
    return {
        "model": name,
        "samples": samples,
        "prompt": prompt,
        "answer": answer,
        "alone MB": separate_bytes / MB,
        "group MB": group_bytes / MB,
        "saved": 1 - group_bytes / separate_bytes,
        "ideal": 1 - (prompt + samples * answer) / (samples * (prompt + answer)),
        "enc MB/s": raw / MB / seconds(lambda: encode_group(records), 3)[0],
    }


def arrival_row(name: str, model: Model, rows: int, repeats: int) -> Row:
    """From the JSON of one SGLang answer to the tensors `[N, K]` of a rank that holds every layer."""
    record = random_record(rows, model)
    payload = base64.b64encode(np.ascontiguousarray(record.experts, dtype="<i4").tobytes()).decode()
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 1, "routed_experts": payload}
    body = json.dumps({"output_ids": [0] * rows, "meta_info": meta}).encode()
    tokens = np.zeros(rows + 1, np.int32)

    def parse() -> object:
        return decode_answer(body).meta_info.routed_experts

    def narrow() -> RouteRecord:
        return decode_payload(
            payload,
            tokens=tokens,
            num_layers=model.layers,
            layer_ids=record.layer_ids,
            num_experts=model.experts,
            top_k=model.top_k,
        )

    wire = encode(record)
    stages = {
        "json": parse,
        "narrow": narrow,
        "encode": lambda: encode(record),
        "decode": lambda: decode(wire),
        "tensor": lambda: targets(record, Layout(1, rows), model),
    }
    taken = {f"{stage} s": seconds(call, repeats)[0] for stage, call in stages.items()}
    return {"model": name, "tokens": rows + 1, "answer MB": len(body) / MB, **taken, "total s": sum(taken.values())}


def targets(record: RouteRecord, layout: Layout, model: Model) -> object:
    """The first cut of one record, as tensors."""
    routes_SLK = stacked_routes([record], record.layer_ids, model.experts, model.top_k)
    return by_layer(first_cut(routes_SLK, np.array([len(routes_SLK)]), layout, model.experts), record.layer_ids)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument(
        "--rows", type=int, default=2048, help="rows of the codec and arrival measurements (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="repetitions per figure (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [codec_row(name, model, options.rows, options.repeats) for name, model in MODELS.items()]
    rows += [group_row(name, model, prompt=512, answer=256) for name, model in MODELS.items()]
    rows += [arrival_row(name, model, options.rows, 3) for name, model in MODELS.items()]
    report("Routes: bytes per token, speeds by CPU time, groups, arrival", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
