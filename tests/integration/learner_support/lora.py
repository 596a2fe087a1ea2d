"""Adapters on both learners, on real ranks. Started by torchrun: `lora.py CHECKPOINT OUT RUN [RUN ...]`.

A RUN is `backend=NAME:key=value:...`; its results go to OUT/RUN. `targets=a+b` says what has adapters, and
`start=FOLDER` the adapter beside CHECKPOINT to start from. Global work is four micro-batches, over the whole
vocabulary. Nothing is asserted here: results are saved for the tests to judge.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.errors import CheckpointError
from moe_trm.learner.build import build_learner
from moe_trm.learner.checkpoint.pieces import PieceReader, write_pieces
from moe_trm.learner.protocol import Learner
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch
from routing.record.sources import Native, Record, ReplayRecorded, ReplayRecords
from tests.integration.learner_support.conformance import refused, report, save
from tests.integration.learner_support.liars import liars
from tests.integration.learner_support.tiny import random_routes
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch, objective

RANK, ALPHA = 4, 8.0
LR = 1.0
SECOND_LR = 0.05


def build(checkpoint: str, options: dict[str, str], **optimizer: Any) -> Learner:
    """A learner whose Adam step is close to the gradient itself (eps = lr = 1), so that the gradient's scale shows."""
    if options["backend"] == "megatron":
        from tests.integration.learner_support.groups import leave_groups

        leave_groups()
    start = options.get("start")
    return build_learner(
        Config.model_validate(
            {
                "model": {"checkpoint": checkpoint},
                "replay": {"max_local_flip_rate": 1.0},
                "rollout": {"temperature": TEMPERATURE},
                "batch": {"layout": options.get("layout", "padded")},
                "optimizer": {"lr": LR, "eps": 1.0, "warmup_steps": 0, "max_grad_norm": 1e9, **optimizer},
                "learner": {
                    "backend": options["backend"],
                    "parallel": {name: options[name] for name in ParallelConfig.model_fields if name in options},
                    "deepspeed": {"zero_stage": int(options.get("stage", 2))},
                    "distributed_optimizer": options.get("distributed", "1") == "1",
                    "recompute": options.get("recompute", "none"),
                    "dtype": options.get("dtype", "float32"),
                    "lora": {
                        "rank": RANK,
                        "alpha": ALPHA,
                        "targets": options["targets"].split("+"),
                        "adapter": None if start is None else str(Path(checkpoint).with_name(start)),
                    },
                },
                "train": {"export_form": "published" if options.get("published") == "1" else "plain"},
            }
        )
    )


def work(learner: Learner) -> tuple[list[int], list[TokenBatch], list[ReplayRecords]]:
    """Global numbers and micro-batches of this rank, and routes of its layers that no router chose."""
    numbers = list(range(learner.data_rank, NUM_BATCHES, learner.data_size))
    batches = [global_batch(number, keep_mask=False) for number in numbers]
    routes = []
    for number, batch in zip(numbers, batches, strict=True):
        records = random_routes(batch, learner.model_moe_layer_ids, seed=number)
        routes.append(ReplayRecords(tuple(record and record.select(learner.moe_layer_ids) for record in records)))
    return numbers, batches, routes


