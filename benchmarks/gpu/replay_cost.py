"""Cost of replay and of its proof on this device, in pairs.

`python -m benchmarks.gpu.replay_cost CONFIG OUT [--rows R] [--length T] [--rounds N] [key=value ...]`. One learner and
random tokens. Each round times, in changing order, a scoring pass and an update with the learner's own routes, with the
routes of a pass before (R2) and with records (R3), between synchronisations. The figures are medians, and medians of
paired ratios to own routes. At the end the same pass is scored twice: the same routes should give the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.config import load
from moe_trm.learner.build import build_learner
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.models.hf_config import num_experts, read_hf_config
from moe_trm.step.fixed_texts import batch_of
from moe_trm.types import TokenBatch
from routing import RouteRecord, token_digest
from routing.record.record import expert_dtype
from routing.record.sources import Native, Record, ReplayRecorded, ReplayRecords, RouteSource

WARM_UP = 2
"""Rounds whose times are not kept."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    args, overrides = parser.parse_known_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    # The tokens are noise, so the bound on flips is off.
    config = load(args.config, [*overrides, "replay.max_local_flip_rate=1.0"])
    hf = read_hf_config(Path(config.model.checkpoint))
    learner = build_learner(config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, int(hf["vocab_size"]), (args.rows, args.length + 1), generator=generator)
    batch = replace(batch_of(ids), advantages=torch.ones(args.rows, args.length))
    sources = sources_of(learner, batch, ids, num_experts(hf))
    figures = {"rows": args.rows, "length": args.length, **costs(learner, batch, sources, args.rounds)}
    logprobs, repeated = (learner.score([batch], [sources["R3"]()])[0].logprobs.cpu() for _ in range(2))
    figures["share of log-probs that differ when repeated"] = float((logprobs != repeated)[batch.mask].double().mean())
    if torch.cuda.is_available():
        figures["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    args.out.write_text(json.dumps(figures, indent=1))
    sys.stdout.flush()
    os._exit(0)  # some process groups wait long for their end


def sources_of(learner: Learner, batch: TokenBatch, ids: Tensor, experts: int) -> dict[str, Callable[[], RouteSource]]:
    """The sources that are compared, of routes that the learner itself takes."""
    [scores] = learner.score([batch], [Record()])
    recorded = scores.recorded
    assert recorded is not None
    rows, length = batch.mask.shape
    layers = learner.moe_layer_ids
    routes = torch.stack([recorded.by_row(layer, rows, length).cpu() for layer in layers], 2)
    records = tuple(
        RouteRecord(row.numpy().astype(expert_dtype(experts)), layers, experts, token_digest(tokens.numpy()))
        for row, tokens in zip(routes, ids, strict=True)
    )
    return {"own": Native, "R2": lambda: ReplayRecorded(recorded), "R3": lambda: ReplayRecords(records)}


def costs(
    learner: Learner, batch: TokenBatch, sources: dict[str, Callable[[], RouteSource]], rounds: int
) -> dict[str, float]:
    """Milliseconds of a pass and an update with each source, and their paired ratios to own routes."""

    def objective(_number: int, scores: Scores) -> Tensor:
        mask = batch.mask.to(scores.logprobs.device)
        return -(scores.logprobs * mask).sum() / mask.sum()

    works: dict[str, Callable[[RouteSource], object]] = {
        "score": lambda source: learner.score([batch], [source]),
        "update": lambda source: learner.update([batch], [source], objective, lr_scale=0.0),
    }
    figures: dict[str, float] = {}
    for work, run in works.items():
        seconds: dict[str, list[float]] = {name: [] for name in sources}
        for turn in range(-WARM_UP, rounds):
            for name in sorted(sources, reverse=bool(turn % 2)):
                source = sources[name]()
                start_s = synchronised()
                run(source)
                elapsed_s = synchronised() - start_s
                learner.replay_report()
                if turn >= 0:
                    seconds[name].append(elapsed_s)
        for name, times in seconds.items():
            figures[f"{work}, {name}: ms"] = 1e3 * median(times)
            if name != "own":
                pairs = zip(times, seconds["own"], strict=True)
                figures[f"{work}, {name} over own, paired"] = median(time / own_s for time, own_s in pairs)
    return figures


def synchronised() -> float:
    """Seconds, when the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
