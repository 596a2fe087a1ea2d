"""Gates of transformers' families are understood when hooks are attached, or refused there with what was found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe_trm.learner.deepspeed.conformance import own_choice
from routing.errors import ReplayRefusedError
from routing.hf import HFReplayer, gate_of, moe_blocks
from routing.record.record import RouteRecord, token_digest
from routing.record.sources import Record, ReplayRecorded, ReplayRecords

E, K, VOCAB, NUM_TOKENS = 8, 2, 40, 12
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": K, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "granitemoe": {"num_local_experts": E},
    "granitemoe_swa": {"num_local_experts": E},
    "deepseek_v2": {"n_routed_experts": E, "n_shared_experts": 1, "moe_intermediate_size": 16, "q_lora_rank": 8,
                    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                    "num_key_value_heads": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
                    "topk_method": "greedy"},
    "hy_v3": {"num_local_experts": E, "num_shared_experts": 1, "moe_intermediate_size": 16,
              "router_scaling_factor": 2.5},
    "qwen2_moe": {"num_experts": E, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "ernie4_5_moe": {"moe_num_experts": E, "moe_k": K, "moe_intermediate_size": 16},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "phimoe": ({"num_local_experts": E}, "functions of its logits and ids"),
    "llama4_text": (
        {"num_local_experts": E, "num_experts_per_tok": 1, "intermediate_size_mlp": 16, "interleave_moe_layer_step": 1},
        r"its experts get \(float32 \[512, 32\]\)",
    ),
    "inkling_text": (
        {"n_routed_experts": E, "n_shared_experts": 1, "moe_intermediate_size": 16},
        "functions of its logits and ids",
    ),
    "deepseek_v4": ({"n_routed_experts": E, "moe_intermediate_size": 16}, "cannot be replayed"),
}


def build(family: str, options: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(COMMON | options))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def gradients(model: nn.Module) -> list[Tensor]:
    return [gate_of(block).weight.grad.clone() for block in moe_blocks(model).values()]


@pytest.mark.parametrize("family", list(UNDERSTOOD))
def test_a_gate_is_understood_whatever_the_order_and_the_formula(family: str) -> None:
    """Recorded routes give the same bits, and random ones what the gate's own code gives under that choice."""
    model = build(family, UNDERSTOOD[family])
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    tokens = torch.randint(3, VOCAB, (1, NUM_TOKENS + 1), generator=torch.Generator().manual_seed(0))
    rows: dict[str, Any] = {
        "input_ids": tokens[:, :-1],
        "target_ids": tokens[:, 1:],
        "valid": torch.ones(1, NUM_TOKENS).bool(),
    }

    def scores() -> Tensor:
        logits: Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[0, :, 0]

    with torch.no_grad(), replayer.use(Record(), **rows) as running:
        native = scores()
    with torch.no_grad(), replayer.use(ReplayRecorded(running.recorded()), **rows):
        assert torch.equal(scores(), native)
    layers = replayer.layer_ids
    routes = np.argsort(np.random.default_rng(1).random((NUM_TOKENS, len(layers), E)), axis=-1)[..., :K]
    record = RouteRecord(routes.astype(np.uint8), layers, E, token_digest(tokens[0].numpy()))
    with replayer.use(ReplayRecords((record,)), **rows):
        replayed = scores()
    replayed.sum().backward()
    report = replayer.report()
    assert report.applied_fraction == 1.0
    replayer.detach()
    of_replay = gradients(model)
    model.zero_grad()
    with own_choice(model, routes):
        by_gate = scores()
    by_gate.sum().backward()
    torch.testing.assert_close(replayed, by_gate, rtol=0, atol=1e-5)
    assert (by_gate.detach() - native).abs().max() > 1e-4
    for ours, expected in zip(of_replay, gradients(model), strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", list(REFUSED))
def test_a_gate_that_breaks_the_contract_is_refused_at_attach(family: str) -> None:
    options, problem = REFUSED[family]
    with pytest.raises(ReplayRefusedError, match=problem):
        HFReplayer(build(family, options))


def test_attaching_changes_nothing_and_draws_no_number() -> None:
    model = build("granitemoe", UNDERSTOOD["granitemoe"])
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    hooks = [len(gate_of(block)._forward_hooks) for block in moe_blocks(model).values()]
    HFReplayer(model).detach()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(gate_of(block)._forward_hooks) for block in moe_blocks(model).values()] == hooks


def test_layers_of_unlike_sizes_are_refused() -> None:
    model = build("qwen2_moe", UNDERSTOOD["qwen2_moe"])
    list(moe_blocks(model).values())[1].gate.top_k = K + 1
    with pytest.raises(ReplayRefusedError, match="different numbers of experts"):
        HFReplayer(model)


def test_experts_without_a_gate_beside_them_are_refused() -> None:
    model = build("qwen2_moe", UNDERSTOOD["qwen2_moe"])
    block = model.model.layers[1].mlp
    model.model.layers[1].mlp = nn.ModuleDict({"inner": block})
    with pytest.raises(ReplayRefusedError, match=r"layers\.1\.mlp\.inner\.experts are experts without a gate"):
        HFReplayer(model)
