"""Packs against padded rows: columns computed for each real token, learner seconds per step, and memory of long packs.

`python -m benchmarks.packed_rows --json FILE`. The learner is the real one: one Megatron rank on the quickstart's
model, with random weights and random legal routes (R3). A step scores all micro-batches and makes the optimizer steps.
Steps on packs and on padded rows of the same samples alternate in one process; ratios are medians over pairs. Lengths
come from a quickstart step, or are log-normal with a median of 400 and a 99th percentile of 4,000 tokens. Memory is
what a process of its own needs at its peak for one forward and backward pass, above what it needed before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.options import command_line
from benchmarks.peak import forget_peak, status_bytes
from benchmarks.table import Row, report
from moe_trm.batch.collate import collate
from moe_trm.batch.plan import plan_metrics, plan_step
from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Scores
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from moe_trm.types import MiniBatch, RolloutRecord, TokenBatch, TrainRow
from routing import RouteRecord, token_digest
from routing.record.sources import ReplayRecords

if TYPE_CHECKING:
    from moe_trm.learner.megatron.learner import MegatronLearner

SHAPE = TinyShape(max_positions=32768)
PROMPT = 8
LAYOUTS = ("padded", "packed")
QUICKSTART = (
    "13 12 13 21 21 7 21 35 35 35 35 21 21 21 21 33 33 33 33 33 33 33 33 32 32 32 36 32 30 30 30 30 "
    "30 30 30 33 30 30 33 30 12 12 12 12 21 21 21 21 21 33 33 33 33 14 15 14 14 35 35 9 35 30 29 31"
)
"""Forwarded tokens of the samples of one rank in step 8 of a quickstart."""


def quickstart_lengths() -> list[int]:
    return [int(length) for length in QUICKSTART.split()]


def log_normal_lengths(count: int, seed: int = 0) -> list[int]:
    """Median 400, 99th percentile 4,000: sigma is `ln(10) / 2.326`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(400), np.log(10) / 2.326, count)
    return [int(length) for length in np.clip(drawn, PROMPT + 1, 16000)]


def rows_of(lengths: Sequence[int], seed: int = 0) -> list[TrainRow]:
    """Samples of so many forwarded tokens, with random tokens and legal routes."""
    rng = np.random.default_rng(seed)
    return [TrainRow(_record(rng, number, length + 1)) for number, length in enumerate(lengths)]


