"""Replay on unpatched Hugging Face models of six families, against hand-written forced routing and natural routing."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from routing import ReplayProofError, ReplayRefusedError, RouteError, RouteRecord, token_digest
from routing.hf import HFReplayer, gate_of, moe_blocks, selection_bias
from routing.record.sources import Native, Record, ReplayRecorded, ReplayRecords
from tests.integration.rows import Rows

B, R, E, K, VOCAB = 3, 8, 8, 2, 64
LENGTHS = (8, 5, 3)
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": K, "max_position_embeddings": 32, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIGMOID = {
    "n_routed_experts": E, "n_shared_experts": 1, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": E, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 8,
                               "mlp_only_layers": [1], "decoder_sparse_step": 1}, (0, 2)),
    "olmoe": ("Olmoe", {"num_experts": E, "norm_topk_prob": False}, (0, 1, 2)),
    "mixtral": ("Mixtral", {"num_local_experts": E}, (0, 1, 2)),
    "deepseek_v3": ("DeepseekV3", {**SIGMOID, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
                                   "qk_nope_head_dim": 4, "v_head_dim": 8}, (1, 2)),
    "glm4_moe": ("Glm4Moe", {**SIGMOID, "head_dim": 8}, (1, 2)),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": E, "head_dim": 8, "rotary_dim": 4}, (0, 1, 2)),
    "gpt_oss": ("GptOss", {"num_local_experts": E, "head_dim": 8, "sliding_window": 4,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, (0, 1, 2)),
}  # fmt: skip

EVERY = FAMILIES | {
    "qwen3_next": ("Qwen3Next", {"num_experts": E, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
                                 "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                                 "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                                 "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
                   (0, 1, 2)),
}  # fmt: skip
"""With those whose packs transformers alone does not keep apart."""


@pytest.fixture(params=list(EVERY))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(family: str) -> Any:
    prefix, options, _ = EVERY[family]
    module = importlib.import_module(f"transformers.models.{family}")
    torch.manual_seed(0)
    model = getattr(module, f"{prefix}ForCausalLM")(getattr(module, f"{prefix}Config")(**(COMMON | options)))
    generator = torch.Generator().manual_seed(1)
    for block in moe_blocks(model).values():
        gate_of(block).weight.data = torch.randn(gate_of(block).weight.shape, generator=generator)
        if family == "gpt_oss":
            for tensor in (block.router.bias, block.experts.gate_up_proj_bias, block.experts.down_proj_bias):
                tensor.data = 0.3 * torch.randn(tensor.shape, generator=generator)
        if (bias := selection_bias(block)) is not None:
            bias.copy_(torch.linspace(-0.3, 0.3, E))
    return model.eval()


def batch(seed: int = 0) -> Rows:
    tokens = torch.randint(3, VOCAB, (B, R + 1), generator=torch.Generator().manual_seed(seed))
    valid = torch.arange(R)[None] < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": tokens[:, :-1].contiguous(), "target_ids": tokens[:, 1:].contiguous(), "valid": valid}


def records(layers: tuple[int, ...], data: Rows, routes_BRLK: np.ndarray) -> ReplayRecords:
    made = []
    for b, n in enumerate(LENGTHS):
        tokens = np.append(data["input_ids"][b, :n], data["target_ids"][b, n - 1])
        made.append(RouteRecord(routes_BRLK[b, :n].astype(np.uint8), layers, E, token_digest(tokens)))
    return ReplayRecords(tuple(made))


def random_routes(layers: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.argsort(np.random.default_rng(seed).random((B, R, len(layers), E)), axis=-1)[..., :K]


def forward(model: Any, data: Rows) -> Tensor:
    """Each target's log-prob `[B, R]`. Rows are padded on the right, so causal attention alone keeps padding out."""
    logits = model(input_ids=data["input_ids"], use_cache=False).logits
    return logits.log_softmax(-1).gather(-1, data["target_ids"][..., None])[..., 0]


def run(replayer: HFReplayer, model: Any, source: Any, data: Rows) -> Tensor:
    with replayer.use(source, **data):
        return forward(model, data)


def forced_by_hand(block: Any, ids_BRK: Tensor, family: str, hidden: Tensor) -> Any:
    """The block's output with given experts, one token and one expert at a time, from the published formulas."""
    logits = hidden.flatten(0, 1) @ gate_of(block).weight.T
    if family == "gpt_oss":
        logits = logits + block.router.bias
    rows = []
    for token, chosen, scores in zip(hidden.flatten(0, 1), ids_BRK.flatten(0, 1), logits, strict=True):
        if family in ("deepseek_v3", "glm4_moe", "minimax_m2"):
            weights = torch.sigmoid(scores)[chosen]
            weights = (1 if family == "minimax_m2" else 2.5) * weights / weights.sum()
        else:
            weights = torch.softmax(scores, 0)[chosen]
            weights = weights if family == "olmoe" else weights / weights.sum()
        parts = []
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            if family == "gpt_oss":
                parts.append(weight * clamped_expert(block.experts, expert, token))
                continue
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            parts.append(weight * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)))
        rows.append(torch.stack(parts).sum(0))
    out = torch.stack(rows).view_as(hidden)
    if family == "gpt_oss":
        return out, None
    if family == "qwen3_next":
        return out + torch.sigmoid(block.shared_expert_gate(hidden)) * block.shared_expert(hidden)
    return out + block.shared_experts(hidden) if hasattr(block, "shared_experts") else out


