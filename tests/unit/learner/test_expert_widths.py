"""Experts of any width train on DeepSpeed's policy, and their routes are replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.tiny.families import make_family
from routing.hf import HFReplayer
from routing.record.sources import Record, ReplayRecorded


@pytest.mark.parametrize(("width", "dtype", "kind"), [(32, "float32", "grouped_mm"), (6, "bfloat16", "eager")])
def test_widths_that_the_grouped_product_refuses_take_the_slower_one(
    tmp_path: Path, width: int, dtype: str, kind: str
) -> None:
    checkpoint = make_family("qwen3_moe", tmp_path / "checkpoint", moe_intermediate_size=width)
    model = load_policy(HfCheckpoint(checkpoint), dtype, recompute=False).causal
    assert model.config._experts_implementation == kind
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    tokens = torch.randint(4, 99, (2, 10), generator=torch.Generator().manual_seed(0))
    rows = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.ones(2, 9, dtype=torch.bool)
    with torch.no_grad(), replayer.use(Record(), *rows) as running:
        first = model(input_ids=rows[0], use_cache=False).logits
    with replayer.use(ReplayRecorded(running.recorded()), *rows):
        again = model(input_ids=rows[0], use_cache=False).logits
    assert torch.equal(again, first)
    again.float().logsumexp(-1).sum().backward()
    assert replayer.report().applied_fraction == 1.0
