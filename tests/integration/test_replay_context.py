"""`with replay(...)` around one forward of an unpatched Hugging Face model: equal to a kept replayer, and proved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from routing import ReplayProofError, ReplayRefusedError, RouteError
from routing.hf import HFReplayer, gate_of, moe_blocks
from routing.hf_context import replay
from routing.judge.flip_bound import FlipBoundError
from routing.record.sources import ReplayRecords
from tests.integration.test_replay_hf import build
from tests.integration.test_replay_rows import LENGTHS, forward, layout, place, records, samples

DUE = (sum(LENGTHS) - len(LENGTHS)) * 2
"""Token-layers of the two MoE layers of the tiny Qwen3-MoE."""


def router_gradients(model: torch.nn.Module) -> list[Tensor]:
    found = [gate_of(block).weight.grad.clone() for block in moe_blocks(model).values()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["right", "left", "both", "packed"])
def test_the_context_equals_a_replayer(name: str) -> None:
    model, tokens, rows = build("qwen3_moe"), samples(), layout(name)
    known, ids = records("qwen3_moe", tokens), place(rows, tokens)
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    with replayer.use_rows(ReplayRecords(known), rows, ids):
        expected = torch.cat(forward(model, rows, ids))
    replayer.detach()
    where = rows if rows.is_packed else rows.mask().long()
    with replay(model, known, ids, where, max_local_flip_rate=1.0) as replayed:
        before = replayed.report
        got = torch.cat(forward(model, rows, ids))
    assert torch.equal(got, expected)
    assert before is None
    assert replayed.rows == rows
    assert (replayed.report.replayed, replayed.report.matched) == (DUE, DUE)


@pytest.mark.parametrize("when", ["inside", "later", "later, recomputed", "inside, recomputed"])
def test_a_backward_may_come_inside_or_later(when: str) -> None:
    model, tokens, rows = build("qwen3_moe"), samples(), layout("left")
    known, ids = records("qwen3_moe", tokens), place(rows, tokens)
    with replay(model, known, ids, rows, max_local_flip_rate=1.0):
        torch.cat(forward(model, rows, ids)).sum().backward()
    expected = router_gradients(model)
    if "recomputed" in when:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with replay(model, known, ids, rows, max_local_flip_rate=1.0) as replayed:
        loss = torch.cat(forward(model, rows, ids)).sum()
        if "inside" in when:
            loss.backward()
    if "later" in when:
        loss.backward()
    for got, one in zip(router_gradients(model), expected, strict=True):
        torch.testing.assert_close(got, one)
    twice = 2 if when == "inside, recomputed" else 1
    assert replayed.report.matched == twice * DUE
    model(input_ids=ids)  # no hook is left behind
    assert not any(gate_of(block)._forward_hooks for block in moe_blocks(model).values())


def test_a_later_recomputation_without_its_routes_is_noticed() -> None:
    """The router's weights are exchanged in between: the recomputed gate has other logits, the routes stay."""
    model, tokens, rows = build("qwen3_moe"), samples(), layout("left")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    known, ids = records("qwen3_moe", tokens), place(rows, tokens)
    with replay(model, known, ids, rows, max_local_flip_rate=1.0):
        loss = torch.cat(forward(model, rows, ids)).sum()
    block = next(iter(moe_blocks(model).values()))
    block.experts.register_forward_pre_hook(lambda _experts, args: (args[0], args[1].flip(0), args[2]), prepend=True)
    with pytest.raises(ReplayProofError, match="dispatcher used exactly them"):
        loss.backward()


def test_two_recomputed_forwards_in_one_backward_need_one_replayer() -> None:
    model, tokens, rows = build("qwen3_moe"), samples(), layout("left")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for seed in (1, 2):
        with replay(model, records("qwen3_moe", tokens, seed), place(rows, tokens), rows, max_local_flip_rate=1.0):
            losses.append(torch.cat(forward(model, rows, place(rows, tokens))).sum())
    with pytest.raises(ReplayProofError, match="one HFReplayer"):
        torch.stack(losses).sum().backward()


def test_two_forwards_in_one_backward_without_recomputation() -> None:
    model, tokens, rows = build("qwen3_moe"), samples(), layout("left")
    losses, alone = [], []
    for seed in (1, 2):
        known = records("qwen3_moe", tokens, seed)
        with replay(model, known, place(rows, tokens), rows, max_local_flip_rate=1.0):
            torch.cat(forward(model, rows, place(rows, tokens))).sum().backward()
        alone.append(router_gradients(model))
        with replay(model, known, place(rows, tokens), rows, max_local_flip_rate=1.0):
            losses.append(torch.cat(forward(model, rows, place(rows, tokens))).sum())
    torch.stack(losses).sum().backward()
    for got, first, second in zip(router_gradients(model), *alone, strict=True):
        torch.testing.assert_close(got, first + second)


def test_what_cannot_be_proved_raises_and_leaves_the_model_as_it_was() -> None:
    model, tokens, rows = build("qwen3_moe"), samples(), layout("right")
    known, ids = records("qwen3_moe", tokens), place(rows, tokens)
    with pytest.raises(FlipBoundError), replay(model, known, ids, rows):  # random routes
        forward(model, rows, ids)
    with pytest.raises(ReplayProofError), replay(model, known, ids, rows):
        pass
    with pytest.raises(RouteError) as error, replay(model, known[::-1], ids, rows):
        forward(model, rows, ids)
    assert error.value.reason == "rows"
    with pytest.raises(RouteError, match="two dimensions"), replay(model, known, ids, torch.ones(1, 1, 3, 3)):
        pass
    with pytest.raises(ZeroDivisionError), replay(model, known, ids, rows):
        raise ZeroDivisionError
    forward(model, rows, ids)
    assert not any(gate_of(block)._forward_hooks for block in moe_blocks(model).values())
    with pytest.raises(ReplayRefusedError, match="dense"), replay(torch.nn.Linear(2, 2), known, ids, rows):
        pass
