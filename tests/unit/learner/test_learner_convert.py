"""Hugging Face <-> Megatron tensors: literal packings, exact inverses, names under both layer kinds."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.megatron.convert import (
    Heads,
    Names,
    expert_number,
    is_expert,
    is_gated,
    join,
    pack,
    part,
    plain,
    split_dim,
    unpack,
    with_expert,
    with_layer,
)
from moe_trm.models.family import Link
from moe_trm.models.hf_config import num_experts, read_hf_config
from moe_trm.models.registry import FAMILIES, MOE_FAMILIES, family_of
from moe_trm.models.tensors import parameters, tensor_names
from moe_trm.models.tiny.families import make_family

LOCAL, FUSED = (
    "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight",
    "decoder.layers.3.mlp.experts.linear_fc1.weight7",
)


QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "num_experts": 3, "mlp_only_layers": [0]}


def link(name: str) -> Link:
    return Names({**QWEN3, "num_hidden_layers": 13}).link(name)


def test_qkv_rows_are_interleaved_by_group() -> None:
    # 4 query heads, 2 groups, head_dim 1: the rows of one group are its 2 queries, its key, its value.
    query, key, value = (
        torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        torch.tensor([[10.0], [20.0]]),
        torch.tensor([[100.0], [200.0]]),
    )
    packed = pack("qkv", [query, key, value], Heads(groups=2, head_dim=1))
    assert packed.flatten().tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_gated_rows_are_gate_then_up() -> None:
    gate, up = torch.ones(2, 3), torch.zeros(2, 3)
    assert pack("gated", [gate, up], Heads(1, 1)).tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 2


def test_columns_that_take_turns_become_gate_rows_then_up_rows() -> None:
    gate_up = torch.tensor([[1, 10, 2, 20], [3, 30, 4, 40]])  # two inputs, gate and up of two columns
    packed = pack("alternating", [gate_up], Heads(1, 1))
    assert packed.tolist() == [[1, 3], [2, 4], [10, 30], [20, 40]]
    assert pack("alternating", [gate_up[0]], Heads(1, 1)).tolist() == [1, 2, 10, 20]
    assert pack("transposed", [gate_up], Heads(1, 1)).tolist() == [[1, 3], [10, 30], [2, 4], [20, 40]]


def test_expert_names_of_both_layer_kinds_mean_the_same_tensors() -> None:
    names = ("model.layers.3.mlp.experts.7.gate_proj.weight", "model.layers.3.mlp.experts.7.up_proj.weight")
    assert plain(FUSED) == plain(LOCAL) == LOCAL
    assert link(LOCAL) == Link(names, "gated")


@pytest.mark.parametrize(
    ("fused", "expected"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.linear_fc2.bias11", "mlp.experts.local_experts.11.linear_fc2.bias"),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
        ("mlp.router.weight", "mlp.router.weight"),
    ],
)
def test_fused_layers_in_plain_names(fused: str, expected: str) -> None:
    assert plain(f"decoder.layers.12.{fused}") == f"decoder.layers.12.{expected}"


@pytest.mark.parametrize("name", [LOCAL, LOCAL.replace("weight", "bias")])
def test_expert_numbers_are_read_and_replaced(name: str) -> None:
    assert is_expert(name)
    assert expert_number(name) == 7
    assert with_expert(name, 12) == name.replace("7", "12")


def test_dense_and_shared_parameters_are_not_experts() -> None:
    for name in ("output_layer.weight", "decoder.layers.3.mlp.router.weight", "decoder.layers.7.mlp.linear_fc1.weight"):
        assert not is_expert(name)
    assert link("decoder.layers.3.mlp.router.weight") == Link(("model.layers.3.mlp.gate.weight",))


def test_unknown_parameter_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="no Hugging Face counterpart"):
        link("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")


def test_gate_and_up_rows_are_cut_one_by_one() -> None:
    packed = torch.arange(8)[:, None]  # gate rows 0..3, up rows 4..7
    assert [part(LOCAL, packed, 0, 2, rank).flatten().tolist() for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("output_layer.weight", 0),
        ("decoder.layers.1.self_attention.linear_proj.weight", 1),
        ("decoder.layers.1.self_attention.linear_qkv.weight", 0),
        (LOCAL, 0),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_join_is_the_exact_inverse_of_part(name: str, dim: int, size: int) -> None:
    whole = torch.randn(16, 8)
    assert torch.equal(join(name, [part(name, whole, dim, size, rank) for rank in range(size)], dim), whole)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("embedding.word_embeddings.weight", 0),
        ("output_layer.weight", 0),
        ("decoder.layers.1.self_attention.linear_qkv.weight", 0),
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", None),
        ("decoder.layers.1.self_attention.linear_proj.weight", 1),
        ("decoder.layers.1.self_attention.q_layernorm.weight", None),
        ("decoder.layers.1.mlp.router.weight", None),
        ("decoder.layers.1.mlp.linear_fc2.weight", 1),
        (LOCAL, 0),
        (LOCAL.replace("fc1", "fc2"), 1),
        ("decoder.layers.1.self_attention.linear_qkv.bias", 0),
        ("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", 0),
        ("decoder.layers.1.mlp.router.expert_bias", None),
        ("decoder.layers.1.mlp.router.bias", None),
        ("decoder.layers.1.self_attention.linear_proj.bias", None),
        ("decoder.layers.1.self_attention.core_attention.softmax_offset", 0),
        (LOCAL.replace("weight", "bias"), 0),
        (LOCAL.replace("weight", "bias").replace("fc1", "fc2"), None),
    ],
)
def test_what_tensor_parallelism_cuts(name: str, dim: int | None) -> None:
    assert split_dim(name) == dim


def test_layer_numbers_count_over_the_whole_model() -> None:
    assert with_layer("decoder.layers.1.mlp.router.weight", 4) == "decoder.layers.5.mlp.router.weight"
    assert with_layer(LOCAL, 2) == LOCAL.replace("layers.3", "layers.5")
    assert with_layer("output_layer.weight", 4) == "output_layer.weight"


def test_names_of_the_whole_model_are_those_of_the_checkpoint() -> None:
    family = family_of(QWEN3, "config.json")
    tensors = [hf for _, found in parameters(family, QWEN3) for hf in found.hf_names]
    assert len(tensors) == len(set(tensors)) == 3 + 2 * 8 + 3 + 1 + 3 * 3
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    assert "model.layers.1.mlp.experts.2.down_proj.weight" in tensors
    assert "lm_head.weight" not in tensor_names(family, {**QWEN3, "tie_word_embeddings": True})


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_tensor_of_a_family_has_one_place_and_comes_back_bitwise(tmp_path: Path, family: str) -> None:
    hf = read_hf_config(make_family(family, tmp_path))
    checkpoint, names, back = HfCheckpoint(tmp_path), Names(hf), dict[str, torch.Tensor]()
    rows = defaultdict[str, dict[int, torch.Tensor]](dict)
    heads = Heads(groups=int(hf["num_key_value_heads"]), head_dim=int(hf.get("head_dim") or 16))
    for name, found in parameters(FAMILIES[family], hf):
        assert names.link(name) == found
        assert is_gated(name) == (found.packing in ("gated", "alternating"))
        if found.row is None:
            parts = [checkpoint.read(hf_name) for hf_name in found.hf_names]
        else:
            parts = [checkpoint.read_row(hf_name, found.row, num_experts(hf)) for hf_name in found.hf_names]
        tensors = unpack(found.packing, pack(found.packing, parts, heads), heads)
        for hf_name, tensor in zip(found.hf_names, tensors, strict=True):
            assert tensor.is_contiguous()
            if found.row is None:
                back[hf_name] = tensor
            else:
                rows[hf_name][found.row] = tensor
    back |= {name: torch.stack([found[row] for row in range(len(found))]) for name, found in rows.items()}
    assert back.keys() == checkpoint.names
    assert all(torch.equal(tensor, checkpoint.read(name)) for name, tensor in back.items())
