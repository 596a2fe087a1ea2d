"""One of two ranks that share a model by PyTorch's `fully_shard`: replay there, against the same work in one process.

`python -m tests.integration.fsdp_rank` in the environment of torchrun prints a line of JSON for each case and rank.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from routing import RouteRecord, token_digest
from routing.hf import HFReplayer, gate_of, moe_blocks
from routing.hf_context import replay
from routing.judge.flip_bound import FlipBoundError
from routing.record.sources import Record, ReplayRecorded, ReplayRecords
from tests.integration.test_replay_hf import FAMILIES, E, K, build
from tests.integration.test_replay_rows import forward, layout, place, records, samples

RANKS = 2
CASES = [
    *((family, name, "none") for family in FAMILIES for name in ("both", "packed")),
    *((family, name, "layers") for family in ("qwen3_moe", "glm4_moe") for name in ("left", "packed")),
    *(("qwen3_moe", name, "wrapped") for name in ("right", "packed and padded")),
]
"""Family, layout of rows, and who recomputes: nobody, transformers, or torch's wrapper around layers."""


def ready(family: str, recomputed: str) -> Any:
    """The model before it is shared."""
    model = build(family)
    if recomputed == "layers":
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if recomputed == "wrapped":
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(layer)
    return model


def shared(family: str, recomputed: str = "none") -> Any:
    """The model with every layer's weights, and then the rest, divided over the ranks."""
    model, mesh = ready(family, recomputed), init_device_mesh("cpu", (RANKS,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return model


def scored(model: Any, replayer: HFReplayer, family: str, name: str, rank: int) -> Tensor:
    """Log-probs of the rank's own samples under random legal routes."""
    tokens, rows = samples(rank), layout(name)
    ids = place(rows, tokens)
    with replayer.use_rows(ReplayRecords(records(family, tokens, 10 + rank)), rows, ids):
        return torch.cat(forward(model, rows, ids))


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names that the parameters have without wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[name.replace("_checkpoint_wrapped_module.", "")] = gradient
    return found


def equal_to_one_process(family: str, name: str, recomputed: str) -> dict[str, Any]:
    """FSDP takes the mean of the ranks' gradients, so one process does too."""
    alone = ready(family, recomputed)
    replayer = HFReplayer(alone, max_local_flip_rate=1.0)
    expected = [scored(alone, replayer, family, name, rank) for rank in range(RANKS)]
    (-torch.cat(expected).sum() / RANKS).backward()
    report = replayer.report()

    model = shared(family, recomputed)
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    got = scored(model, replayer, family, name, dist.get_rank())
    (-got.sum()).backward()
    proved = replayer.report(dist.group.WORLD)
    requested, found = whole_gradients(alone), whole_gradients(model)
    assert requested.keys() == found.keys()
    gaps = {
        one: float((found[one] - gradient).norm() / gradient.norm().clamp_min(1e-12))
        for one, gradient in requested.items()
        if gradient is not None
    }
    routers = [one for one in gaps if one.endswith(("gate.weight", "router.weight"))]
    return {
        "logprobs": float((got - expected[dist.get_rank()]).detach().abs().max()),
        "gradients": max(gaps.values()),
        "routers": len(routers),
        "smallest_router_gradient": min(float(found[one].norm()) for one in routers),
        "alone": [report.replayed, report.matched, report.local_flips],
        "shared": [proved.replayed, proved.matched, proved.local_flips],
    }


def recorded_routes_replay() -> dict[str, Any]:
    """R2 under `fully_shard`, and the context that keeps nothing, with its report of all ranks."""
    model, tokens, rows = shared("qwen3_moe"), samples(dist.get_rank()), layout("packed")
    replayer, ids = HFReplayer(model), place(rows, tokens)
    with replayer.use_rows(Record(), rows, ids) as passed, torch.no_grad():
        first = torch.cat(forward(model, rows, ids))
    recorded = passed.recorded()
    with replayer.use_rows(ReplayRecorded(recorded), rows, ids):
        again = torch.cat(forward(model, rows, ids))
    report = replayer.report(dist.group.WORLD)
    replayer.detach()
    known = records("qwen3_moe", tokens, 3)
    with replay(model, known, ids, rows, max_local_flip_rate=1.0, group=dist.group.WORLD) as replayed:
        torch.cat(forward(model, rows, ids)).sum().backward()
    assert replayed.report is not None
    return {
        "same_bits": torch.equal(first, again),
        "local_flips": report.local_flips,
        "matched": replayed.report.matched,
        "hooks_left": sum(len(gate_of(block)._forward_hooks) for block in moe_blocks(model).values()),
    }


def one_misplaced_sample_of_one_rank() -> dict[str, Any]:
    """Rows of one sample of the second rank are moved by one. Both ranks say so."""
    rank = dist.get_rank()
    model, tokens, rows = shared("olmoe"), samples(rank), layout("packed")
    layers, ids = FAMILIES["olmoe"][2], place(rows, tokens)
    replayer = HFReplayer(model, max_local_flip_rate=0.9)
    with replayer.use_rows(Record(), rows, ids) as passed, torch.no_grad():
        forward(model, rows, ids)
    routes = torch.stack([passed.recorded().experts[layer] for layer in layers], dim=1)
    own = [part[:-1] for part in rows.sequences(routes.view(*rows.shape, len(layers), K))]
    own[0] = own[0].roll(rank, dims=0)
    known = tuple(
        RouteRecord(part.numpy().astype(np.uint8), layers, E, token_digest(one.numpy()))
        for part, one in zip(own, tokens, strict=True)
    )
    named = [100 * rank + number for number in range(len(tokens))]
    with replayer.use_rows(ReplayRecords(known), rows, ids, samples=named), torch.no_grad():
        forward(model, rows, ids)
    try:
        replayer.report(dist.group.WORLD)
    except FlipBoundError as error:
        return {"error": str(error)}
    return {"error": ""}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        print(json.dumps({"case": case, **equal_to_one_process(*case)}))
    for scenario in (recorded_routes_replay, one_misplaced_sample_of_one_rank):
        print(json.dumps({"case": scenario.__name__, **scenario()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
