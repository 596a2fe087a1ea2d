"""Replay on Hugging Face models whose weights two ranks share by PyTorch's `fully_shard`, equal to one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from routing import ReplayRefusedError
from routing.hf import HFReplayer
from routing.hosts.hf_blocks import check_weights, check_whole
from tests.integration.fsdp_rank import CASES, RANKS
from tests.integration.ranks import fork_ranks
from tests.integration.test_replay_hf import FAMILIES, build
from tests.integration.test_replay_rows import LENGTHS

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp" / "train.py"


@pytest.fixture(scope="module")
def found() -> dict[Any, list[dict[str, Any]]]:
    """By case, what each rank found."""
    done = fork_ranks(["-m", "tests.integration.fsdp_rank"], RANKS, repeatable=True)
    assert done.ok, done.stderr[-4000:]
    by_case: dict[Any, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        one = json.loads(line)
        by_case.setdefault(tuple(one["case"]) if isinstance(one["case"], list) else one["case"], []).append(one)
    return by_case


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_shared_weights_equal_one_process(found: dict[Any, list[dict[str, Any]]], case: tuple[str, str, str]) -> None:
    family, _, recomputed = case
    layers = len(FAMILIES[family][2])
    due = RANKS * (sum(LENGTHS) - len(LENGTHS)) * layers * (1 if recomputed == "none" else 2)
    assert len(found[case]) == RANKS
    for one in found[case]:
        assert one["logprobs"] < 1e-5
        assert one["gradients"] < 1e-4
        assert one["routers"] == layers
        assert one["smallest_router_gradient"] > 0
        assert one["shared"] == one["alone"]
        assert one["shared"][:2] == [due, due]
        assert one["shared"][2] > 0


def test_routes_recorded_under_shared_weights_replay_to_the_bit(found: dict[Any, list[dict[str, Any]]]) -> None:
    for one in found["recorded_routes_replay"]:
        assert one["same_bits"]
        assert one["local_flips"] == 0 == one["hooks_left"]
        assert one["matched"] == RANKS * (sum(LENGTHS) - len(LENGTHS)) * 2


def test_every_rank_hears_of_one_ranks_misplaced_sample(found: dict[Any, list[dict[str, Any]]]) -> None:
    errors = [one["error"] for one in found["one_misplaced_sample_of_one_rank"]]
    assert len(errors) == RANKS
    assert all("sample 100" in error and "sample 0" not in error for error in errors)


class Flattened(nn.Module):
    """The names that FullyShardedDataParallel makes; it cannot be made without an accelerator."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = inner


def test_what_is_not_proved_is_refused() -> None:
    with pytest.raises(ReplayRefusedError, match="FSDP1"):
        HFReplayer(Flattened(build("qwen3_moe")))
    model = build("qwen3_moe")
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(ReplayRefusedError, match="meta device"):
        HFReplayer(empty)


def test_weights_that_rest_elsewhere_are_refused() -> None:
    offloaded = SimpleNamespace(device=torch.device("cpu"), device_mesh=SimpleNamespace(device_type="cuda"))
    with pytest.raises(ReplayRefusedError, match=r"layer 3.*rest on cpu"):
        check_weights(3, SimpleNamespace(weight=offloaded))
    check_weights(3, nn.Linear(2, 2))


def test_distributed_logits_are_refused() -> None:
    logits: Any = torch.zeros(2, 8)
    check_whole(3, logits)
    logits.device_mesh = "two ranks"
    with pytest.raises(ReplayRefusedError, match=r"layer 3.*distributed"):
        check_whole(3, logits)


def test_layers_in_torchs_own_wrapper_are_found() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = build("qwen3_moe")
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    assert HFReplayer(model).layer_ids == FAMILIES["qwen3_moe"][2]


def test_the_example_trains_on_two_ranks_as_on_one() -> None:
    """Losses and gradient norms of each step, after updates too."""
    one, two = (fork_ranks([str(EXAMPLE)], number) for number in (1, RANKS))
    assert one.ok, one.stderr[-4000:]
    assert two.ok, two.stderr[-4000:]
    steps = [[json.loads(line) for line in done.stdout.splitlines()] for done in (one, two)]
    assert len(steps[0]) == len(steps[1]) == 4
    for alone, shared in zip(*steps, strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        assert shared["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-4)
        assert shared["replayed"] == alone["replayed"] == shared["matched"] > 0
    assert steps[1][0]["loss"] > steps[1][-1]["loss"]
