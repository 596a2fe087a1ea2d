"""Two ranks that share the vocabulary say what one rank says: values, gradients, entropy, likeliest ids."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

RANK = Path(__file__).with_name("vocabulary_rank.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, torch.Tensor]]]:
    """The results of the ranks of a world of one and of two."""
    found = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"world-{world}")
        ranks = [
            subprocess.Popen([sys.executable, str(RANK), str(folder), str(rank), str(world)]) for rank in range(world)
        ]
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * world
        found[world] = [load_file(folder / f"{rank}.safetensors") for rank in range(world)]
    return found


def test_two_ranks_equal_one(results: dict[int, list[dict[str, torch.Tensor]]]) -> None:
    [whole], parts = results[1], results[2]
    assert {"masked", "kl", "full", "entropy", "squares", "top_logprobs", "mass", "hidden_grad"} <= whole.keys()
    for name, expected in whole.items():
        got = (
            [torch.cat([part[name] for part in parts])]
            if name.startswith("weight_grad")
            else [part[name] for part in parts]
        )
        for values in got:
            if name == "top_ids":
                assert torch.equal(values, expected)
            assert float((values - expected).float().norm() / expected.float().norm()) < 1e-6, name


def test_the_single_rank_needs_no_group(results: dict[int, list[dict[str, torch.Tensor]]]) -> None:
    [whole] = results[1]
    assert whole["masked"].shape == (6,)
    assert whole["weight_grad_masked"].any(dim=1).sum() > 5
