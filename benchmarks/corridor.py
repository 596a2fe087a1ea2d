"""Cheap figures of the cost of data: ratios, bytes and counts, never seconds. CI holds them to their corridors.

`python -m benchmarks.corridor [--json FILE]` computes each figure of `benchmarks/corridor.toml` in a few seconds and
fails when one is outside of its range, missing, or no finite number.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.intake import MODEL, answer
from benchmarks.options import command_line
from benchmarks.peak import peak_bytes
from benchmarks.table import Row, report
from moe_trm.batch.collate import collate, forwarded_tokens
from moe_trm.batch.plan import plan_step
from moe_trm.config.engines import DEFAULT
from moe_trm.learner.checkpoint.pieces import whole, write_pieces
from moe_trm.rollout.servers.backend import backend_of
from moe_trm.rollout.servers.question import Question, RequestedFields
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.rollout.sglang.parse import decode_answer
from moe_trm.runtime import wire
from moe_trm.sync.disk import write_shard
from moe_trm.sync.rounding import Rounding
from moe_trm.types import Prompt, RolloutRecord, SamplingParams, TrainRow
from routing import encode

CORRIDOR = Path(__file__).with_suffix(".toml")
LARGE = ("megatron", "sglang", "transformers", "deepspeed", "vllm", "transformer_engine")
PROMPT = 16
READINGS = 5
"""Readings of an answer of which the one with the least memory counts."""
Figures = dict[str, float]
Corridors = Mapping[str, Mapping[str, Sequence[float]]]


def figures() -> dict[str, Figures]:
    """Every figure, by section."""
    return {
        "answer": of_answer(4096),
        "store": of_store(512),
        "batch": of_batch(256),
        "weights": of_weights(1 << 20),
        "imports": of_imports(),
    }


def outside(
    measurements: Mapping[str, Mapping[str, float]], corridor: Mapping[str, Mapping[str, Sequence[float]]]
) -> list[str]:
    """One line for each figure outside its corridor; empty when there is none."""
    wrong = []
    for section, name in sorted(
        {(section, name) for table in (measurements, corridor) for section, values in table.items() for name in values}
    ):
        value, limits = measurements.get(section, {}).get(name), corridor.get(section, {}).get(name)
        if limits is None:
            wrong.append(f"{section}.{name} has no corridor")
        elif value is None:
            wrong.append(f"{section}.{name} is missing")
        elif not math.isfinite(value) or not limits[0] <= value <= limits[1]:
            wrong.append(f"{section}.{name} is {value:.6g}, not in {limits[0]:g} to {limits[1]:g}")
    return wrong


def limits() -> Corridors:
    """The corridors as they are written down."""
    return tomllib.loads(CORRIDOR.read_text(encoding="utf-8"))


def of_answer(tokens: int) -> Figures:
    """From the bytes of an answer to its record."""
    body = answer(PROMPT, tokens - PROMPT)
    record = _read(body, 0)
    peak = min(peak_bytes(lambda: _read(body, 0)) for _ in range(READINGS))
    _, *buffers = wire.encode(record)
    routes = len(bytes(decode_answer(body).meta_info.routed_experts)) - 2
    return {
        "wire_bytes_per_token": len(body) / tokens,
        "wire_route_bytes_per_token": routes / (tokens - 1),
        "record_bytes_per_token": sum(len(buffer) for buffer in buffers) / tokens,
        "peak_bytes_per_body_byte": peak / len(body),
    }


def of_store(tokens: int) -> Figures:
    """Routes as bundles and messages of routes keep them."""
    record = _read(answer(PROMPT, tokens - PROMPT), 0)
    assert record.routes is not None
    return {
        "set_route_bytes_per_token": len(encode(record.routes, order="set")) / (tokens - 1),
        "engine_route_bytes_per_token": len(encode(record.routes, order="engine")) / (tokens - 1),
    }


def of_batch(num_rows: int) -> Figures:
    """Columns that the learner computes for each token that has to be forwarded."""
    lengths = np.random.default_rng(0).integers(16, 1025, num_rows)
    rows = [TrainRow(_bare(number, int(length))) for number, length in enumerate(lengths)]
    real = sum(forwarded_tokens(row.record) for row in rows)

    def columns(most_rows: int | None, most_tokens: int | None) -> float:
        plan = plan_step(
            rows,
            seed=0,
            step=1,
            minibatches=2,
            data_size=4,
            micro_batch_rows=most_rows,
            micro_batch_tokens=most_tokens,
        )
        micro = [micro for share in plan for mini in share for micro in mini.micro_batches]
        return sum(collate(batch, keep_mask=False).input_ids.numel() for batch in micro) / real

    return {
        "columns_per_token_by_rows": columns(8, None),
        "columns_per_token_by_tokens": columns(None, 8192),
    }


def of_weights(parameters: int) -> Figures:
    """Files of one push and of one checkpoint."""
    weight = torch.zeros(parameters // 1024, 1024)
    with tempfile.TemporaryDirectory() as folder:
        push, saved = Path(folder) / "push.safetensors", Path(folder) / "saved.safetensors"
        write_shard(push, [("weight", weight)], Rounding("bfloat16"))
        write_pieces(saved, [whole(name, weight) for name in ("weight", "exp_avg", "exp_avg_sq")])
        return {
            "push_bytes_per_parameter": push.stat().st_size / weight.numel(),
            "checkpoint_bytes_per_parameter": saved.stat().st_size / weight.numel(),
        }


def of_imports() -> Figures:
    """Modules that a learner rank imports before it does anything."""
    program = "import json, sys, launch.learner; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    packages = [name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])]
    return {
        "rank_own_modules": float(sum(package in ("moe_trm", "routing", "launch") for package in packages)),
        "rank_large_packages": float(len({*packages} & {*LARGE})),
    }


def _read(body: bytes, number: int) -> RolloutRecord:
    """The record of sample `number`."""
    prompt, params = Prompt("prompt", tuple(range(PROMPT))), SamplingParams(max_new_tokens=1 << 16)
    question = Question(prompt.token_ids, params, RequestedFields(routes=True, mask=False))
    conversation = Conversation(prompt)
    conversation.add(backend_of(DEFAULT).parse(body, question, MODEL))
    return conversation.record(sample_id=number, group_id=0, keep_changed=False)


def _bare(number: int, length: int) -> RolloutRecord:
    """A record of `length` tokens without routes."""
    zeros = np.zeros(length - 1, np.float32)
    return RolloutRecord(
        sample_id=number,
        group_id=number // 8,
        prompt_id="",
        tokens=np.zeros(length, np.int32),
        sampled=np.arange(length) > 0,
        turn_ids=np.zeros(length, np.int16),
        rollout_logprobs=zeros,
        full_logprobs=zeros,
        versions=np.zeros(length - 1, np.int32),
        routes=None,
        sampling_mask=None,
        finish_reason="stop",
        reward=1.0,
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = command_line(__file__, __doc__).parse_args(argv)
    measurements, corridor = figures(), limits()
    rows: list[Row] = [
        {"figure": f"{section}.{name}", "value": value, "lowest": lowest, "highest": highest}
        for section, values in measurements.items()
        for name, value in values.items()
        for lowest, highest in [corridor.get(section, {}).get(name, (math.nan, math.nan))]
    ]
    report("What data costs", rows, options.json)
    wrong = outside(measurements, corridor)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
