"""Work that every learner must do alike, on real ranks. Started by torchrun:
`conformance.py CHECKPOINT OUT RUN [RUN ...]`.

A RUN is `backend=NAME:key=value:...`, see `runs.py`. Global work is four micro-batches; with two ranks, each takes two.
Only the `Learner` protocol is used. Nothing is asserted here: results are saved for the tests to judge.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.errors import LearnerError
from moe_trm.learner.build import build_learner
from moe_trm.learner.checkpoint.pieces import PieceReader, write_pieces
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch
from routing import Layout, PackedLayout, ReplayProofError, RouteError, Rows
from routing.record.sources import Native, Record, ReplayRecorded, ReplayRecords
from routing.replay.replay_pass import ReplayPass
from tests.integration.learner_support.liars import indexer_layers, liars
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.tiny import make_batch, random_routes
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch, objective


def build(checkpoint: str, options: dict[str, str], **optimizer: Any) -> Learner:
    """A learner whose Adam step is close to the gradient itself (eps = lr = 1), so that the gradient's scale shows."""
    if options["backend"] == "megatron":
        from tests.integration.learner_support.groups import leave_groups

        leave_groups()
    return build_learner(
        Config.model_validate(
            {
                "model": {"checkpoint": checkpoint},
                "replay": {
                    "mode": options.get("mode", "auto"),
                    "max_local_flip_rate": float(options.get("flips", 1.0)),
                },
                "rollout": {"temperature": TEMPERATURE},
                "batch": {"layout": options.get("layout", "padded")},
                "optimizer": {"lr": 1.0, "eps": 1.0, "warmup_steps": 0, "max_grad_norm": 1e9, **optimizer},
                "learner": {
                    "backend": options["backend"],
                    "parallel": {name: options[name] for name in ParallelConfig.model_fields if name in options},
                    "deepspeed": {"zero_stage": int(options.get("stage", 2))},
                    "offload_optimizer": options.get("offload") == "1",
                    "recompute": options.get("recompute", "none"),
                    "freeze_router": options.get("freeze") == "1",
                    "layer_noise": {"sigma": float(options.get("noise", 0.0)), "sigma_lr": 0.1},
                    "dtype": options.get("dtype", "float32"),
                    "transformer_engine": options.get("te", "auto"),
                    "fp8": options.get("fp8", "none"),
                    "loss_scale": {
                        "initial": int(options.get("scale", 1024)),
                        "growth_steps": int(options.get("growth", 100)),
                    },
                },
            }
        )
    )


def work(learner: Learner) -> tuple[list[TokenBatch], list[ReplayRecords], list[int]]:
    """This rank's micro-batches, routes that no router chose, and the micro-batches' global numbers."""
    numbers = list(range(learner.data_rank, NUM_BATCHES, learner.data_size))
    batches = [global_batch(number) for number in numbers]
    layers, indexers = learner.moe_layer_ids, indexer_layers(learner)
    routes = [random_routes(batch, layers, n, indexers) for n, batch in zip(numbers, batches, strict=True)]
    return batches, [ReplayRecords(rows) for rows in routes], numbers


def with_entropy(
    batches: list[TokenBatch], seen: list[Tensor], entropies: list[Tensor]
) -> Callable[[int, Scores], Tensor]:
    """The objective with an entropy bonus."""
    loss = objective(batches, seen)

    def value(index: int, current: Scores) -> Tensor:
        assert current.entropy is not None
        entropies.append(current.entropy.detach().clone())
        return loss(index, current) - 1e-3 * current.entropy.sum()

    return value


