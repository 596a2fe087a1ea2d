"""Scenarios of learner ranks in the integration tests. Started by torchrun:
`scenarios.py CHECKPOINT OUT RUN [RUN ...]`.

A RUN is `name` or `name:key=value:...`; its results go to OUT/RUN. `model=NAME` takes the checkpoint NAME beside
CHECKPOINT. Global work is four micro-batches; with two ranks, each takes two. Nothing is asserted here: results are
saved for the tests to judge.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from safetensors.torch import save_file
from torch import Tensor

from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.errors import MoeTrmError
from moe_trm.learner.megatron import convert
from moe_trm.learner.megatron.build import build_megatron_learner, close_learner
from moe_trm.learner.megatron.cpu_experts import GroupedExperts
from moe_trm.learner.megatron.learner import MegatronLearner
from moe_trm.learner.megatron.model import global_parameters
from moe_trm.learner.protocol import Scores, UpdateResult
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch
from routing.record.sources import Native, Record, ReplayRecorded, ReplayRecords
from tests.integration.learner_support import optimizing
from tests.integration.learner_support.groups import leave_groups
from tests.integration.learner_support.liars import liars
from tests.integration.learner_support.tiny import random_routes
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch, objective


def build(checkpoint: str, options: dict[str, str], **optimizer: Any) -> MegatronLearner:
    leave_groups()
    config = Config.model_validate(
        {
            "model": {"checkpoint": checkpoint},
            "replay": {"mode": options.get("mode", "R3"), "max_local_flip_rate": float(options.get("flips", 1.0))},
            "probe": {"every": 0},
            "rollout": {"temperature": TEMPERATURE},
            "batch": {"layout": options.get("layout", "padded")},
            "optimizer": {"lr": 1.0, "eps": 1.0, "warmup_steps": 0, "max_grad_norm": 1e9, **optimizer},
            "learner": {
                "parallel": {name: options[name] for name in ParallelConfig.model_fields if name in options},
                "distributed_optimizer": options.get("distributed", "1") == "1",
                "recompute": options.get("recompute", "none"),
                "dtype": options.get("dtype", "float32"),
                "freeze_router": options.get("freeze_router", "0") == "1",
            },
        }
    )
    learner = build_megatron_learner(config)
    if options.get("experts") == "sequential":
        for chunk in learner._chunks:
            for module in chunk.modules():
                if isinstance(module, GroupedExperts):
                    module.forward = partial(SequentialMLP.forward, module)  # type: ignore[method-assign]
    return learner


def my_batches(*, keep_mask: bool, number: int = NUM_BATCHES) -> tuple[list[int], list[TokenBatch]]:
    """Global numbers and micro-batches of this rank. Lengths differ between ranks at the same index."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    numbers = list(range(rank, number, size))
    return numbers, [global_batch(i, keep_mask=keep_mask) for i in numbers]


def gradients(learner: MegatronLearner) -> dict[str, Tensor]:
    """Reduced gradients of this rank's parameters (needs the plain optimizer: the distributed one keeps shards)."""
    owned: dict[str, Tensor] = {}
    for name, parameter in global_parameters(learner._chunks):
        owns = (
            parallel_state.get_expert_data_parallel_rank() == 0 if convert.is_expert(name) else learner.data_rank == 0
        )
        if owns:
            owned[name] = cast(Any, parameter).main_grad.clone()
    return owned


