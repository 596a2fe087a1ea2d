"""Positions of sparse attention in models of transformers: recorded, replayed, proved, and refused if wrong.

Shape letters: B sequences, R columns, L layers with an indexer, K positions, M rows that see more than K.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from routing import MisalignedError, ReplayProofError, ReplayRefusedError, RouteError, RouteRecord, Rows, token_digest
from routing.hf import HFReplayer
from routing.hosts.hf_blocks import gate_of, moe_blocks, selection_bias
from routing.indexer.attention import register
from routing.indexer.record import IndexerRecord
from routing.record.sources import Native, Record, Recorded, ReplayRecorded, ReplayRecords

B, R, K, EXPERTS, TOP_K = 8, 48, 8, 8, 2
LENGTHS = (48, 48, 44, 40, 36, 33, 6, 0)
COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": K,
    "index_n_heads": 4, "index_head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "deepseek_v32": ("DeepseekV32", {}, (0, 1, 2, 3)),
    "glm_moe_dsa": ("GlmMoeDsa", {"indexer_types": ["full", "full", "shared", "full"]}, (0, 1, 3)),
}
SPARSE_LAYERS = 4
Data = dict[str, Any]


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(family: str, implementation: str | None = None) -> Any:
    prefix, options, _ = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{family}")
    torch.manual_seed(0)
    config = getattr(module, f"{prefix}Config")(**COMMON, **options)
    config._attn_implementation = implementation or register()
    model = getattr(module, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    for block in moe_blocks(model).values():
        gate_of(block).weight.data = torch.randn(gate_of(block).weight.shape, generator=generator)
        bias = selection_bias(block)
        assert bias is not None
        bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
    return model.eval()


def batch(seed: int = 0) -> Data:
    tokens = torch.randint(3, 64, (B, R + 1), generator=torch.Generator().manual_seed(seed))
    valid = torch.arange(R)[None] < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": tokens[:, :-1].contiguous(), "target_ids": tokens[:, 1:].contiguous(), "valid": valid}


def forward(model: Any, data: Data) -> Tensor:
    logits = model(input_ids=data["input_ids"], use_cache=False).logits
    return logits.log_softmax(-1).gather(-1, data["target_ids"][..., None])[..., 0]


def run(replayer: HFReplayer, model: Any, source: Any, data: Data, **options: Any) -> Tensor:
    with replayer.use(source, **data, **options):
        return forward(model, data)


def recorded(replayer: HFReplayer, model: Any, data: Data) -> tuple[Tensor, Recorded]:
    with torch.no_grad(), replayer.use(Record(), **data) as running:
        scored = forward(model, data)
    return scored, running.recorded()


Change = Callable[[int, np.ndarray, np.random.Generator], np.ndarray]


def records(data: Data, found: Recorded, change: Change | None = None) -> ReplayRecords:
    """What a pass recorded, as a rollout would record it; `change` gives other sets `[M, K]` of a sample."""
    made: list[RouteRecord | None] = []
    layers = tuple(sorted(found.experts))
    for b, n in enumerate(LENGTHS):
        if not n:
            made.append(None)
            continue
        experts = np.stack([found.experts[layer].view(B, R, TOP_K)[b, :n].numpy() for layer in layers], 1)
        sets = {layer: chosen[b, K:n].numpy() for layer, chosen in found.positions.items()}
        if change is not None:
            rng = np.random.default_rng(b)
            sets = {layer: change(b, own, rng) for layer, own in sets.items()}
        tokens = np.append(data["input_ids"][b, :n], data["target_ids"][b, n - 1])
        indexer = IndexerRecord.of(n, K, sets)
        made.append(RouteRecord(experts.astype(np.uint8), layers, EXPERTS, token_digest(tokens), indexer=indexer))
    return ReplayRecords(tuple(made))


def unrelated(sets: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    found = [np.sort(rng.choice(K + 1 + place, K, replace=False)) for place in range(len(sets))]
    return np.array(found, dtype=sets.dtype).reshape(-1, K)


def perturb(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))


def test_attention_that_says_what_it_sees_computes_as_transformers_does(family: str) -> None:
    data = batch()
    stock, ours = (forward(build(family, implementation), data) for implementation in ("sdpa", None))
    assert torch.equal(stock, ours)
    eager = forward(build(family, "eager"), data)
    torch.testing.assert_close(eager, ours, rtol=0, atol=5e-5)
    with pytest.raises(ReplayRefusedError, match="does not say which positions it sees"):
        HFReplayer(build(family, "sdpa"))


def test_a_record_gives_back_the_scores_of_its_pass_whatever_the_indexer_chooses_now(family: str) -> None:
    model, data, real = build(family), batch(), batch()["valid"]
    stock = forward(model, data).detach()
    replayer = HFReplayer(model)
    assert replayer.indexer_layer_ids == FAMILIES[family][2]
    scored, found = recorded(replayer, model, data)
    assert torch.equal(scored, stock)
    source = records(data, found)
    torch.testing.assert_close(run(replayer, model, source, data)[real], stock[real], rtol=0, atol=1e-5)
    report = replayer.report().indexer
    assert report is not None
    assert report.replayed == sum(LENGTHS) * SPARSE_LAYERS
    assert report.sets == sum(max(0, n - K) for n in LENGTHS) * len(FAMILIES[family][2])
    assert (report.flips, report.lost, report.lost_share) == (0, 0, 0.0)

    perturb(model)
    native = run(replayer, model, Native(), data).detach()
    assert float((native - stock)[real].abs().max()) > 0.01
    replayer.max_local_flip_rate = 1.0
    for way in (source, ReplayRecorded(found)):
        torch.testing.assert_close(run(replayer, model, way, data)[real], stock[real], rtol=0, atol=1e-5)
        moved = replayer.report().indexer
        assert moved is not None
        assert moved.flip_rate is not None
        assert moved.lost_share is not None
        assert moved.flip_rate > 0.9
        assert 0.5 < moved.lost_share < 1.3
    replayer.max_local_flip_rate = 0.3
    run(replayer, model, source, data)
    with pytest.raises(ReplayProofError, match="have little to do"):
        replayer.report()


def test_unrelated_sets_equal_an_indexer_that_returns_them(family: str) -> None:
    """And with checkpointing, whose recomputation sees the same."""
    data, real = batch(), batch()["valid"]
    model = build(family)
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    source = records(data, recorded(replayer, model, data)[1], lambda _s, own, rng: unrelated(own, rng))
    gradients = []
    for recomputes in (False, True):
        model = build(family).train()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        replayer = HFReplayer(model, max_local_flip_rate=1.0)
        replayed = run(replayer, model, source, data)
        replayed[real].sum().backward()
        report = replayer.report().indexer
        assert report is not None
        assert report.replayed == (1 + recomputes) * sum(LENGTHS) * SPARSE_LAYERS
        assert report.sets == sum(max(0, n - K) for n in LENGTHS) * len(FAMILIES[family][2])
        assert report.lost_share is not None
        assert 0.7 < report.lost_share < 1.3
        gradients.append(model.model.layers[0].self_attn.kv_b_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    stock = build(family, "sdpa")
    with pytest.MonkeyPatch.context() as patch:
        for layer in FAMILIES[family][2]:
            chosen = torch.arange(K).expand(B, R, K).clone()
            for b, record in enumerate(source.records):
                if record is not None and record.indexer is not None:
                    chosen[b, K : LENGTHS[b]] = torch.from_numpy(record.indexer.chosen(layer))
            indexer = stock.model.layers[layer].self_attn.indexer
            patch.setattr(indexer, "forward", lambda *_a, chosen=chosen, **_k: chosen.int())
        routes = [record and record.experts for record in source.records]
        hooks = [force(block, layer, routes, source) for layer, block in moe_blocks(stock).items()]
        by_hand = forward(stock, data)
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(replayed[real].detach(), by_hand[real].detach(), rtol=0, atol=1e-5)


def force(block: Any, layer: int, routes: Any, source: ReplayRecords) -> Any:
    """A hook that gives a gate's recorded experts their weights, by the published formula."""
    whole = torch.zeros(B, R, TOP_K, dtype=torch.int64)
    whole[..., 1] = 1
    for b, record in enumerate(source.records):
        if record is not None:
            whole[b, : LENGTHS[b]] = torch.from_numpy(routes[b][:, record.layer_ids.index(layer)].astype(np.int64))

    def hook(_gate: Any, _args: Any, output: Any) -> Any:
        scores = output[0].sigmoid().gather(1, whole.view(-1, TOP_K))
        return output[0], 2.5 * scores / (scores.sum(-1, keepdim=True) + 1e-20), whole.view(-1, TOP_K)

    return gate_of(block).register_forward_hook(hook)


