"""A rank of `benchmarks.plan_memory`: trains two steps and writes the bytes that it holds and allocates.

`torchrun ... -m benchmarks.plan_memory_rank CHECKPOINT OUT LAYOUT [LAYOUT ...]`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks.plan_memory import CASES, COLUMNS, PROMPT, ROWS, Case, result_file
from moe_trm.learner.megatron.build import build_megatron_learner
from moe_trm.learner.megatron.learner import MegatronLearner
from moe_trm.learner.protocol import Scores
from moe_trm.models.hf_config import moe_layers, num_experts, read_hf_config
from moe_trm.types import TokenBatch
from routing import RouteRecord, expert_dtype, token_digest
from routing.record.sources import ReplayRecords

REPEATS = 4


def main(argv: list[str]) -> None:
    checkpoint, out, *names = argv
    dist.init_process_group("gloo")
    for name in names:
        measured = measure(CASES[name], Path(checkpoint))
        (Path(out) / result_file(name, dist.get_rank())).write_text(json.dumps(measured), encoding="utf-8")
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def measure(case: Case, checkpoint: Path) -> dict[str, int]:
    """Bytes by kind on this rank, and the number of its pipeline stage."""
    learner = build_megatron_learner(case.config(checkpoint))
    hf, share = read_hf_config(checkpoint), parallel_state.get_data_parallel_rank()
    batches = [micro_batch(hf, share * case.micro_batches + i, case.masks) for i in range(case.micro_batches)]
    update(learner, batches)
    weights, gradients, optimizer = held(learner)
    # Threads of the process group give tensors back without a record, now and then: the least of several is nearest.
    step = min(peak_bytes(lambda: update(learner, batches)) for _ in range(1 if case.ranks == 1 else REPEATS))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    # Megatron's buffers for gathered columns stay; the planner counts them with what a step allocates.
    gathered = nbytes(parallel_state.get_global_memory_buffer().buffer.values())
    resident = {"weights": nbytes(weights), "gradients": nbytes(gradients), "optimizer": nbytes(optimizer)}
    return {**resident, "step": step + gathered, "stage": stage}


def update(learner: MegatronLearner, batches: list[TokenBatch]) -> None:
    def objective(index: int, current: Scores) -> Tensor:
        return -(batches[index].advantages * current.logprobs).sum() / 1000

    learner.update(batches, [ReplayRecords(batch.routes, batch.origins) for batch in batches], objective)


def held(learner: MegatronLearner) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tensors of weights, of gradients and of the optimizer."""
    weights = [parameter.data for chunk in learner._chunks for parameter in chunk.parameters()]
    gradients = [
        buffer.grad_data for chunk in learner._wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    state = [tensor for part in learner._optimizer._parts for tensor in _state(part)]
    model_storages = {tensor.untyped_storage().data_ptr() for tensor in (*weights, *gradients)}
    return weights, gradients, [tensor for tensor in state if tensor.untyped_storage().data_ptr() not in model_storages]


def _state(part: Any) -> Iterable[Tensor]:
    """Moments, and the float32 weights that are stepped."""
    for group in part.optimizer.param_groups:
        yield from (parameter.data for parameter in group["params"])
    for state in part.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that torch allocates in `call` and has not given back yet."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = sorted(_allocations(recorded.profiler.kineto_results.experimental_event_tree()))
    held, in_use, most = dict[int, int](), 0, 0
    for _, pointer, size in events:
        # What is given back without a record shows when its place is taken again.
        in_use += max(size, 0) - held.pop(pointer, 0)
        if size > 0:
            held[pointer] = size
        most = max(most, in_use)
    return most


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Time, address and size of every allocation below these events; a negative size gives it back."""
    for event in events:
        kind, fields = event.typed or (None, None)
        if kind == _EventType.Allocation and fields is not None:
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        yield from _allocations(event.children)


def micro_batch(hf: dict[str, Any], number: int, masks: int) -> TokenBatch:
    """Rows of `COLUMNS` random tokens, all but a prompt sampled; routes that are spread evenly over the experts."""
    rng, shape = np.random.default_rng(number), (ROWS, COLUMNS)
    tokens = rng.integers(4, int(hf["vocab_size"]), (ROWS, COLUMNS + 1))
    mask = np.broadcast_to(np.arange(COLUMNS) >= PROMPT, shape).copy()
    zeros = torch.zeros(shape)
    scored = int(mask.sum())
    # A sampled token and its successors, as many as are kept.
    kept = (tokens[:, 1:][mask][:, None] + np.arange(masks)) % int(hf["vocab_size"])
    return TokenBatch(
        input_ids=torch.from_numpy(tokens[:, :-1].copy()),
        target_ids=torch.from_numpy(tokens[:, 1:].copy()),
        valid=torch.ones(shape, dtype=torch.bool),
        mask=torch.from_numpy(mask),
        rollout_logprobs=zeros,
        full_logprobs=zeros,
        versions=torch.from_numpy(np.where(mask, 0, -1).astype(np.int32)),
        turn_ids=torch.zeros(shape, dtype=torch.int16),
        advantages=torch.from_numpy(np.where(mask, rng.normal(size=shape), 0).astype(np.float32)),
        routes=tuple(routes(hf, tokens[row], row + number) for row in range(ROWS)),
        kept_ids=torch.from_numpy(kept.flatten()) if masks else None,
        kept_offsets=torch.arange(scored + 1) * masks if masks else None,
    )


def routes(hf: dict[str, Any], tokens: np.ndarray, turn: int) -> RouteRecord:
    """Each token's experts follow the experts of the token before, so that all get the same number."""
    layers, experts, top_k = moe_layers(hf), num_experts(hf), int(hf["num_experts_per_tok"])
    first = (np.arange(len(tokens) - 1)[:, None] + np.arange(len(layers)) + turn) * top_k
    ids = (first[..., None] + np.arange(top_k)) % experts
    return RouteRecord(ids.astype(expert_dtype(experts)), layers, experts, token_digest(tokens.astype(np.int32)))


if __name__ == "__main__":
    main(sys.argv[1:])