def clamped_expert(experts: Any, expert: int, token: Tensor) -> Tensor:
    """One expert of gpt-oss: gate and up columns alternate, both are clamped, up is shifted by 1.

    The product is `gate * sigmoid(1.702 gate)`.
    """
    both = token @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
    gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ experts.down_proj[expert] + experts.down_proj_bias[expert]


def test_layer_ids_are_the_models_own(family: str) -> None:
    assert HFReplayer(build(family)).layer_ids == EVERY[family][2]


def test_random_routes_equal_forced_routing_written_out(family: str) -> None:
    model, data, layers = build(family), batch(), EVERY[family][2]
    routes = random_routes(layers)
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    replayed = run(replayer, model, records(layers, data, routes), data)
    replayed[data["valid"]].sum().backward()
    router_gradients = [gate_of(block).weight.grad.clone() for block in moe_blocks(model).values()]
    report = replayer.report()
    assert report.replayed == report.matched == sum(LENGTHS) * len(layers)
    assert (report.local_flip_rate or 0.0) > 0.7
    replayer.detach()
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        for place, block in enumerate(moe_blocks(model).values()):
            ids = torch.from_numpy(routes[:, :, place])
            patch.setattr(
                block, "forward", lambda hidden, block=block, ids=ids: forced_by_hand(block, ids, family, hidden)
            )
        by_hand = forward(model, data)
        by_hand[data["valid"]].sum().backward()
    torch.testing.assert_close(replayed[data["valid"]], by_hand[data["valid"]], rtol=1e-4, atol=1e-4)
    for ours, block in zip(router_gradients, moe_blocks(model).values(), strict=True):
        assert ours.abs().sum() > 0
        torch.testing.assert_close(ours, gate_of(block).weight.grad, rtol=1e-3, atol=1e-4)


def test_natural_routes_change_nothing_and_recorded_ones_are_exact(family: str) -> None:
    model, data, layers = build(family), batch(), EVERY[family][2]
    stock = forward(model, data).detach()
    replayer = HFReplayer(model)
    with torch.no_grad(), replayer.use(Record(), **data) as running:
        assert torch.equal(forward(model, data), stock)
    recorded = running.recorded()
    # Gates that choose groups of experts first have no margin.
    assert set(recorded.margins) == (set() if "n_group" in EVERY[family][1] else set(layers))
    for margin in recorded.margins.values():
        assert margin.shape == (B * R,)
        assert 0 < margin.mean() < 1
    assert torch.equal(run(replayer, model, ReplayRecorded(recorded), data), stock)
    whole = torch.stack([recorded.experts[layer].view(B, R, K) for layer in layers], 2).numpy()
    real = data["valid"]
    replayed = run(replayer, model, records(layers, data, whole), data)
    torch.testing.assert_close(replayed[real], stock[real], rtol=1e-5, atol=1e-5)
    report = replayer.report()
    assert (report.local_flips, report.applied_fraction) == (0, 1.0)
    assert report.replayed == 2 * sum(LENGTHS) * len(layers)
    with pytest.raises(RouteError) as error:
        run(replayer, model, ReplayRecorded(recorded), batch(1))
    assert error.value.reason == "digest"


