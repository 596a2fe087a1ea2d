"""Values that one optimizer step changes in what a push sends, and the bytes of sending those alone.

`python -m benchmarks.push_changes [--lr 1e-6 1e-5] [--steps N] [--checkpoint DIR] [--json FILE]`

The real Megatron-Core learner makes AdamW steps on random tokens with advantages of random sign, another batch each
time, as a policy gradient has. After the warm-up of learning rate and moments each step's weights are compared with the
weights before it, rounded to bfloat16 as a push rounds them. Medians over steps:

- `changed`: share of the values whose bits differ; `untouched`: share of the bytes in tensors of which no bit differs;
- `bitmap` and `places`: bytes as a share of the whole push, where a changed value has two bytes, and its place is a bit
  in a map of all values, or a four-byte index;
- `packing s/GB`: processor seconds to find the changed values among a GB of them and pack them with their places, and
  to put them into a copy elsewhere, on one core, beside the export of the whole (`python -m benchmarks.weights`); the
  best of three;
- `pays below Gb/s`: the speed of a link per packing core below which the bytes that are left out take longer than that.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.options import command_line
from benchmarks.short_run import starting_checkpoint
from benchmarks.table import Row, report
from moe_trm.config import load
from moe_trm.learner.megatron.build import build_megatron_learner, close_learner
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.models.hf_config import read_hf_config
from moe_trm.step.fixed_texts import batch_of
from moe_trm.sync.rounding import Rounding
from routing.record.sources import Record

ROWS, COLUMNS, WARM_UP = 16, 64, 8
BLOCK = 2**25
"""Values that are packed at once."""
ROUNDING = Rounding("bfloat16")


def pushed(learner: Learner) -> dict[str, Tensor]:
    """The tensors of a push as integers of their bits."""
    return {
        name: ROUNDING.pushed(name, tensor)
        .clone()
        .view(torch.int16 if ROUNDING.dtype_of(name) != "float32" else torch.int32)
        for name, tensor in learner.owned_tensors()
    }


def train(learner: Learner, vocab_size: int, seed: int) -> None:
    """One optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of(torch.randint(vocab_size, (ROWS, COLUMNS), generator=generator))
    advantages = torch.randn(ROWS, 1, generator=generator)

    def objective(_: int, scores: Scores) -> Tensor:
        return -(advantages * scores.logprobs).mean()

    learner.update([batch], [Record()], objective)


def compared(old_values: Mapping[str, Tensor], new_values: Mapping[str, Tensor]) -> dict[str, float]:
    """The figures of one step."""
    moved = {name: int((old_values[name] != new).sum()) for name, new in new_values.items()}
    size, count = sum(new.nbytes for new in new_values.values()), sum(new.numel() for new in new_values.values())
    sent = sum(moved[name] * new.itemsize for name, new in new_values.items())
    return {
        "changed": sum(moved.values()) / count,
        "untouched": sum(new.nbytes for name, new in new_values.items() if not moved[name]) / size,
        "bitmap": (sent + count / 8) / size,
        "places": (sent + 4 * sum(moved.values())) / size,
    }


def packing_s(share: float) -> float:
    """Processor seconds to pack and unpack the values of one GB of which this share has changed, the best of three."""
    values = torch.randint(-(2**15), 2**15, (BLOCK,), dtype=torch.int16)
    after = torch.where(torch.rand(BLOCK) < share, values ^ 1, values).numpy()
    elsewhere, old = values.numpy().copy(), values.numpy()

    def once() -> float:
        started = time.process_time()
        places = np.flatnonzero(old != after)
        elsewhere[places] = after[places]
        return time.process_time() - started

    return min(once() for _ in range(3)) / after.nbytes * 1e9


def measured(checkpoint: Path, folder: Path, rate: float, steps: int) -> Row:
    """Medians over the steps at this learning rate."""
    config = folder / f"{rate:g}.yaml"
    config.write_text(f"model: {{checkpoint: {checkpoint}}}\n", encoding="utf-8")
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    try:
        learner = build_megatron_learner(load(config, [f"optimizer.lr={rate}"]))
        vocab_size = int(read_hf_config(str(checkpoint))["vocab_size"])
        for seed in range(WARM_UP):
            train(learner, vocab_size, seed)
        previous, step_figures = pushed(learner), list[dict[str, float]]()
        for seed in range(WARM_UP, WARM_UP + steps):
            train(learner, vocab_size, seed)
            current = pushed(learner)
            step_figures.append(compared(previous, current))
            previous = current
    finally:
        close_learner()
    medians = {name: statistics.median(figures[name] for figures in step_figures) for name in step_figures[0]}
    seconds, left_out = packing_s(medians["changed"]), 1 - min(medians["bitmap"], medians["places"])
    speed = max(0.0, 8 * left_out / seconds)
    return {"learning rate": f"{rate:g}", **medians, "packing s/GB": seconds, "pays below Gb/s": speed}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4], help="(default: 1e-6 1e-5 1e-4)")
    parser.add_argument("--steps", type=int, default=8, help="that are compared (default: 8)")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder (default: the quickstart's)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="moe-trm-changes-") as scratch:
        checkpoint = starting_checkpoint(args.checkpoint, Path(scratch)).resolve()
        rows = [measured(checkpoint, Path(scratch), rate, args.steps) for rate in args.lr]
    report(f"Changes of a push in bfloat16 by one step, {args.steps} steps", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
