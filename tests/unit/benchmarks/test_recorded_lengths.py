"""Recorded rows judged by length: rows of every width of a step, and rows without tokens left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import length_bias


def batch(lengths: list[int], width: int, *, behavior: bool = False) -> Any:
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    scores = -torch.arange(1.0, mask.numel() + 1).view(mask.shape) * mask
    return SimpleNamespace(
        mask=mask,
        rollout_logprobs=scores,
        current_logprobs=3 * scores,
        anchor_logprobs=None,
        behavior_logprobs=2 * scores if behavior else None,
    )


@pytest.mark.parametrize("behavior", [False, True])
def test_a_step_is_the_rows_of_all_its_micro_batches(behavior: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = [SimpleNamespace(batches=[batch([2, 0], 3, behavior=behavior)])]
    updates.append(SimpleNamespace(batches=[batch([5], 5, behavior=behavior)]))
    monkeypatch.setattr(length_bias, "load", lambda _: SimpleNamespace(steps={1: updates}))
    [evidence] = length_bias.recorded(Path("bundle"))
    assert evidence.ratios.packing.lengths.tolist() == [2, 5]
    assert evidence.ratios.mask.tolist()[0] == [True, True, False, False, False]
    # Where older weights sampled and were scored, the engine ratio is theirs; else that of the first scoring.
    own = (1 if behavior else 2) * torch.tensor([[-1.0, -2, 0, 0, 0], [-1.0, -2, -3, -4, -5]])
    assert torch.allclose(evidence.ratios.engine, own)