def _record(rng: np.random.Generator, number: int, tokens: int) -> RolloutRecord:
    ids = rng.integers(4, SHAPE.vocab_size, tokens).astype(np.int32)
    draws = rng.random((tokens - 1, SHAPE.layers, SHAPE.experts))
    experts = np.argsort(draws, axis=-1)[..., : SHAPE.top_k].astype(np.uint8)
    nothing = np.zeros(tokens - PROMPT, np.float32)
    record = RolloutRecord(
        sample_id=number,
        group_id=number // 8,
        prompt_id=str(number // 8),
        tokens=ids,
        sampled=np.arange(tokens) >= PROMPT,
        turn_ids=np.zeros(tokens, np.int16),
        rollout_logprobs=nothing,
        full_logprobs=nothing,
        versions=np.zeros(len(nothing), np.int32),
        routes=RouteRecord(experts, tuple(range(SHAPE.layers)), SHAPE.experts, token_digest(ids)),
        sampling_mask=None,
        finish_reason="stop",
        reward=0.0,
    )
    return record.bound()


def build(folder: Path) -> MegatronLearner:
    """The learner of one process."""
    from moe_trm.learner.megatron.build import build_megatron_learner

    make_checkpoint(folder, shape=SHAPE)
    return build_megatron_learner(
        Config.model_validate(
            {"model": {"checkpoint": str(folder)}, "replay": {"mode": "R3", "max_local_flip_rate": 1.0}}
        )
    )


def choose(learner: MegatronLearner, layout: str) -> None:
    """Let the same learner forward packs or padded rows."""
    from moe_trm.learner.megatron.parts import Parts

    learner._parts = learner._schedule._parts = Parts(packed=layout == "packed")


def step(learner: MegatronLearner, minis: Sequence[MiniBatch]) -> tuple[float, float]:
    """Seconds and CPU seconds of scoring and training the minibatches of a step."""
    started, cpu = time.perf_counter(), time.process_time()
    planned = [[collate(micro, keep_mask=False) for micro in mini.micro_batches] for mini in minis]
    for batches in planned:
        learner.score(batches, [sources(batch) for batch in batches])
    for mini, batches in zip(minis, planned, strict=True):
        learner.update(batches, [sources(batch) for batch in batches], objective(batches, mini.num_tokens))
    return time.perf_counter() - started, time.process_time() - cpu


def objective(batches: Sequence[TokenBatch], num_tokens: int) -> Callable[[int, Scores], Tensor]:
    """A plain policy gradient, divided by the tokens of the minibatch."""
    return lambda index, current: -current.logprobs.sum() / num_tokens


def sources(batch: TokenBatch) -> ReplayRecords:
    return ReplayRecords(batch.routes, batch.origins)


def measure(learner: MegatronLearner, name: str, lengths: list[int], repeats: int, budget: int | None) -> list[Row]:
    """One row for each layout: columns and seconds, and how much faster packs are."""
    rows, plans = rows_of(lengths), dict[str, list[MiniBatch]]()
    for layout in LAYOUTS:
        [plans[layout]] = plan_step(
            rows, seed=0, step=1, minibatches=2, data_size=1, micro_batch_tokens=budget, packed=layout == "packed"
        )
    seconds: dict[str, list[tuple[float, float]]] = {layout: [] for layout in LAYOUTS}
    for turn in range(repeats + 1):
        # Which side goes first alternates, so that a drift of the machine cancels.
        for layout in LAYOUTS if turn % 2 else LAYOUTS[::-1]:
            choose(learner, layout)
            taken = step(learner, plans[layout])
            if turn:
                seconds[layout].append(taken)
    pairs = list(zip(seconds["padded"], seconds["packed"], strict=True))
    table: list[Row] = []
    for layout in LAYOUTS:
        padding = plan_metrics([plans[layout]], packed=layout == "packed")["batch/padding_fraction"]
        table.append(
            {
                "lengths": name,
                "layout": layout,
                "samples": len(lengths),
                "tokens": sum(lengths),
                "columns / token": 1 / (1 - padding),
                "s": median(wall for wall, _ in seconds[layout]),
                "times faster": 1.0
                if layout == "padded"
                else median(padded[0] / packed[0] for padded, packed in pairs),
                "times faster, CPU": 1.0
                if layout == "padded"
                else median(padded[1] / packed[1] for padded, packed in pairs),
            }
        )
    return table


def lengths_of_pack(tokens: int) -> list[int]:
    """Log-normal samples of `tokens` tokens in all; the last one takes what is left."""
    lengths, remaining = [], tokens
    for length in log_normal_lengths(tokens):
        if remaining < 2 * length + 2 * PROMPT:
            break
        lengths.append(length)
        remaining -= length
    return [*lengths, remaining]


def memory(tokens: int) -> float:
    """MiB at the peak of one forward and backward pass of a pack of `tokens` tokens, above the memory before it."""
    lengths = lengths_of_pack(tokens)
    [[mini]] = plan_step(
        rows_of(lengths), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=len(lengths), packed=True
    )
    with tempfile.TemporaryDirectory() as folder:
        start()
        learner = build(Path(folder))
        choose(learner, "packed")
        [small] = plan_step(rows_of([64] * 4), seed=0, step=1, minibatches=1, data_size=1)
        step(learner, small)
        start_bytes = forget_peak()
        [batch] = [collate(micro, keep_mask=False) for micro in mini.micro_batches]
        learner.update([batch], [sources(batch)], objective([batch], mini.num_tokens))
        peak_bytes = status_bytes("VmHWM")
    dist.destroy_process_group()
    return (peak_bytes - start_bytes) / 2**20


def memories(lengths: Sequence[int]) -> list[Row]:
    """One row for each length of a pack, each measured in a process of its own."""
    rows: list[Row] = []
    for tokens in lengths:
        samples = lengths_of_pack(tokens)
        command = [sys.executable, "-m", "benchmarks.packed_rows", "--memory-of", str(tokens)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peak = float(done.stdout.split()[-1])
        rows.append(
            {
                "tokens of a pack": tokens,
                "samples": len(samples),
                "longest": max(samples),
                "padded columns": len(samples) * max(samples),
                "MiB": peak,
                "KiB / token": 1024 * peak / tokens,
            }
        )
    return rows


def start() -> None:
    """Megatron-Core on one rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    from moe_trm.learner.megatron.cpu import install

    install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--repeats", type=int, default=9, help="pairs for each set of lengths (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="log-normal samples (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=16384, help="their micro-batch tokens (default: %(default)s)")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[4096, 8192, 16384, 32768], help="packs whose memory is measured"
    )
    parser.add_argument("--memory-of", type=int, metavar="TOKENS", help="only print the MiB of one pack")
    options = parser.parse_args(argv)
    if options.memory_of:
        print(memory(options.memory_of))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        start()
        learner = build(Path(folder))
        rows = measure(learner, "quickstart", quickstart_lengths(), options.repeats, None)
        rows += measure(learner, "log-normal", log_normal_lengths(options.samples), options.repeats, options.budget)
    dist.destroy_process_group()
    rows += memories(options.lengths)
    report("Packs against padded rows: a learner's step on one CPU core, medians over pairs", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
