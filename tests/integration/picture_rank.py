"""One rank that trains a model with pictures, started by `test_picture_updates`.

`picture_rank.py CHECKPOINT OUT frozen|trained`: on the first rank rows have pictures, on the others they are text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from moe_trm.config.schema import Config
from moe_trm.learner.build import build_learner, close_learner
from moe_trm.sync.rounding import Rounding
from routing import RouteRecord, token_digest
from routing.record.sources import Native, Record, ReplayRecords
from tests.integration.picture_model import EXPERTS, IMAGE_TOKEN, LAYERS
from tests.unit.learner.test_picture_learner import SIZES, batch, png, row

ALL_LAYERS = tuple(range(LAYERS))


def main() -> None:
    checkpoint, out, tower = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    config = Config.model_validate(
        {
            "model": {"checkpoint": str(checkpoint)},
            "task": {"name": "jsonl", "prompts": "unused.jsonl", "image_field": "images"},
            "learner": {"backend": "deepspeed", "dtype": "float32", "freeze_vision": tower == "frozen",
                        "deepspeed": {"zero_stage": 2}},
            "batch": {"layout": "padded"},
            "optimizer": {"lr": 1e-3},
            "replay": {"mode": "R3"},
        }
    )  # fmt: skip
    learner: Any = build_learner(config)
    rank = dist.get_rank()
    before = {name: tensor.clone() for name, tensor in weights(learner)}
    pictures = [(png("red", SIZES[0]), png("blue", SIZES[1])), (png("green", SIZES[2]),)]
    made = batch(*(row(checkpoint, shown if rank == 0 else (), number) for number, shown in enumerate(pictures)))
    [native] = learner.score([made], [Record()])
    assert native.recorded is not None
    shape = made.input_ids.shape
    recorded_BRLK = torch.stack([native.recorded.by_row(layer, *shape) for layer in ALL_LAYERS], 2)
    routes = ReplayRecords(records(made, recorded_BRLK.cpu().numpy()))
    [again] = learner.score([made], [routes])
    facts: dict[str, Any] = {
        "image_tokens": int((made.input_ids == IMAGE_TOKEN).sum()),
        "forwarded": int(made.valid.sum()),
        "same": torch.equal(native.logprobs, again.logprobs),
    }
    report = learner.replay_report()
    facts |= {"matched": report.matched, "replayed": report.replayed, "flips": report.local_flips}
    result = learner.update([made], [routes], lambda _, current: -current.logprobs.sum())
    facts |= {"grad_norm": result.grad_norm, "applied": result.applied}
    if tower == "trained":
        text = batch(row(checkpoint, (), 7))
        facts["text"] = learner.update([text], [Native()], lambda _, current: -current.logprobs.sum()).applied
    entries = learner.export_shard(str(out / f"push-{rank}"), Rounding("float32"))
    facts["pushed"] = [entry.name for entry in entries]
    facts["changed"] = [name for name, tensor in weights(learner) if not torch.equal(tensor, before[name])]
    learner._exporter.write_checkpoint(out / "export")
    save_file({name: t.detach().contiguous() for name, t in weights(learner)}, out / f"weights-{rank}.safetensors")
    (out / f"facts-{rank}.json").write_text(json.dumps(facts))
    close_learner("deepspeed")


def weights(learner: Any) -> Any:
    return learner._engine.module.causal.named_parameters()


def records(made: Any, routes: Any) -> tuple[RouteRecord, ...]:
    lengths, rows = made.valid.sum(1).tolist(), []
    for number, length in enumerate(lengths):
        tokens = torch.cat((made.input_ids[number, :length], made.target_ids[number, length - 1 : length])).numpy()
        experts = routes[number, :length].astype("uint8")
        rows.append(RouteRecord(experts, ALL_LAYERS, EXPERTS, token_digest(tokens)))
    return tuple(rows)


if __name__ == "__main__":
    main()
