"""Wrong routes among right ones, on real learners: which faults of which size stop the step, and which would train.

Each fault hits 1, 8 or all of 32 samples, at 5, 25 or 100% of their tokens. The right routes are the ones that the
model's own routers choose with weights rounded to bfloat16, as an engine of that precision would. The bounds are the
defaults.

Clean steps are scored beside them, with other tokens each time: none may stop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from benchmarks.options import command_line
from benchmarks.table import Row, report
from launch.job import free_port
from moe_trm.config.load import load
from moe_trm.learner.build import build_learner
from moe_trm.learner.protocol import Learner
from moe_trm.models.tiny.families import make_family
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch
from routing import ReplayProofError, RouteRecord, expert_dtype, token_digest
from routing.record.sources import Record, ReplayRecords

SAMPLES, TOKENS, ROUNDED = 32, 48, "rounded"
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "quickstart's shape": ("qwen3_moe", {"num_hidden_layers": 4, "num_experts": 16}),
    "OLMoE, 6 layers, 4 of 16": ("olmoe", {"num_hidden_layers": 6, "num_experts": 16, "num_experts_per_tok": 4}),
    "GLM-4-MoE, 8 layers, 4 of 16": (
        "glm4_moe",
        {"num_hidden_layers": 8, "n_routed_experts": 16, "num_experts_per_tok": 4},
    ),
}
LEARNERS = ("megatron", "deepspeed")
SIZES = (1, 8, SAMPLES)
POSITIONS = (0.05, 0.25, 1.0)
Fault = Callable[["Routes", np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Routes:
    """Right routes `[samples, tokens, layers, K]` of one step, and the number of experts."""

    experts: np.ndarray
    num_experts: int

    def unrelated(self, rng: np.random.Generator) -> np.ndarray:
        """Routes of the same shape without any relation to the tokens."""
        drawn = rng.random((*self.experts.shape[:3], self.num_experts))
        return np.asarray(np.argsort(drawn, axis=-1)[..., : self.experts.shape[3]])


def _random(routes: Routes, who: np.ndarray, where: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(where[..., None, None], routes.unrelated(rng), routes.experts)


def _shifted(routes: Routes, who: np.ndarray, where: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(where[..., None, None], np.roll(routes.experts, 1, axis=1), routes.experts)


def _of_another(routes: Routes, who: np.ndarray, where: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(where[..., None, None], np.roll(routes.experts, 1, axis=0), routes.experts)


def _one_layer(routes: Routes, who: np.ndarray, where: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    changed = routes.experts.copy()
    changed[:, :, 1] = np.where(where[..., None], routes.unrelated(rng)[:, :, 1], changed[:, :, 1])
    return changed


def _one_expert(routes: Routes, who: np.ndarray, where: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The first of the K experts is another one, which the set does not have."""
    free = rng.random((*routes.experts.shape[:3], routes.num_experts))
    np.put_along_axis(free, routes.experts, -1.0, axis=-1)
    changed = routes.experts.copy()
    changed[..., 0] = np.where(where[..., None], free.argmax(-1), changed[..., 0])
    return changed


def _end(share: float, rng: np.random.Generator) -> np.ndarray:
    return np.arange(TOKENS) >= TOKENS - max(1, round(share * TOKENS))


def _beginning(share: float, rng: np.random.Generator) -> np.ndarray:
    return _end(share, rng)[::-1]


