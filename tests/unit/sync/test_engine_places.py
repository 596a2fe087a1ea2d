"""Names and forms under which the engine holds tensors: its checksums are of these."""

from __future__ import annotations

import hashlib

import torch

from moe_trm.rollout.sglang.checksum import EngineChecksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape, engine_place
from moe_trm.sync.rounding import Rounding


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def test_matrices_of_an_expert_by_either_name() -> None:
    for prefix, names in (("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))):
        stem = f"model.layers.0.{prefix}.experts"
        places = [engine_place(f"{stem}.5.{name}.weight") for name in names]
        assert places == [(f"{stem}.w13_weight", (5, 0)), (f"{stem}.w13_weight", (5, 1)), (f"{stem}.w2_weight", (5, 0))]


def test_biases_that_choose_experts_are_pushed_and_hashed_in_float32() -> None:
    bias, weight = "model.layers.1.mlp.gate.e_score_correction_bias", "model.norm.weight"
    assert (Rounding("bfloat16").dtype_of(bias), Rounding("bfloat16").dtype_of(weight)) == ("float32", "bfloat16")
    values = torch.tensor([0.1, 0.2])
    checksums = EngineChecksums([bias], EngineShape("bfloat16"))
    checksums.add(bias, values)
    assert checksums.result()[0] == {bias: sha(values)}


def test_the_router_of_minimax_m2_is_pushed_as_the_others_and_held_in_float32() -> None:
    """Mixtral's has the same name, and the dtype of the engine."""
    stem, values = "model.layers.1.block_sparse_moe.", torch.tensor([[0.1], [0.2]])
    gate, bias = f"{stem}gate.weight", f"{stem}e_score_correction_bias"
    for names, held in (([gate, bias], values.bfloat16().float()), ([gate], values.bfloat16().view(torch.int16))):
        checksums = EngineChecksums(names, EngineShape("bfloat16"))
        for name in names:
            checksums.add(name, values)
        assert checksums.result()[0][gate] == sha(held)


def test_compressed_queries_and_keys_of_latent_attention_are_one_tensor() -> None:
    prefix = "model.layers.0.self_attn."
    queries, keys = f"{prefix}q_a_proj.weight", f"{prefix}kv_a_proj_with_mqa.weight"
    checksums, values = EngineChecksums([keys, queries], EngineShape("float32")), torch.tensor([[1.0], [2.0]])
    checksums.add(keys, values[1:])
    checksums.add(queries, values[:1])
    digest = sha(values)
    assert checksums.result()[0] == {f"{prefix}fused_qkv_a_proj_with_mqa.weight": digest}


def test_keys_alone_of_latent_attention_stay_a_tensor_of_their_own() -> None:
    prefix = "model.layers.0.self_attn."
    names = [f"{prefix}q_proj.weight", f"{prefix}kv_a_proj_with_mqa.weight"]
    assert EngineChecksums(names, EngineShape("float32"))._order.keys() == set(names)


def test_matrices_of_all_experts_in_one_tensor_are_hashed_as_the_engine_transposes_and_holds_them() -> None:
    prefix, numbers = "model.layers.0.mlp.experts.", torch.arange(1.0, 13.0).reshape(2, 2, 3) + 2**-10
    checksums = EngineChecksums(
        [f"{prefix}gate_up_proj", f"{prefix}down_proj_bias", "model.layers.0.self_attn.sinks"], EngineShape("float32")
    )
    checksums.add(f"{prefix}gate_up_proj", numbers)
    checksums.add(f"{prefix}down_proj_bias", numbers[0])
    checksums.add("model.layers.0.self_attn.sinks", numbers[0, 0])
    assert checksums.result()[0] == {
        f"{prefix}w13_weight": sha(numbers.transpose(1, 2).contiguous()),
        f"{prefix}w2_weight_bias": sha(numbers[0]),
        "model.layers.0.self_attn.sinks": sha(numbers[0, 0].bfloat16().view(torch.int16)),
    }
    low = EngineChecksums([f"{prefix}down_proj_bias"], EngineShape("bfloat16"))
    low.add(f"{prefix}down_proj_bias", numbers[0])
    assert low.result()[0] == {f"{prefix}w2_weight_bias": sha(numbers[0].bfloat16().float())}


def test_a_hybrid_has_attention_without_a_module_and_projections_in_two_tensors() -> None:
    layer = "model.layers.3."
    names = [f"{layer}self_attn.{name}.weight" for name in ("q_proj", "v_proj", "o_proj", "k_norm")]
    pushed = {*names, f"{layer}mlp.shared_expert_gate.weight"}
    expected = [("qkv_proj", (0, 0)), ("qkv_proj", (0, 2)), ("o_proj", (0, 0)), ("k_norm", (0, 0))]
    assert [engine_place(name, pushed) for name in names] == [(f"{layer}{to}.weight", part) for to, part in expected]
    assert engine_place(names[0], names)[0] == f"{layer}self_attn.qkv_proj.weight"
    stem = "model.layers.0.linear_attn."
    places = [engine_place(f"{stem}in_proj_{each}.weight") for each in ("qkv", "z", "b", "a", "qkvz", "ba")]
    assert places == [
        (f"{stem}in_proj_{to}.weight", (0, part))
        for to, part in (("qkvz", 0), ("qkvz", 1), ("ba", 0), ("ba", 1), ("qkvz", 0), ("ba", 0))
    ]


def test_decays_are_held_in_float32() -> None:
    name, values = "model.layers.0.linear_attn.A_log", torch.tensor([0.1, 0.2])
    checksums = EngineChecksums([name], EngineShape("bfloat16"))
    checksums.add(name, values)
    assert checksums.result()[0] == {name: sha(values.bfloat16().float())}


def test_routers_of_glm_are_held_in_float32() -> None:
    name, values = "model.layers.1.mlp.gate.weight", torch.tensor([[0.1, 0.2]])
    found = {}
    for architecture in ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM", ""):
        checksums = EngineChecksums([name], EngineShape("bfloat16", architecture=architecture))
        checksums.add(name, values)
        found[architecture] = checksums.result()[0][name]
    assert found["Glm4MoeForCausalLM"] == found["Glm4MoeLiteForCausalLM"] == sha(values.bfloat16().float())
    assert found["DeepseekV3ForCausalLM"] == found[""] != sha(values.bfloat16().float())


def test_norms_of_a_hybrid_are_held_as_offsets_and_as_sums() -> None:
    """But for the gated norm of the delta rule, whose weight is no offset."""
    layer, values = "model.layers.0.", torch.tensor([0.1, 0.2])
    norms = [f"{layer}input_layernorm.weight", f"{layer}self_attn.q_norm.weight", "model.norm.weight"]
    plain = [f"{layer}linear_attn.norm.weight", f"{layer}mlp.shared_expert_gate.weight"]
    checksums = EngineChecksums([*norms, *plain], EngineShape("bfloat16"))
    low = values.bfloat16()
    data = memoryview(bytearray(low.view(torch.uint8).numpy().tobytes()))
    for name in (*norms, *plain):
        assert checksums.add_bytes(name, data, torch.bfloat16) is (name in plain)
        if name in norms:
            checksums.add(name, values)
    held = [name.replace(".self_attn", "") for name in norms]
    sums = {name.replace("weight", "gemma_weight"): sha((low + 1).view(torch.int16)) for name in held}
    assert checksums.result()[0] == dict.fromkeys([*held, *plain], sha(low.view(torch.int16))) | sums