def train(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Score, update and score again with and without sampling masks; save log-probs, gradients and exported weights."""
    learner = build(checkpoint, options)
    of_all = int(options.get("batches", NUM_BATCHES))
    numbers, batches = my_batches(keep_mask=True, number=of_all)
    sources = [Native()] * len(batches)
    scores = learner.score(batches, sources, kept_mass=True)
    again = learner.score(batches, sources)
    _, dense = my_batches(keep_mask=False, number=of_all)
    full = learner.score(dense, sources)
    learner.export_shard(str(out / "before"), Rounding("float32"))
    learner.snapshot("start")

    captured: dict[str, Tensor] = {}
    apply = learner._optimizer.step

    def capture_and_step(lr_scale: float = 1.0) -> UpdateResult:
        if options.get("distributed") == "0":
            captured.update(gradients(learner))
        return apply(lr_scale)

    learner._optimizer.step = capture_and_step  # type: ignore[method-assign]
    seen: list[Tensor] = []
    seen_kl: list[Tensor] = []
    loss = objective(batches, seen)

    def loss_and_note_kl(index: int, current: Scores) -> Tensor:
        assert current.exact_kl is not None
        seen_kl.append(current.exact_kl.clone())
        return loss(index, current)

    result = learner.update(batches, sources, loss_and_note_kl)
    learner._optimizer.step = apply  # type: ignore[method-assign]
    learner.export_shard(str(out / "after"), Rounding("float32"))
    old = learner.score(batches, sources, weights="start")
    learner.export_shard(str(out / "restored"), Rounding("float32"))
    learner.export_checkpoint(str(out / "final"))
    result_full = learner.update(dense, sources, objective(dense, []))

    save(
        out,
        "facts",
        {"grad_norm": result.grad_norm, "lr": result.lr, "applied": result.applied, "full_norm": result_full.grad_norm},
    )
    named: dict[str, Any] = {}
    for slot, number in enumerate(numbers):
        named[f"score.{number}"], named[f"again.{number}"] = scores[slot].logprobs, again[slot].logprobs
        named[f"mass.{number}"], named[f"full.{number}"] = scores[slot].log_kept_mass, full[slot].logprobs
        named[f"update.{number}"], named[f"update_kl.{number}"] = seen[slot], seen_kl[slot]
        named[f"kl.{number}"], named[f"old.{number}"] = scores[slot].exact_kl, old[slot].logprobs
    save(out, "logprobs", named)
    save(out, "gradients", captured)


def edges(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """A zero learning rate, and a warm-up with a gradient that is not finite."""
    learner = build(checkpoint, options, lr=0.0, weight_decay=0.1)
    _, batches = my_batches(keep_mask=True)
    sources = [Native()] * len(batches)
    learner.export_shard(str(out / "before"), Rounding("float32"))
    learner.update(batches, sources, objective(batches, []))
    learner.export_shard(str(out / "zero_lr"), Rounding("float32"))

    learner = build(checkpoint, options, lr=0.3, warmup_steps=3)
    loss = objective(batches, [])
    learner.update(batches, sources, lambda i, x: loss(i, x) * (float("nan") if dist.get_rank() == 0 else 1.0))
    rates = [learner.update(batches, sources, loss).lr for _ in range(4)]
    save(out, "facts", {f"lr.{i}": rate for i, rate in enumerate(rates)})


def save(out: Path, name: str, values: dict[str, Any]) -> None:
    tensors = {
        key: value.contiguous() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
        for key, value in values.items()
    }
    save_file(tensors, out / f"{name}-{dist.get_rank()}.safetensors")


def replay(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """R2, R3 on random valid routes, and their reports."""
    learner = build(checkpoint, options)
    _, batches = my_batches(keep_mask=True)
    native = learner.score(batches, [Record()] * len(batches))
    recorded = [ReplayRecorded(score.recorded) for score in native if score.recorded is not None]
    r2 = learner.score(batches, recorded)
    random = [
        ReplayRecords(random_routes(batch, learner.model_moe_layer_ids, seed=i)) for i, batch in enumerate(batches)
    ]
    r3 = learner.score(batches, random)
    before = learner.replay_report()
    named = {
        f"{kind}.{i}": s.logprobs
        for kind, scores in (("native", native), ("r2", r2), ("r3", r3))
        for i, s in enumerate(scores)
    }
    seen: list[Tensor] = []
    learner.update(batches, random, objective(batches, seen))
    named |= {f"r3_update.{i}": value for i, value in enumerate(seen)}
    after = learner.replay_report()
    facts: dict[str, Any] = {
        "score_replayed": before.replayed,
        "score_applied": before.applied_fraction,
        "update_replayed": after.replayed,
        "update_applied": after.applied_fraction,
        "update_flips": after.local_flip_rate,
        "layer_flips": sum(after.local_flips_by_layer.values()) / len(after.local_flips_by_layer),
        "valid": learner.reduce({"n": sum((batch.valid.sum() for batch in batches), torch.tensor(0))})["n"],
        "layers": len(learner.model_moe_layer_ids),
    }
    save(out, "facts", facts)
    save(out, "logprobs", named)


def matrix(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Log-probs and router gradients of two modes.

    The modes are R3 on random routes under masked scoring, and R2 with the routers turned around over the whole
    vocabulary.
    """
    learner = build(checkpoint, {**options, "distributed": "0"}, lr=0.0)
    routers: dict[str, Tensor] = {}
    apply = learner._optimizer.step

    def note_and_step(lr_scale: float = 1.0) -> UpdateResult:
        routers.update(
            {
                name: cast(Any, parameter).main_grad.clone()
                for name, parameter in global_parameters(learner._chunks)
                if name.endswith("router.weight")
            }
        )
        return apply(lr_scale)

    learner._optimizer.step = note_and_step  # type: ignore[method-assign]
    named: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    numbers, masked = my_batches(keep_mask=True)
    _, dense = my_batches(keep_mask=False)
    random = [
        ReplayRecords(random_routes(batch, learner.model_moe_layer_ids, seed=i))
        for i, batch in zip(numbers, masked, strict=True)
    ]
    # A rank needs the routes of its own layers only.
    own = [
        ReplayRecords(tuple(record and record.select(learner.moe_layer_ids) for record in source.records))
        for source in random
    ]
    recorded = [score.recorded for score in learner.score(dense, [Record()] * len(dense))]
    learner.replay_report()

    def turn_around() -> None:
        for name, parameter in global_parameters(learner._chunks):
            if name.endswith("router.weight"):
                parameter.data.neg_()

    for mode, batches, sources in (
        ("R3", masked, own),
        ("R2", dense, [ReplayRecorded(routes) for routes in recorded if routes is not None]),
    ):
        if mode == "R2":
            turn_around()
        scores, seen = learner.score(batches, sources), list[Tensor]()
        result = learner.update(batches, sources, objective(batches, seen))
        report = learner.replay_report()
        facts |= {f"{mode}.grad_norm": result.grad_norm, f"{mode}.replayed": report.replayed}
        facts |= {f"{mode}.flips": report.local_flip_rate, f"{mode}.applied": report.applied_fraction}
        for slot, number in enumerate(numbers):
            named[f"{mode}.score.{number}"], named[f"{mode}.update.{number}"] = scores[slot].logprobs, seen[slot]
        save(out, f"routers-{mode}", routers)
        routers.clear()
    if options.get("recompute") == "none" and options.get("liars") != "0":
        facts |= liars(learner)
    save(out, "facts", facts)
    save(out, "logprobs", named)


def budget(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Gradients of one minibatch under a token budget."""
    captured, shapes = optimizing.budget(partial(build, checkpoint), gradients, options)
    save(out, "gradients", captured)
    save(out, "shapes", shapes)


def groups(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Frozen routers, parameter groups, a schedule."""
    _, batches = my_batches(keep_mask=True)
    save(out, "facts", optimizing.groups(partial(build, checkpoint), out, batches, objective(batches, [])))


def misfit(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Build from a checkpoint that does not fit; save what the user is told."""
    try:
        build(checkpoint, options)
        message = "accepted"
    except MoeTrmError as error:
        message = f"{type(error).__name__}: {error}"
    (out / "message").write_text(message)


SCENARIOS = {
    "train": train,
    "edges": edges,
    "replay": replay,
    "matrix": matrix,
    "misfit": misfit,
    "budget": budget,
    "groups": groups,
}


def main() -> None:
    checkpoint, out, *runs = sys.argv[1:]
    dist.init_process_group("gloo")
    for run in runs:
        name, *options = run.split(":")
        folder = Path(out) / run
        folder.mkdir(parents=True, exist_ok=True)
        chosen = dict(option.split("=", 1) for option in options)
        scenario = SCENARIOS[name]
        scenario(str(Path(checkpoint).with_name(chosen.get("model", Path(checkpoint).name))), folder, chosen)
    close_learner()


if __name__ == "__main__":
    main()