def frozen(learner: Any) -> dict[str, str]:
    """A digest of this rank's part of every parameter that does not train."""
    modules = learner._chunks if hasattr(learner, "_chunks") else [learner._engine.module]
    return {
        f"{index}.{name}": hashlib.sha256(part.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for index, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
        for part in [getattr(parameter, "ds_tensor", parameter)]
    }


def elements(learner: Any) -> dict[str, int]:
    """Elements of this rank: that train, that its optimizer's moments have, and in a snapshot, in bytes."""
    modules: list[nn.Module] = learner._chunks if hasattr(learner, "_chunks") else [learner._engine.module]
    trained = [each for module in modules for each in module.parameters() if each.requires_grad]
    if hasattr(learner, "_chunks"):
        megatron = learner._optimizer.megatron
        parts = getattr(megatron, "chained_optimizers", [megatron])
        optimizers = [part.optimizer for part in parts if part.optimizer is not None]
    else:
        optimizers = [learner._engine.optimizer.optimizer]
    moments = sum(
        values.numel()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for name, values in state.items()
        if name == "exp_avg"
    )
    return {
        "trained": sum(getattr(each, "ds_numel", each.numel()) for each in trained),
        "moments": moments,
        "all": sum(getattr(each, "ds_numel", each.numel()) for module in modules for each in module.parameters()),
        "frozen_gradients": sum(
            each.grad is not None or hasattr(each, "main_grad")
            for module in modules
            for each in module.parameters()
            if not each.requires_grad
        ),
    }


def run(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Score, update, score at the start again, replay, save and resume."""
    learner = build(checkpoint, options)
    numbers, batches, random = work(learner)
    native, found = [Native()] * len(batches), dict[str, Tensor]()

    def keep(kind: str, values: list[Tensor]) -> None:
        found.update({f"{kind}.{number}": value for number, value in zip(numbers, values, strict=True)})

    learner.export_shard(str(out / "before"), Rounding("float32"))
    base = frozen(learner)
    own = learner.score(batches, [Record()] * len(batches))
    keep("score", [score.logprobs for score in own])
    recorded = [ReplayRecorded(score.recorded) for score in own if score.recorded is not None]
    facts: dict[str, Any] = {"snapshot_bytes": learner.snapshot("start")}
    state(learner, out / "begun")
    seen: list[Tensor] = []
    first = learner.update(batches, native, objective(batches, seen))
    keep("update", seen)
    facts |= {"first_norm": first.grad_norm, "applied": first.applied}
    learner.export_shard(str(out / "after"), Rounding("float32"))
    if options.get("published") == "1":
        learner.export_checkpoint(str(out / "published"))
    counters = state(learner, out / "stepped")
    keep("moved", [score.logprobs for score in learner.score(batches, native)])
    keep("start", [score.logprobs for score in learner.score(batches, native, weights="start")])
    learner.forget("start")
    learner.replay_report()
    keep("r2", [score.logprobs for score in learner.score(batches, recorded)])
    facts |= report(learner, "r2")

    keep("r3", [score.logprobs for score in learner.score(batches, random)])
    seen = []
    second = learner.update(batches, random, objective(batches, seen), lr_scale=SECOND_LR)
    keep("r3_update", seen)
    facts |= {"second_norm": second.grad_norm} | report(learner, "replay") | elements(learner)
    state(learner, out / "second")
    facts |= held_routes(learner, batches, recorded)
    facts["frozen_same"] = frozen(learner) == base
    facts["num_frozen"] = len(base)
    if options.get("liars") == "1":
        facts |= liars(learner)

    resumed = build(checkpoint, {name: value for name, value in options.items() if name != "start"})
    resumed.restore(PieceReader(sorted((out / "stepped").glob("*"))), counters)
    resumed.update(batches, random, objective(batches, []), lr_scale=SECOND_LR)
    state(resumed, out / "resumed")
    other = {**counters, "lora_base_checksum": counters["lora_base_checksum"] + 1}
    reader = PieceReader(sorted((out / "stepped").glob("*")))
    facts["other_base"] = refused(CheckpointError, lambda: resumed.restore(reader, other))
    facts["base_checksum"] = counters["lora_base_checksum"]
    save(out, "facts", facts)
    save(out, "scores", found)


def held_routes(learner: Learner, batches: list[TokenBatch], recorded: list[ReplayRecorded]) -> dict[str, Any]:
    """A step under the routes that the learner recorded two steps before, and the update's log-probs beside scores."""
    before, seen = learner.score(batches, recorded), list[Tensor]()
    third = learner.update(batches, recorded, objective(batches, seen), lr_scale=SECOND_LR)
    same = all(torch.equal(score.logprobs, each) for score, each in zip(before, seen, strict=True))
    return {"held_same": same, "held_norm": third.grad_norm, **report(learner, "held")}


def state(learner: Learner, folder: Path) -> dict[str, int]:
    """Save what `learner.state` gives, when all ranks are here; its counters."""
    pieces, counters = learner.state()
    folder.mkdir(exist_ok=True)
    write_pieces(folder / f"rank-{dist.get_rank()}.safetensors", pieces)
    dist.barrier()
    return dict(counters)


def main() -> None:
    checkpoint, out, *runs = sys.argv[1:]
    dist.init_process_group("gloo")
    for name in runs:
        options = dict(option.split("=", 1) for option in name.split(":"))
        folder = Path(out) / name
        folder.mkdir(parents=True, exist_ok=True)
        run(str(Path(checkpoint).with_name(options.get("model", Path(checkpoint).name))), folder, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
