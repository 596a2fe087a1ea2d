"""Memory that `moe-trm plan` predicts, against what torch allocates on CPU ranks of the real Megatron learner.

`python -m benchmarks.plan_memory --json FILE`. Tiny models of two families are trained for two steps on each layout.
Weights, gradients and optimizer are the storages that a rank holds. What a step allocates beside them is the peak of
the profiler's record of every allocation, after a first update. On several ranks, threads of the process group give
some tensors back without a record, and the least of several updates counts. Replayed routes are spread evenly over the
experts, as the planner assumes. The rules for the layers of GPUs are not measured here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import command_line
from benchmarks.table import Row, report
from launch.threads import SINGLE_THREAD
from moe_trm.config.schema import Config
from moe_trm.models.hf_config import read_hf_config
from moe_trm.tools.plan.lora import with_adapters
from moe_trm.tools.plan.memory import Load, stage_memory
from moe_trm.tools.plan.parameters import model_of

SIZES: Mapping[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 128, "num_experts_per_tok": 2,
}  # fmt: skip
ROWS, COLUMNS, PROMPT = 16, 64, 8
"""A micro-batch: rows of equal length, their forwarded tokens, and how many of these are not scored."""
RESIDENT = ("weights", "gradients", "optimizer")
PASSING = ("merged", "activations", "replay", "logits head", "backward")
"""Kinds of the planner that a step allocates and gives back."""


@dataclass(frozen=True)
class Case:
    """A layout to measure.

    Attributes:
        ranks: their number.
        learner: settings of `learner`.
        family: of the model.
        packed: rows are one pack.
        masks: log-probs are computed over kept ids, so many for each token; 0: over the vocabulary.
        micro_batches: of a rank.
    """

    ranks: int = 1
    learner: Mapping[str, Any] = field(default_factory=dict)
    family: str = "qwen3_moe"
    packed: bool = False
    masks: int = 0
    micro_batches: int = 2

    def config(self, checkpoint: Path) -> Config:
        return Config.model_validate(
            {
                "model": {"checkpoint": str(checkpoint)},
                "replay": {"mode": "R3", "max_local_flip_rate": 1.0},
                "batch": {"layout": "packed" if self.packed else "padded"},
                "learner": self.learner,
            }
        )


CASES: Mapping[str, Case] = {
    "one process": Case(),
    "one process, packed": Case(packed=True),
    "one process, kept ids": Case(masks=3),
    "one process, computed again": Case(learner={"recompute": "full"}),
    "one process, experts computed again": Case(learner={"recompute": "selective"}),
    "one process, bfloat16": Case(learner={"dtype": "bfloat16"}),
    "one process, glm4_moe": Case(family="glm4_moe"),
    "one process, adapters": Case(learner={"lora": {"rank": 8}}),
    "one process, adapters of attention": Case(learner={"lora": {"rank": 8, "targets": ["attention"]}}),
    "one process, adapters, computed again": Case(learner={"lora": {"rank": 8}, "recompute": "full"}),
    "one process, adapters, bfloat16": Case(learner={"lora": {"rank": 8}, "dtype": "bfloat16"}),
    "EP2": Case(2, {"parallel": {"expert": 2}}),
    "DP2": Case(2, {"distributed_optimizer": False}),
    "TP2": Case(2, {"parallel": {"tensor": 2, "expert_tensor": 2}}),
    "TP2 x EP2": Case(2, {"parallel": {"tensor": 2, "expert": 2}}),
    "CP2": Case(2, {"parallel": {"context": 2}}),
    "PP2": Case(2, {"parallel": {"pipeline": 2}}, micro_batches=4),
    "PP2 in four": Case(2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}, micro_batches=4),
    "PP2, computed again": Case(2, {"parallel": {"pipeline": 2}, "recompute": "full"}, micro_batches=4),
    "PP2, adapters": Case(2, {"parallel": {"pipeline": 2}, "lora": {"rank": 8}}, micro_batches=4),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="LAYOUT", default=[*CASES], help=", ".join(CASES))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args.only, Path(folder))
    worst = max(abs(float(row["predicted / measured"]) - 1) for row in rows if row["kind"] == "all")
    report(f"MB of a rank, predicted and as torch allocates it; all kinds together within {worst:.1%}", rows, args.json)
    return 0


def measure(names: Sequence[str], folder: Path) -> list[Row]:
    """Rows of these layouts, on ranks that torchrun starts once for all that need as many."""
    rows: list[Row] = []
    for ranks, family in dict.fromkeys((CASES[name].ranks, CASES[name].family) for name in names):
        mine = [name for name in names if (CASES[name].ranks, CASES[name].family) == (ranks, family)]
        checkpoint = make_model(family, folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "benchmarks.plan_memory_rank", str(checkpoint), str(folder), *mine]
        subprocess.run(command, env={**os.environ, **SINGLE_THREAD}, check=True)
        rows += [row for name in mine for row in compared(name, checkpoint, folder)]
    return rows


def make_model(family: str, folder: Path) -> Path:
    """Random weights of `family` under `folder`, made once."""
    from moe_trm.models.tiny.families import make_family

    path = folder / family
    if not path.is_dir():
        options = {**SIZES, "num_experts": 8} if family == "qwen3_moe" else {**SIZES, "n_routed_experts": 8}
        make_family(family, path, **options)
    return path


def compared(name: str, checkpoint: Path, folder: Path) -> list[Row]:
    """Rows from the results of layout `name` in `folder`: for each rank and kind, in MB."""
    rows: list[Row] = []
    for rank in range(CASES[name].ranks):
        measured = json.loads((folder / result_file(name, rank)).read_text(encoding="utf-8"))
        predicted = prediction(name, checkpoint, measured["stage"])
        pairs = {kind: (predicted[kind], measured[kind]) for kind in RESIDENT}
        pairs["a step"] = sum(predicted.get(kind, 0.0) for kind in PASSING), measured["step"]
        pairs["all"] = (sum(expected for expected, _ in pairs.values()), sum(got for _, got in pairs.values()))
        for kind, (expected, got) in pairs.items():
            rows.append(
                {
                    "layout": name,
                    "rank": rank,
                    "kind": kind,
                    "predicted": expected / 1e6,
                    "measured": got / 1e6,
                    "predicted / measured": expected / got,
                }
            )
    return rows


def prediction(name: str, checkpoint: Path, stage: int) -> dict[str, float]:
    """The planner's bytes by kind on a rank of this stage, with the layers of a CPU."""
    case = CASES[name]
    config, hf = case.config(checkpoint), read_hf_config(checkpoint)
    load = Load(
        tokens=ROWS * COLUMNS,
        sampled=ROWS * (COLUMNS - PROMPT),
        world=case.ranks,
        keeps_masks=case.masks > 0,
        replays=True,
        other_gb=0.0,
        rows=1 if case.packed else ROWS,
        micro_batches=case.micro_batches,
        kept_ids=case.masks,
    )
    model = with_adapters(model_of(hf), hf, config.learner.lora)
    return stage_memory(model, hf, config.learner, load, stage, "plain packed" if case.packed else "plain")


def result_file(name: str, rank: int) -> str:
    """The file of this rank's measurements."""
    return f"{name}-{rank}.json".replace(" ", "_")


if __name__ == "__main__":
    sys.exit(main())
