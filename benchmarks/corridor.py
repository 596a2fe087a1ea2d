"""Cheap figures that say what data costs: ratios, bytes and counts, never seconds. CI holds them to their corridors.

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
from moe_trm.rollout.intake.messages import Parsed, WholeSample
from moe_trm.rollout.intake.reading import Reading, read
from moe_trm.rollout.servers.backend import backend_of
from moe_trm.rollout.servers.question import Question, RequestedFields
from moe_trm.rollout.sglang.parse import decode_answer
from moe_trm.runtime import wire
from moe_trm.runtime.child_messages import Done, pack
from moe_trm.runtime.shared_blocks import BlockWriter, PlaceReader, SharedFile, place_of
from moe_trm.sync.disk import write_shard
from moe_trm.sync.rounding import Rounding
from moe_trm.types import MicroBatch, MiniBatch, RolloutRecord, SamplingParams, TrainBatch, TrainRow
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
        "rank": of_rank(8, 512),
        "store": of_store(512),
        "batch": of_batch(256),
        "weights": of_weights(1 << 20),
        "imports": of_imports(),
    }


def outside(
    found: Mapping[str, Mapping[str, float]], corridor: Mapping[str, Mapping[str, Sequence[float]]]
) -> list[str]:
    """One line for each figure that is not where it must be; empty when all are."""
    wrong = []
    for section, name in sorted(
        {(section, name) for table in (found, corridor) for section, values in table.items() for name in values}
    ):
        value, limits = found.get(section, {}).get(name), corridor.get(section, {}).get(name)
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
    """From the bytes of an answer to its record in shared memory, and what the controller is told."""
    body = answer(PROMPT, tokens - PROMPT)
    reading = _read(body, 0)
    peak = min(peak_bytes(lambda: _read(body, 0)) for _ in range(READINGS))
    head, *buffers = wire.encode(reading.value)
    file = SharedFile()
    block = BlockWriter(file.descriptor).write(buffers)
    size = sum(len(buffer) for buffer in buffers)
    message = pack(Done(1, Parsed(bytes(head), block, whole=True, retracted=False)))
    routes = len(bytes(decode_answer(body).meta_info.routed_experts)) - 2
    return {
        "wire_bytes_per_token": len(body) / tokens,
        "wire_route_bytes_per_token": routes / (tokens - 1),
        "record_bytes_per_token": size / tokens,
        "peak_bytes_per_body_byte": peak / len(body),
        "shared_bytes_per_record_byte": file.used_bytes / size,
        "message_bytes": float(len(message)),
    }


def of_rank(rows: int, tokens: int) -> Figures:
    """A share of a step, as the controller lends it and a rank copies it."""
    file = SharedFile()
    writer, records, held = BlockWriter(file.descriptor), [], 0
    for number in range(rows):
        head, *buffers = wire.encode(_read(answer(PROMPT, tokens - PROMPT), number).value)
        records.append(wire.decode([head, *file.open(writer.write(buffers))], RolloutRecord))
        held += sum(len(buffer) for buffer in buffers)
    micro = MicroBatch(tuple(TrainRow(record) for record in records))
    batch = TrainBatch(1, (MiniBatch((micro,), rows, rows * tokens),), {}, (0,))
    frames = wire.encode(batch, place_of)
    with PlaceReader() as places:
        wire.decode(frames, TrainBatch, places)
    return {
        "frames": float(len(frames)),
        "message_bytes_per_row": sum(len(frame) for frame in frames) / rows,
        "copied_bytes_per_record_byte": places.num_bytes / held,
    }


def of_store(tokens: int) -> Figures:
    """Routes as bundles and messages of routes keep them."""
    record = _read(answer(PROMPT, tokens - PROMPT), 0).value
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
    """Modules that an intake process and a learner rank import before they do anything."""
    found: Figures = {}
    for name, module in (("intake", "moe_trm.rollout.intake.worker"), ("rank", "launch.learner")):
        program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        modules = json.loads(done.stdout.splitlines()[-1])
        own = [one for one in modules if one.split(".")[0] in ("moe_trm", "routing", "launch")]
        found[f"{name}_own_modules"] = float(len(own))
        found[f"{name}_large_packages"] = float(len({one.split(".")[0] for one in modules} & {*LARGE}))
    return found


def _read(body: bytes, number: int) -> Reading:
    """The record of sample `number`."""
    params = SamplingParams(max_new_tokens=1 << 16)
    question = Question(tuple(range(PROMPT)), params, RequestedFields(routes=True, mask=False))
    return read(body, question, WholeSample(number, 0, "prompt", keep_changed=False), MODEL, None, backend_of(DEFAULT))


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
    found, corridor = figures(), limits()
    rows: list[Row] = [
        {"figure": f"{section}.{name}", "value": value, "lowest": lowest, "highest": highest}
        for section, values in found.items()
        for name, value in values.items()
        for lowest, highest in [corridor.get(section, {}).get(name, (math.nan, math.nan))]
    ]
    report("What data costs", rows, options.json)
    wrong = outside(found, corridor)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
