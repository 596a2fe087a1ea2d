"""One rank of a layout that `moe-trm doctor CONFIG --layouts A B` measures: recorded rows, scored and trained on once.

Every rank writes what it has to `OUT/rank-N.safetensors`. Values of tokens that another rank holds are NaN, experts -1.
Shape letters: T tokens of a row, D width, K experts per token.

| tensor | of |
|---|---|
| `state/NAME/ROW` | `[T-1, D]` hidden states, with the recorded routes where all rows have them |
| `logprobs/ROW` | `[T-1]` of the same pass, at temperature 1 over the vocabulary |
| `experts/LAYER/ROW`, `margins/LAYER/ROW` | `[T-1, K]` and `[T-1]` of a pass by the learner's own routers |
| `gradient/TENSOR` | the gradient of the mean log-prob of the sampled tokens, by Hugging Face's name |

The gradient is read off the weights, which every learner exports alike: the first step of Adam from weight w along the
gradient g goes to w - lr g / (|g| + eps). With eps = 1, and lr so large that w does not matter, that is g while g is
small, and the same function of it on all ranks.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from launch.hosts import Host
from launch.learner import meet
from launch.start.bisect import keeping_states
from launch.start.preflight import load_here
from moe_trm.batch.collate import collate
from moe_trm.errors import MoeTrmError
from moe_trm.learner.build import build_learner
from moe_trm.learner.megatron.notices import silence_known_notices
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.models.hf_config import read_hf_config
from moe_trm.recording.bundle import BundleReader
from moe_trm.types import MicroBatch, RolloutRecord, TokenBatch, TrainRow
from routing.errors import ReplayProofError, ReplayRefusedError, RouteError
from routing.record.sources import Native, Record, Recorded

RATE = 1e4
MEASURING = (f"optimizer={{lr: {RATE}, eps: 1.0, warmup_steps: 0, max_grad_norm: 1.0e+9}}",)
"""Settings by which one step shows the gradient."""


def rows_of(bundle: Path, step: int, number: int) -> list[RolloutRecord]:
    """The first rows of a step, without masks: scores are over the vocabulary."""
    rows = [row for row in BundleReader(str(bundle)).read(step) if row.num_sampled and row.num_tokens > 1]
    return [replace(row, sampling_mask=None) for row in rows[:number]]


def measure(learner: Learner, rows: Sequence[RolloutRecord], num_layers: int) -> dict[str, Tensor]:
    """Everything of this rank. Collective."""
    numbers = range(learner.data_rank, len(rows), learner.data_size)
    batches = [collate(MicroBatch((TrainRow(rows[number]),)), keep_mask=False) for number in numbers]
    replays = all(row.routes is not None for row in rows)
    sources = [batch.rollout_routes if replays else Native() for batch in batches]
    values: dict[str, Tensor] = {}
    for number, batch, source in zip(numbers, batches, sources, strict=True):
        length = rows[number].num_tokens - 1
        [native] = learner.score([batch], [Record()], temperature=1.0)
        with keeping_states(learner, num_layers) as states:
            [scores] = learner.score([batch], [source], temperature=1.0)
        learner.replay_report()
        values[f"logprobs/{number}"] = scores.logprobs[0, :length]
        for name, state in states.items():
            values[f"state/{name}/{number}"] = _by_token(state, native.recorded, batch)[:length]
        for layer in learner.moe_layer_ids:
            values |= {f"{name}/{layer}/{number}": value[:length] for name, value in _routes(native, layer).items()}
    before = {name: tensor.cpu().clone() for name, tensor in learner.owned_tensors()}
    total = sum(row.num_sampled for row in rows)

    def objective(index: int, current: Scores) -> Tensor:
        return -(current.logprobs * batches[index].mask.to(current.logprobs)).sum() / total

    if learner.update(batches, sources, objective).applied:
        for name, tensor in learner.owned_tensors():
            values[f"gradient/{name}"] = (before[name].double() - tensor.cpu().double()).float() / RATE
    return {name: value.cpu().contiguous() for name, value in values.items()}


def _by_token(state_ND: Tensor, recorded: Recorded | None, batch: TokenBatch) -> Tensor:
    """`[R, D]` of a micro-batch of one row: the stream has the order of the routers."""
    layout = None if recorded is None else recorded.layout
    state: Tensor = state_ND.float()
    return state if layout is None else layout.from_router(state, float("nan"))[0]


def _routes(native: Scores, layer: int) -> dict[str, Tensor]:
    recorded, shape = native.recorded, native.logprobs.shape
    assert recorded is not None
    values = {"experts": recorded.by_row(layer, *shape)[0].int()}
    margins = recorded.margins_by_row(layer, *shape)
    return values if margins is None else values | {"margins": margins[0].float()}


def main(argv: Sequence[str] | None = None) -> int:
    """One rank; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m moe_trm.tools.doctor.layout_rank", description=__doc__)
    for name in ("config", "bundle", "step", "rows", "out"):
        parser.add_argument(name)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(message)s")
    out = Path(args.out)
    try:
        config, _ = load_here(args.config, [*args.overrides, *MEASURING])
        silence_known_notices()
        store, rank, world_size = meet(Host.here(), str(out / "store"))
        device = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(device, store=store, rank=rank, world_size=world_size)
        torch.manual_seed(config.seed)
        num_layers = int(read_hf_config(config.model.checkpoint)["num_hidden_layers"])
        rows = rows_of(Path(args.bundle), int(args.step), int(args.rows))
        save_file(measure(build_learner(config), rows, num_layers), out / f"rank-{rank}.safetensors")
        dist.destroy_process_group()
    except (MoeTrmError, RouteError, ReplayProofError, ReplayRefusedError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
