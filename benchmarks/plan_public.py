"""Plans for real models on 1 to 32 nodes of H100, and predictions against what others report.

`python -m benchmarks.plan_public [--models M ...] [--nodes N ...] [--json FILE]`. Nothing runs but the planner.

Reported seconds are those of NVIDIA's NeMo AutoModel for pre-training in bfloat16 on H100 (2026-04-17, its page
docs/performance-summary.md). Reported memory of hosts is of slime with CPU Adam: its issue 1851, and its example of
DeepSeek-R1, as vime keeps it. Tokens of pre-training are trained once: 6 operations each, no pass of log-probs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.config.load import load
from moe_trm.config.schema import Config
from moe_trm.learner.megatron.stages import balanced
from moe_trm.plan.build import Assumptions, Plan, Work
from moe_trm.plan.cluster import Cluster
from moe_trm.plan.commands import PUBLISHED, SIGMA, WORKLOAD
from moe_trm.plan.exchange import exchange_seconds
from moe_trm.plan.gpus import gpu_of
from moe_trm.plan.lengths import log_normal
from moe_trm.plan.memory import stepped_elements
from moe_trm.plan.parameters import model_of
from moe_trm.plan.search import search
from moe_trm.plan.speed import Efficiency, anchor_passes, train_seconds

MODELS = ("qwen3_30b_a3b", "glm_4_5_air", "glm_4_5", "deepseek_v3", "kimi_k2")
NODES = (1, 2, 4, 8, 16, 32)
H100 = gpu_of("h100")


class Reported(NamedTuple):
    """A run of pre-training: its step in samples of 4,096 tokens, and what was printed."""

    model: str
    gpus: int
    samples: int
    pipeline: int
    expert: int
    seconds: float
    tflops: float


PRE_TRAINING = (
    Reported("qwen3_30b_a3b", 8, 512, 1, 8, 21.773, 277),
    Reported("deepseek_v3", 256, 512, 4, 64, 8.18, 250),
    Reported("deepseek_v3", 1024, 8192, 4, 64, 37.87, 216),
    Reported("kimi_k2", 256, 512, 8, 32, 8.86, 189),
)
HOSTS = (
    ("qwen3_30b_a3b", 1, "slime, out of memory at 1 TB", "tensor=4 expert=8", 8 * 102.4),
    ("deepseek_v3", 16, "vime, 1.4 to 1.5 TB", "tensor=8 pipeline=4 context=4 expert=32 last_stage_layers=13", 1450),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--models", nargs="*", default=MODELS, help=f"names (default: {' '.join(MODELS)})")
    parser.add_argument("--nodes", nargs="*", type=int, default=NODES, help="of 8 GPUs (default: 1 2 4 8 16 32)")
    args = parser.parse_args(argv)
    rows = [planned(model, nodes) for model in args.models for nodes in args.nodes]
    rows += [pre_trained(one) for one in PRE_TRAINING]
    report("Plans, and predictions against reports", [*rows, *hosts()], args.json)
    return 0


def work_of(model: str, config: Config) -> Work:
    """Answers of a quarter of the longest in the median, prompts of 512 tokens, and the planner's assumed speeds."""
    longest = config.rollout.max_new_tokens
    lengths = log_normal(longest / 4, SIGMA, longest, 512)
    hf = json.loads((PUBLISHED / f"{model}.json").read_text(encoding="utf-8"))
    return Work(hf, Assumptions(Efficiency(), lengths, 3.3, 4.0), model)


def planned(model: str, nodes: int) -> Row:
    """The best plan of a search, and the seconds that it took."""
    config, began = load(WORKLOAD), time.process_time()
    found = search(config, work_of(model, config), Cluster(nodes, 8, H100, 1))
    row: Row = {"model": model, "nodes": nodes, "searched, s": round(time.process_time() - began, 1)}
    if not found.plans:
        return row | {"best plan": found.why, "step, s": "-", "learner, GB": "-", "server, GB": "-", "plans": 0}
    best = found.plans[0]
    return row | {
        "best plan": layout_of(best),
        "step, s": round(best.configured.timeline.step_s, 1),
        "learner, GB": round(best.layout.total / 1e9, 1),
        "server, GB": round(best.serving.bytes_per_gpu / 1e9, 1),
        "plans": len(found.plans),
    }


def layout_of(plan: Plan) -> str:
    """A plan in short: servers, learner, memory savers."""
    sizes, learner = plan.layout.parallel, plan.config.learner
    shape = "x".join(str(size) for size in (sizes.tensor, sizes.pipeline, sizes.context, sizes.expert))
    serves = "all GPUs" if plan.config.rollout.colocate else f"{plan.serving.servers * plan.serving.gpus} GPUs"
    savers = f"{learner.recompute}{', host' if learner.offload_optimizer else ''}"
    return f"{plan.serving.servers}x{plan.serving.gpus} on {serves}; {plan.ranks} train {shape}; {savers}"


def pre_trained(one: Reported) -> Row:
    """Predicted seconds of a reported step."""
    settings = ["rollout.max_new_tokens=4096", "learner.minibatches=1", f"learner.parallel.expert={one.expert}"]
    hf = work_of(one.model, load(WORKLOAD)).hf
    model, tokens, efficiency = model_of(hf), one.samples * 4096.0, Efficiency()
    uneven = []
    if len(model.layers) % one.pipeline:
        uneven = [f"learner.parallel.pipeline_layout='{balanced(len(model.layers), one.pipeline)}'"]
    config = load(WORKLOAD, [*settings, f"learner.parallel.pipeline={one.pipeline}", *uneven])
    # Virtual stages of the reports keep the wait short: it is left out, as the pass of log-probs is.
    seconds = train_seconds(model, hf, load(WORKLOAD, settings), H100, one.gpus, tokens, 4096, efficiency)
    seconds *= 3 / (3 + anchor_passes(config, 0.0))
    seconds += exchange_seconds(model, hf, config, H100, 8, one.gpus, tokens, efficiency)
    return {
        "pre-training": one.model,
        "GPUs": one.gpus,
        "reported, s": one.seconds,
        "predicted, s": round(seconds, 2),
        "off": f"{seconds / one.seconds - 1:+.0%}",
        "reported MFU": f"{one.tflops / H100.tflops:.0%}",
        "assumed": f"{efficiency.train_flops:.0%}",
    }


def hosts() -> Iterator[Row]:
    """Host memory of a node with CPU Adam: 16 bytes for each number, before torch rounds pinned tensors up."""
    for name, nodes, source, layout, reported in HOSTS:
        settings = [f"learner.parallel.{one}" for one in layout.split()]
        config = load(WORKLOAD, ["learner.offload_optimizer=true", *settings])
        model, world = model_of(work_of(name, config).hf), 8 * nodes
        stages = range(config.learner.parallel.pipeline)
        stepped = max(stepped_elements(model, config.learner, world, stage) for stage in stages)
        predicted = 16 * 8 * stepped / 1e9
        yield {
            "host of a node": name,
            "nodes": nodes,
            "reported by": source,
            "reported, GB": reported,
            "predicted, GB": round(predicted),
            "up to, GB": round(2 * predicted),
        }


if __name__ == "__main__":
    sys.exit(main())