def _anywhere(share: float, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(rng.permutation(_end(share, rng)))


FAULTS: dict[str, tuple[Fault, Callable[[float, np.random.Generator], np.ndarray]]] = {
    "random at the end": (_random, _end),
    "random at the beginning": (_random, _beginning),
    "random anywhere": (_random, _anywhere),
    "of the row before, at the end": (_shifted, _end),
    "of another sample, at the beginning": (_of_another, _beginning),
    "one layer random, anywhere": (_one_layer, _anywhere),
    "one of the experts another, anywhere": (_one_expert, _anywhere),
}


class Bench:
    """One learner on one model."""

    def __init__(self, learner: Learner, num_experts: int, vocabulary: int = 60) -> None:
        self.learner, self._experts, self._vocabulary = learner, num_experts, vocabulary
        learner.snapshot(ROUNDED, rounding=Rounding(dtype="bfloat16"))

    def step(self, seed: int) -> tuple[TokenBatch, Routes]:
        """Tokens of a step, and the routes that an engine in bfloat16 would have recorded."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(4, self._vocabulary, (SAMPLES, TOKENS + 1), generator=generator)
        batch = token_batch(tokens)
        recorded = self.learner.score([batch], [Record()], weights=ROUNDED)[0].recorded
        assert recorded is not None
        layers = [recorded.by_row(layer, SAMPLES, TOKENS) for layer in self.learner.moe_layer_ids]
        return batch, Routes(torch.stack(layers, dim=2).numpy(), self._experts)

    def stops(self, batch: TokenBatch, experts: np.ndarray) -> bool:
        """True when a step with these routes is refused."""
        layers = self.learner.moe_layer_ids
        tokens = torch.cat([batch.input_ids, batch.target_ids[:, -1:]], dim=1).numpy()
        records = [
            RouteRecord(sample_experts.astype(expert_dtype(self._experts)), layers, self._experts, token_digest(ids))
            for sample_experts, ids in zip(experts, tokens, strict=True)
        ]
        try:
            self.learner.score([batch], [ReplayRecords(tuple(records), at_sampling=(True,) * SAMPLES)])
        except ReplayProofError:
            return True
        return False


def token_batch(tokens: torch.Tensor) -> TokenBatch:
    """A micro-batch of `tokens` `[B, R + 1]`, all but the first sampled."""
    inputs = tokens[:, :-1]
    everything, zeros = torch.ones_like(inputs, dtype=torch.bool), torch.zeros(inputs.shape)
    return TokenBatch(
        input_ids=inputs,
        target_ids=tokens[:, 1:],
        valid=everything,
        mask=everything,
        rollout_logprobs=zeros,
        full_logprobs=zeros,
        versions=zeros.int(),
        turn_ids=zeros.short(),
        advantages=zeros,
        routes=(None,) * len(inputs),
        kept_ids=None,
        kept_offsets=None,
        sample_ids=tuple(range(len(inputs))),
    )


def attacks(bench: Bench, name: str, seeds: Sequence[int]) -> list[Row]:
    """One row for each fault and number of samples: how many of the seeds stopped, by share of positions."""
    rows: list[Row] = []
    for kind, (fault, places) in FAULTS.items():
        for size in SIZES:
            row: Row = {"model": name, "fault": kind, "samples": size}
            for share in POSITIONS:
                caught = 0
                for seed in seeds:
                    rng = np.random.default_rng(seed)
                    batch, routes = bench.step(1000 + seed)
                    who = np.isin(np.arange(SAMPLES), rng.permutation(SAMPLES)[:size])
                    where = np.stack([places(share, rng) & is_hit for is_hit in who])
                    caught += bench.stops(batch, fault(routes, who, where, rng))
                row[f"at {share:.0%}"] = f"{caught} of {len(seeds)}"
            rows.append(row)
            print(row, flush=True)
    return rows


def clean(bench: Bench, name: str, steps: int) -> Row:
    """Number of clean steps that are refused."""
    stopped = 0
    for number in range(steps):
        batch, routes = bench.step(number)
        stopped += bench.stops(batch, routes.experts)
    return {"model": name, "clean steps": steps, "stopped": stopped}


def close_learner(backend: str) -> None:
    """Tear the process groups of a learner down."""
    import_module(f"moe_trm.learner.{backend}.build").close_learner()


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of faults and tokens (default: 0 1 2)")
    parser.add_argument("--clean", type=int, default=100, help="clean steps of each model (default: 100)")
    parser.add_argument("--learner", choices=LEARNERS, default="megatron", help="(default: megatron)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="(default: all of them)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="moe-trm-attacks-") as scratch:
        if args.models[1:]:
            parts = [in_its_own_process(name, Path(scratch) / f"{n}.json", args) for n, name in enumerate(args.models)]
        else:
            parts = [one_model(args.models[0], Path(scratch), args)]
    rows = sorted(itertools.chain(*parts), key=lambda row: "clean steps" in row)
    report(f"Wrong routes that stop a step, {args.learner} learner", rows, args.json)
    return 0


def in_its_own_process(name: str, path: Path, args: argparse.Namespace) -> list[Row]:
    """The rows of one model. Learners leave process groups behind that a second one of other sizes cannot use."""
    model_options = ["--models", name, "--learner", args.learner, "--clean", str(args.clean), "--json", str(path)]
    seeds = ["--seeds", *map(str, args.seeds)]
    subprocess.run([sys.executable, "-m", "benchmarks.route_attacks", *model_options, *seeds], check=True)
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def one_model(name: str, scratch: Path, args: argparse.Namespace) -> list[Row]:
    """The rows of one model, in this process."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    logging.disable(logging.WARNING)
    family, options = MODELS[name]
    folder, config = make_family(family, scratch / "model", **options), scratch / "config.yaml"
    config.write_text(f"model: {{checkpoint: {folder}}}\n", encoding="utf-8")
    bench = Bench(build_learner(load(config, [f"learner.backend={args.learner}", "learner.micro_batch_rows=32"])), 16)
    unharmed = clean(bench, name, args.clean)
    print(unharmed, flush=True)
    rows = [*attacks(bench, name, args.seeds), unharmed]
    close_learner(args.learner)
    return rows


if __name__ == "__main__":
    sys.exit(main())