def some(share: float) -> Change:
    """Unrelated sets in a share of the tokens of sample 2."""

    def change(sample: int, own: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if sample != 2:
            return own
        # The same tokens in every layer.
        hit = np.random.default_rng(5).permutation(len(own))[: max(1, round(share * len(own)))]
        wrong, other = own.copy(), unrelated(own, rng)
        wrong[hit] = other[hit]
        return wrong

    return change


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_wrong_sets_in_one_sample_are_found_and_the_sample_is_named(family: str, share: float) -> None:
    model, data = build(family), batch()
    replayer = HFReplayer(model)
    _, found = recorded(replayer, model, data)
    ids = range(100, 100 + B)
    with torch.no_grad():
        run(replayer, model, records(data, found), data, samples=ids)
        assert replayer.report().matched
        run(replayer, model, records(data, found, some(share)), data, samples=ids)
    with pytest.raises(ReplayProofError) as caught:
        replayer.report()
    # Wrong positions make other hidden states, of which routers choose otherwise: what is certain is told with that.
    fault = getattr(caught.value, "certain", None) or caught.value
    assert isinstance(fault, MisalignedError)
    assert re.search(r"(?s)of 1 samples.*sample 102: \d+ of \d+ tokens", str(fault))
    # Another pass of the step has the weights that sampled it, and judges it.
    later = replace(records(data, found, some(share)), at_sampling=(None, None, False, *[None] * 5))
    with torch.no_grad():
        run(replayer, model, later, data, samples=ids)
    assert replayer.report().indexer is not None


def test_positions_that_lack_or_are_of_another_model_are_refused(family: str) -> None:
    model, data = build(family), batch()
    replayer = HFReplayer(model)
    _, found = recorded(replayer, model, data)
    whole = records(data, found)
    first = whole.records[0]
    assert first is not None
    own = first.indexer
    assert own is not None
    others = (
        None,
        IndexerRecord(own.num_rows, own.top_k, own.layer_ids[1:], own.packed[1:]),
        IndexerRecord(own.num_rows, own.top_k - 1, own.layer_ids, own.packed),
        IndexerRecord(own.num_rows - 1, own.top_k, own.layer_ids, own.packed),
    )
    for other in others:
        wrong = replace(whole, records=(replace(first, indexer=other), *whole.records[1:]))
        with pytest.raises(RouteError, match="lacks positions") as error:
            run(replayer, model, wrong, data)
        assert error.value.reason == "positions"
    lenient = HFReplayer(build(family), missing="native")
    partly = replace(whole, records=(first.uncover(slice(0, 2)), *whole.records[1:]))
    with pytest.raises(RouteError, match="lacks positions"):
        run(lenient, model, partly, data)
    with pytest.raises(RouteError, match="has no positions"):
        run(replayer, model, ReplayRecorded(replace(found, positions={})), data)
    damaged = replace(own, packed=(own.packed[0][:-1], *own.packed[1:]))
    with pytest.raises(RouteError, match="damaged"):
        run(replayer, model, replace(whole, records=(replace(first, indexer=damaged), *whole.records[1:])), data)
    packed = Rows.packed(torch.tensor([0, R // 2, R]))
    with (
        pytest.raises(RouteError, match="padded rows only"),
        replayer.use_rows(Record(), packed, data["input_ids"][:1], data["target_ids"][:1]),
    ):
        pass


def test_attention_that_sees_something_else_stops(family: str) -> None:
    model, data = build(family), batch()
    replayer = HFReplayer(model)
    _, found = recorded(replayer, model, data)
    source = records(data, found)
    layer = model.model.layers[1].self_attn
    with torch.no_grad():
        deaf = layer.indexer.register_forward_hook(lambda _m, _a, out: out.roll(1, 1))
        run(replayer, model, source, data)
        # In GLM-5 a layer shares the choice of the one before.
        with pytest.raises(ReplayProofError, match=r"layer 1: .* tokens had to see recorded positions"):
            replayer.report()
        deaf.remove()
        quiet = model.model.register_forward_pre_hook(
            lambda _m, args, options: (args, {k: v for k, v in options.items() if k != "indexer_proof"}),
            with_kwargs=True,
        )
        with pytest.raises(ReplayProofError, match="sparse attention must be forwarded once"):
            run(replayer, model, source, data)
        quiet.remove()


@pytest.mark.parametrize("place", ["left", "whole"])
def test_rows_of_other_trainers(family: str, place: str) -> None:
    """Padding on the left, and rows that hold whole sequences."""
    model, data = build(family), batch()
    replayer = HFReplayer(model)
    scored, found = recorded(replayer, model, data)
    source = records(data, found)
    sequences = [torch.cat([data["input_ids"][b, :n], data["target_ids"][b, n - 1 : n]]) for b, n in enumerate(LENGTHS)]
    ids = torch.zeros(B, R + 1, dtype=torch.int64)
    mask = torch.zeros(B, R + 1, dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        length = len(sequence) if LENGTHS[b] else 0
        at = slice(R + 1 - length, R + 1) if place == "left" else slice(0, length)
        ids[b, at], mask[b, at] = sequence[:length], True
    rows = Rows.left_padded(mask) if place == "left" else Rows.right_padded(mask)
    with torch.no_grad(), replayer.use_rows(source, rows, ids):
        logits = model(
            input_ids=ids, attention_mask=mask.long(), position_ids=rows.position_ids(), use_cache=False
        ).logits.log_softmax(-1)
    report = replayer.report().indexer
    assert report is not None
    assert report.lost_share is not None
    assert report.lost_share < 0.05
    for b, n in enumerate(LENGTHS):
        first = R - n if place == "left" else 0
        got = logits[b, first : first + n].gather(-1, data["target_ids"][b, :n, None])[:, 0]
        torch.testing.assert_close(got, scored[b, :n], rtol=0, atol=1e-4)
