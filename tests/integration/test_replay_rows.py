"""Replay on unpatched Hugging Face models in every layout of rows, against the same samples one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from routing import ReplayProofError, RouteError, RouteRecord, Rows, token_digest
from routing.hf import HFReplayer, gate_of, moe_blocks
from routing.judge.flip_bound import FlipBoundError
from routing.record.sources import Record, ReplayRecorded, ReplayRecords
from tests.integration.test_replay_hf import FAMILIES, VOCAB, E, K, build

LENGTHS = (17, 4, 12)
LAYOUTS = ("right", "left", "both", "packed", "packed and padded")


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def samples(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]


def records(family: str, tokens: list[Tensor], seed: int = 1) -> tuple[RouteRecord, ...]:
    """Random legal routes."""
    rng, layers = np.random.default_rng(seed), FAMILIES[family][2]
    draws = [
        np.argsort(rng.random((len(ids) - 1, len(layers), E)), axis=-1)[..., :K].astype(np.uint8) for ids in tokens
    ]
    pairs = zip(draws, tokens, strict=True)
    return tuple(RouteRecord(draw, layers, E, token_digest(ids.numpy())) for draw, ids in pairs)


def layout(name: str) -> Rows:
    if name.startswith("packed"):
        offsets = torch.tensor([0, *np.cumsum(LENGTHS).tolist()])
        return Rows.packed(offsets, sum(LENGTHS) + (3 if "padded" in name else 0))
    before = {"right": [0, 0, 0], "left": [3, 16, 8], "both": [1, 4, 2]}[name]
    column = torch.arange(20)[None]
    first = torch.tensor(before)[:, None]
    mask = (column >= first) & (column < first + torch.tensor(LENGTHS)[:, None])
    return {"right": Rows.right_padded, "left": Rows.left_padded, "both": Rows.padded}[name](mask)


def place(rows: Rows, tokens: list[Tensor]) -> Tensor:
    ids = torch.zeros(rows.shape[0] * rows.shape[1], dtype=torch.long)
    ids[rows.places()] = torch.cat(tokens)
    return ids.view(rows.shape)


def forward(model: Any, rows: Rows, input_ids: Tensor) -> list[Tensor]:
    """By sequence, the log-probs of its tokens but the first.

    Packed sequences are told apart by position ids, of which transformers makes a mask that blocks the others; its
    gpt-oss does not hand them on, and is given the masks themselves.
    """
    mask: dict[str, Any] = {} if rows.is_packed else {"attention_mask": rows.mask().long()}
    if rows.is_packed and model.config.model_type == "gpt_oss":
        given = {
            "config": model.config,
            "inputs_embeds": torch.zeros(*rows.shape, 1),
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": rows.position_ids(),
        }
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        mask = {"attention_mask": {kind: make(**given) for kind, make in makers.items()}}
    logits = model(input_ids=input_ids, position_ids=rows.position_ids(), use_cache=False, **mask).logits
    parts = zip(rows.sequences(logits), rows.sequences(input_ids), strict=True)
    return [part[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0] for part, ids in parts]


def one_by_one(model: Any, replayer: HFReplayer, tokens: list[Tensor], known: tuple[RouteRecord, ...]) -> list[Tensor]:
    found = []
    for ids, record in zip(tokens, known, strict=True):
        rows = Rows.packed(torch.tensor([0, len(ids)]))
        with replayer.use_rows(ReplayRecords((record,)), rows, ids[None]):
            found += forward(model, rows, ids[None])
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_the_samples_one_by_one(family: str, name: str) -> None:
    model, tokens = build(family), samples()
    known, rows = records(family, tokens), layout(name)
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    expected = one_by_one(model, replayer, tokens, known)
    alone = replayer.report()
    torch.cat(expected).sum().backward()
    gradients = [gate_of(block).weight.grad.clone() for block in moe_blocks(model).values()]
    model.zero_grad()

    with replayer.use_rows(ReplayRecords(known), rows, place(rows, tokens)):
        got = forward(model, rows, place(rows, tokens))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    torch.cat(got).sum().backward()
    for block, expected_gradient in zip(moe_blocks(model).values(), gradients, strict=True):
        gap = (gate_of(block).weight.grad - expected_gradient).norm()
        assert gap <= 1e-4 * expected_gradient.norm()
    report = replayer.report()
    due = (sum(LENGTHS) - len(LENGTHS)) * len(FAMILIES[family][2])
    assert (report.replayed, report.matched, report.native) == (due, due, 0)
    assert report.local_flips == alone.local_flips > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_padding_and_last_tokens_keep_the_gates_own_choice(name: str) -> None:
    model, tokens = build("olmoe"), samples()
    rows, chosen, given = layout(name), [], []
    block = next(iter(moe_blocks(model).values()))
    gate_of(block).register_forward_hook(lambda _gate, _args, output: chosen.append(output[2]))
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    block.experts.register_forward_pre_hook(lambda _experts, args: given.append(args[1]))
    with replayer.use_rows(ReplayRecords(records("olmoe", tokens)), rows, place(rows, tokens)):
        forward(model, rows, place(rows, tokens))
    due = rows.without_last().flatten()
    assert torch.equal(chosen[0][~due], given[0][~due])
    assert not torch.equal(chosen[0][due], given[0][due])


@pytest.mark.parametrize("name", ["left", "packed and padded"])
def test_routes_recorded_in_a_layout_replay_there_and_nowhere_else(name: str) -> None:
    model, tokens, rows = build("qwen3_moe"), samples(), layout(name)
    ids = place(rows, tokens)
    replayer = HFReplayer(model)
    with replayer.use_rows(Record(), rows, ids) as passed:
        expected = forward(model, rows, ids)
    recorded = passed.recorded()
    with replayer.use_rows(ReplayRecorded(recorded), rows, ids):
        got = forward(model, rows, ids)
    assert torch.equal(torch.cat(got), torch.cat(expected))
    assert replayer.report().local_flips == 0
    other = Rows.packed(torch.tensor([0, 17, 20, 33]), 36) if rows.is_packed else layout("right")
    with (
        pytest.raises(RouteError, match="another micro-batch"),
        replayer.use_rows(ReplayRecorded(recorded), other, place(other, tokens)),
    ):
        pass


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_misplaced_sample_among_aligned_ones_is_named(name: str) -> None:
    """Flips are counted by sequence in every layout, packed rows included."""
    model, layers = build("olmoe"), FAMILIES["olmoe"][2]
    tokens, rows = samples(), layout(name)
    replayer = HFReplayer(model, max_local_flip_rate=0.9)
    with replayer.use_rows(Record(), rows, place(rows, tokens)) as passed:
        forward(model, rows, place(rows, tokens))
    routes = torch.stack([passed.recorded().experts[layer] for layer in layers], dim=1)
    own = [ids[:-1] for ids in rows.sequences(routes.view(*rows.shape, len(layers), K))]
    own[0] = own[0].roll(1, dims=0)
    known = tuple(
        RouteRecord(ids.numpy().astype(np.uint8), layers, E, token_digest(one.numpy()))
        for ids, one in zip(own, tokens, strict=True)
    )
    with replayer.use_rows(ReplayRecords(known), rows, place(rows, tokens), samples=[70, 71, 72]):
        forward(model, rows, place(rows, tokens))
    with pytest.raises(FlipBoundError, match="sample 70") as error:
        replayer.report()
    assert "sample 71" not in str(error.value)
    assert "sample 72" not in str(error.value)


def test_rows_of_another_shape_or_count_are_refused() -> None:
    model, tokens = build("olmoe"), samples()
    replayer, known, rows = HFReplayer(model), records("olmoe", tokens), layout("left")
    wrong = [(known, layout("packed")), (known[:2], rows), (known[::-1], rows)]
    for given, where in wrong:
        with pytest.raises(RouteError), replayer.use_rows(ReplayRecords(given), where, place(rows, tokens)):
            pass
    with pytest.raises(ReplayProofError), replayer.use_rows(ReplayRecords(known), rows, place(rows, tokens)):
        pass  # nothing was forwarded