def conform(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Score, snapshot, replay, train and export; then everything that must be refused."""
    learner = build(checkpoint, options)
    batches, random, numbers = work(learner)
    dense = [global_batch(i, keep_mask=False) for i in numbers]
    native = [Native()] * len(batches)
    found: dict[str, Tensor] = {}

    def keep(kind: str, values: list[Tensor]) -> None:
        found.update({f"{kind}.{number}": value for number, value in zip(numbers, values, strict=True)})

    def logprobs(scores: list[Scores]) -> list[Tensor]:
        return [score.logprobs for score in scores]

    def present(values: list[Tensor | None]) -> list[Tensor]:
        return [value for value in values if value is not None]

    learner.export_shard(str(out / "before"), Rounding("float32"))
    recorded = learner.score(batches, [Record()] * len(batches), kept_mass=True)
    keep("score", logprobs(recorded))
    keep("mass", present([score.log_kept_mass for score in recorded]))
    keep("kl", present([score.exact_kl for score in recorded]))
    keep("full", logprobs(learner.score(dense, native)))
    keep("r2", logprobs(learner.score(batches, [ReplayRecorded(s.recorded) for s in recorded if s.recorded])))
    keep("r3", logprobs(learner.score(batches, random)))
    facts = report(learner, "score")

    learner.snapshot("start")
    seen: list[Tensor] = []
    first = learner.update(batches, native, objective(batches, seen))
    keep("update", seen)
    learner.export_shard(str(out / "after"), Rounding("float32"))
    learner.export_checkpoint(str(out / "final"))
    keep("moved", logprobs(learner.score(batches, native)))
    keep("start", logprobs(learner.score(batches, native, weights="start")))
    keep("back", logprobs(learner.score(batches, native)))
    pieces, _ = learner.state()
    (out / "state").mkdir(exist_ok=True)
    write_pieces(out / "state" / f"rank-{dist.get_rank()}.safetensors", pieces)

    seen = []
    entropies: list[Tensor] = []
    second = learner.update(batches, random, with_entropy(batches, seen, entropies), entropy=True)
    keep("r3_update", seen)
    keep("entropy", entropies)
    facts |= report(learner, "update") | {"first_norm": first.grad_norm, "second_norm": second.grad_norm}
    learner.export_shard(str(out / "second"), Rounding("float32"))
    facts["valid"] = learner.reduce({"n": sum((batch.valid.sum() for batch in batches), torch.tensor(0))})["n"]
    facts |= learner.reduce(
        {"low:min": torch.tensor(learner.data_rank + 1.0), "high:max": torch.tensor(learner.data_rank)}
    )
    facts["layers"] = len(learner.model_moe_layer_ids)
    found["gathered"] = learner.gather(torch.arange(learner.data_rank + 1) + 10 * learner.data_rank)

    facts |= refusals(learner, batches, random) | liars(learner)
    learner.export_shard(str(out / "refused"), Rounding("float32"))

    dist.barrier()
    resumed = take_over(checkpoint, out, out, options)
    # Rank 0 has nothing to train: it keeps the others company.
    mine = [make_batch(1, rows=1, length=2)] if learner.data_rank == 0 else batches[:1]
    padding = resumed.update(mine, native[:1], objective(mine, []))
    facts |= {"padding_applied": padding.applied, "padding_norm": padding.grad_norm}
    save(out, "facts", facts)
    save(out, "scores", found)

    groups = [{"match": "lm_head", "lr_multiplier": 0.5}]
    grouped = build(checkpoint, {**options, "freeze": "1"}, groups=groups)
    grouped.update(batches, native, objective(batches, []))
    grouped.export_shard(str(out / "grouped"), Rounding("float32"))


def take_over(checkpoint: str, saved: Path, out: Path, options: dict[str, str]) -> Learner:
    """Restore what the run in `saved` was after its first step, and repeat its second."""
    learner = build(checkpoint, options)
    learner.restore(PieceReader(sorted((saved / "state").glob("*.safetensors"))), {"optimizer_steps": 1})
    learner.export_shard(str(out / "restored"), Rounding("float32"))
    batches, random, _ = work(learner)
    learner.update(batches, random, with_entropy(batches, [], []), entropy=True)
    learner.export_shard(str(out / "resumed"), Rounding("float32"))
    return learner


def refusals(learner: Learner, batches: list[TokenBatch], random: list[ReplayRecords]) -> dict[str, Any]:
    """Calls that must not move the weights. 1.0 where it was refused."""
    facts: dict[str, Any] = {}
    loss = objective(batches, [])
    broken = learner.update(
        batches, [Native()] * len(batches), lambda i, x: loss(i, x) * (float("nan") if learner.data_rank == 0 else 1.0)
    )
    facts["broken_applied"] = broken.applied
    other = [ReplayRecords(source.records[::-1]) for source in random]
    facts["swapped"] = refused(RouteError, lambda: learner.score(batches, other))
    unbound = [
        ReplayRecords(source.records, tuple(None if r is None else bytes(16) for r in source.records))
        for source in random
    ]
    facts["of_no_sample"] = refused(RouteError, lambda: learner.score(batches, unbound))
    facts["unknown_snapshot"] = refused(LearnerError, lambda: learner.score(batches, random, weights="nobody"))
    # A deleted replay call: the routers keep their own choice, and the experts get it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayPass, "choose", lambda _self, _layer, live, _recompute: live)
        facts["deaf"] = refused(ReplayProofError, lambda: learner.update(batches, random, loss))
    # A route at the wrong token: the shared map is off by one place, which only a second cut can tell.
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Layout, "router_index"), (PackedLayout, "router_index"), (Rows, "places")):
            right = getattr(owner, name)
            patch.setattr(owner, name, lambda self, right=right: right(self).roll(1))
        # New sources: what was made of the others, before the map was wrong, is right.
        anew = [ReplayRecords(source.records, source.origins) for source in random]
        facts["misplaced"] = refused(ReplayProofError, lambda: learner.update(batches, anew, loss))
    # Random routes look like shifted rows: no live router would choose them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner._replayer, "max_local_flip_rate", 0.3)  # type: ignore[attr-defined]
        facts["shifted"] = refused(ReplayProofError, lambda: learner.update(batches, random, loss))
    return facts


def refused(error: type[Exception], call: Callable[[], Any]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def report(learner: Learner, name: str) -> dict[str, Any]:
    said = learner.replay_report()
    return {
        f"{name}_replayed": said.replayed,
        f"{name}_applied": said.applied_fraction,
        f"{name}_flips": said.local_flip_rate,
    }


def save(out: Path, name: str, values: dict[str, Any]) -> None:
    tensors = {
        key: value.contiguous() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
        for key, value in values.items()
    }
    save_file(tensors, out / f"{name}-{dist.get_rank()}.safetensors")


def conform_or_take_over(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    if "from" in options:
        take_over(checkpoint, out.with_name(f"backend={options['backend']}:stage={options['from']}"), out, options)
    else:
        conform(checkpoint, out, options)


if __name__ == "__main__":
    do_runs(conform_or_take_over)