def test_checkpointing_recomputes_with_the_routes_of_its_micro_batch() -> None:
    layers, gradients = EVERY["qwen3_moe"][2], []
    for checkpointing in (False, True):
        model = build("qwen3_moe").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        replayer = HFReplayer(model, max_local_flip_rate=1.0)
        outputs = [
            run(replayer, model, records(layers, batch(s), random_routes(layers, s)), batch(s)) for s in range(3)
        ]
        for output in outputs:
            output.square().mean().backward()
        report = replayer.report()
        assert report.replayed == (1 + checkpointing) * 3 * sum(LENGTHS) * len(layers)
        gradients.append([block.gate.weight.grad for block in moe_blocks(model).values()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-5, atol=1e-7)


def test_tokens_without_routes_are_refused_or_left_to_the_gate() -> None:
    model, data, layers = build("qwen3_moe"), batch(), EVERY["qwen3_moe"][2]
    whole = records(layers, data, random_routes(layers))
    partial = ReplayRecords(tuple(r and r.uncover(slice(2, None)) for r in whole.records))
    with pytest.raises(RouteError, match="no recorded routes"):
        run(HFReplayer(model), model, partial, data)
    other = build("qwen3_moe")
    replayer = HFReplayer(other, max_local_flip_rate=1.0, missing="native")
    seen: dict[int, Tensor] = {}
    for layer, block in moe_blocks(other).items():
        block.experts.register_forward_pre_hook(lambda _m, args, layer=layer: seen.__setitem__(layer, args[1]))
    with replayer.use(partial, **data):
        forward(other, data)
    report = replayer.report()
    assert report.replayed == 2 * B * len(layers)
    assert report.native == (sum(LENGTHS) - 2 * B) * len(layers)
    for b, n in enumerate(LENGTHS):
        record = whole.records[b]
        assert record is not None
        np.testing.assert_array_equal(seen[0].view(B, R, K)[b, :2], record.experts[:2, 0])
        assert (seen[0].view(B, R, K)[b, 2:n].numpy() != record.experts[2:, 0]).any()


def test_what_goes_wrong_stops() -> None:
    model, data, layers = build("qwen3_moe"), batch(), EVERY["qwen3_moe"][2]
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    source = records(layers, data, random_routes(layers))
    with pytest.raises(ReplayProofError, match="outside `use`"):
        forward(model, data)
    with pytest.raises(ReplayProofError, match="once inside"):
        run(replayer, build("qwen3_moe"), source, data)
    with pytest.raises(ReplayProofError, match="the router was given them for 0"):
        replayer.report()
    swapped = ReplayRecords((source.records[0], *[replace(r, token_digest=b"0" * 16) for r in source.records[1:] if r]))
    with pytest.raises(RouteError) as error:
        run(replayer, model, swapped, data)
    assert error.value.reason == "digest"
    deaf = model.model.layers[2].mlp.experts.register_forward_pre_hook(
        lambda _m, args: (args[0], (args[1] + 1) % E, args[2]), prepend=True
    )
    run(replayer, model, source, data)
    with pytest.raises(ReplayProofError, match="layer 2"):
        replayer.report()
    deaf.remove()
    model.model.layers[0].mlp = build("qwen3_moe").model.layers[0].mlp
    with pytest.raises(ReplayProofError, match="rebuilt"):
        run(replayer, model, Native(), data)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda weights, _others: weights.detach(), "layer 2: .* the router got none"),
        (lambda weights, others: others, "layer 2: .* not those of their replayed"),
    ],
    ids=["no gradient", "other weights"],
)
def test_gates_that_are_not_replayed_stop(family: str, change: Any, match: str) -> None:
    model, data, layers = build(family), batch(), EVERY[family][2]
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    source = records(layers, data, random_routes(layers))
    hook = model.model.layers[2].mlp.experts.register_forward_pre_hook(
        lambda _m, args: (args[0], args[1], change(args[2], args[2].roll(1, 0))), prepend=True
    )
    run(replayer, model, source, data)[data["valid"]].sum().backward()
    with pytest.raises(ReplayProofError, match=match):
        replayer.report()
    hook.remove()
    run(replayer, model, source, data)[data["valid"]].sum().backward()
    assert replayer.report().applied_fraction == 1.0


@pytest.mark.parametrize(("family", "normalised"), [("mixtral", True), ("olmoe", False)])
def test_a_gate_of_one_expert_needs_a_gradient_unless_its_weight_is_always_one(family: str, normalised: bool) -> None:
    model, data, layers = build(family), batch(), EVERY[family][2]
    for layer in layers:
        model.model.layers[layer].mlp.gate.top_k = 1
        model.model.layers[layer].mlp.experts.register_forward_pre_hook(
            lambda _m, args: (*args[:2], args[2].detach()), prepend=True
        )
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    one = records(layers, data, random_routes(layers)[..., :1])
    run(replayer, model, one, data)[data["valid"]].sum().backward()
    if normalised:
        assert replayer.report().applied_fraction == 1.0
    else:
        with pytest.raises(ReplayProofError, match="the router got none"):
            replayer.report()


def test_shifted_rows_lift_the_local_flip_rate() -> None:
    model, data, layers = build("qwen3_moe"), batch(), EVERY["qwen3_moe"][2]
    replayer = HFReplayer(model)
    with torch.no_grad(), replayer.use(Record(), **data) as running:
        forward(model, data)
    whole = torch.stack([running.recorded().experts[layer].view(B, R, K) for layer in layers], 2).numpy()
    run(replayer, model, records(layers, data, np.roll(whole, 1, axis=1)), data)
    with pytest.raises(ReplayProofError, match="live router"):
        replayer.report()


def test_unknown_gates_are_refused() -> None:
    model, data, layers = build("olmoe"), batch(), EVERY["olmoe"][2]
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _m, _a, out: (out[0], 1.5 * out[1], out[2]))
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    run(replayer, model, records(layers, data, random_routes(layers)), data)
    with pytest.raises(ReplayProofError, match="not supported"):
        replayer.report()
    plain = build("mixtral")
    plain.model.layers[0].mlp.gate = torch.nn.Linear(32, E)
    with pytest.raises(ReplayRefusedError, match="transformers 5"):
        HFReplayer(plain)
