"""Slices of ranks on numbers small enough to write down, and the ranks that hold what."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from moe_trm.errors import SyncError
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.checksum import EngineChecksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.rollout.sglang.served_shape import UNKNOWN, shape_of, unpredicted
from moe_trm.rollout.sglang.slices import Ranks, Slicing

MATRIX = torch.arange(24.0).reshape(8, 3)
EIGHT = Ranks(8, attention=8, experts=8, shared=8, dense=8, embedding=8, head=8)
MODEL = ServedModel("Qwen3MoeForCausalLM", 250, 2, (0, 1), 4, 2, num_kv_heads=2, delta_rows=(2, 2, 4))


def pieces(cut: Slicing, ranks: Ranks, tensor: Tensor = MATRIX) -> list[list[float]]:
    """The first column of what each rank holds."""
    number = cut.pieces(ranks)
    return [
        cut.piece(tensor, cut.piece_of(rank, ranks), number).reshape(-1, tensor.shape[-1])[:, 0].tolist()
        for rank in range(ranks.total)
    ]


def test_rows_and_columns_and_whole_tensors() -> None:
    assert pieces(Slicing(), EIGHT) == [MATRIX[:, 0].tolist()] * 8
    assert pieces(Slicing(0), EIGHT) == [[3.0 * row] for row in range(8)]
    assert torch.equal(Slicing(1).piece(MATRIX, 2, 3), MATRIX[:, 2:])
    assert Slicing(0).pieces(Ranks()) == 1


def test_neighbours_hold_the_same_heads_where_there_are_fewer_heads_than_ranks() -> None:
    assert pieces(Slicing(0, heads=2), EIGHT) == [[0.0, 3.0, 6.0, 9.0]] * 4 + [[12.0, 15.0, 18.0, 21.0]] * 4
    assert pieces(Slicing(0, heads=16), EIGHT) == pieces(Slicing(0), EIGHT)


def test_groups_of_attention_repeat() -> None:
    """Eight ranks in four groups, each of which has all heads."""
    assert pieces(Slicing(0), EIGHT._replace(attention=2)) == [[0.0, 3.0, 6.0, 9.0], [12.0, 15.0, 18.0, 21.0]] * 4


def test_sections_are_cut_one_by_one() -> None:
    two = Ranks(2, attention=2)
    assert pieces(Slicing(0, sections=(2, 2, 4)), two) == [[0.0, 6.0, 12.0, 15.0], [3.0, 9.0, 18.0, 21.0]]
    with pytest.raises(ValueError, match="sections"):
        Slicing(0, sections=(2, 2)).piece(MATRIX, 0, 2)


def test_rows_of_a_vocabulary_are_padded_before_they_are_cut() -> None:
    """To 8 rows for one rank; three ranks do not divide 8, and so to 24."""
    vocabulary, cut = torch.arange(1.0, 6.0)[:, None], Slicing(0, "embedding", multiple=8)
    assert pieces(cut, Ranks(), vocabulary) == [[1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0]]
    two, three = Ranks(2, embedding=2), Ranks(3, embedding=3)
    assert pieces(cut, two, vocabulary) == [[1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 0.0, 0.0]]
    assert pieces(cut, three, vocabulary) == [[1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0], [0.0] * 8, [0.0] * 8]


def test_a_bias_that_is_added_once_is_zero_elsewhere() -> None:
    ranks = Ranks(4, experts=2)
    assert pieces(Slicing(None, "experts", once=True), ranks) == [MATRIX[:, 0].tolist(), [0.0] * 8] * 2


def test_experts_are_whole_or_in_slices() -> None:
    """Eight ranks in two groups of four: each group has half of the experts, each rank a slice of them."""
    ranks = EIGHT._replace(experts=4)
    held = [[expert for expert in range(6) if ranks.holds(rank, expert, 6)] for rank in range(8)]
    assert held == [[0, 1, 2]] * 4 + [[3, 4, 5]] * 4
    assert all(EIGHT.holds(rank, expert, 6) for rank in range(8) for expert in range(6))


def test_pieces_that_are_not_equal_are_refused_by_name() -> None:
    checksums = EngineChecksums(["model.layers.0.self_attn.o_proj.weight"], EngineShape("float32", ranks=EIGHT))
    with pytest.raises(SyncError, match="equal pieces") as caught:
        checksums.add("model.layers.0.self_attn.o_proj.weight", MATRIX)
    assert caught.value.where == "model.layers.0.self_attn.o_proj.weight"


def test_what_two_ranks_hold_of_fused_tensors() -> None:
    """q, k and v of two heads and one, and four experts on two ranks."""
    shape = EngineShape("float32", ranks=Ranks(2, attention=2, experts=1), kv_heads=1, num_experts=2)
    attention, experts = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    q, k, v = torch.arange(4.0)[:, None], torch.full((2, 1), 9.0), torch.full((2, 1), 8.0)
    up = [torch.full((1, 2), 10.0 + expert) for expert in range(2)]
    tensors = {f"{attention}.{name}_proj.weight": tensor for name, tensor in zip("qkv", (q, k, v), strict=True)}
    tensors |= {f"{experts}.{expert}.up_proj.weight": tensor for expert, tensor in enumerate(up)}
    checksums = EngineChecksums(tensors, shape)
    for name, tensor in tensors.items():
        checksums.add(name, tensor)
    assert checksums.result() == [
        {
            f"{attention}.qkv_proj.weight": sha(torch.cat([q[2 * rank : 2 * rank + 2], k, v])),
            f"{experts}.w13_weight": sha(up[rank]),
        }
        for rank in range(2)
    ]


def test_the_shape_of_a_server_follows_from_what_it_says() -> None:
    plain = {"device": "cuda", "tp_size": 8, "ep_size": 2, "moe_runner_backend": "triton_kernel"}
    shape = shape_of(plain, MODEL, "bfloat16", {"model.layers.0.mlp.shared_experts.gate_up_proj.weight"})
    assert shape.ranks == EIGHT._replace(experts=4)
    assert (shape.device, shape.kv_heads, shape.delta_rows, shape.num_experts) == ("cuda", 2, (2, 2, 4), 4)
    assert not shape.shared_among_experts
    assert not shape.transposes
    divided = {**plain, "attn_dp_size": 4, "moe_dense_tp_size": 1, "enable_dp_lm_head": True}
    assert shape_of(divided, MODEL, "bfloat16", ()).ranks == Ranks(8, 2, 4, 8, 1, 2, 2)
    assert shape_of({}, MODEL, "bfloat16", ()).ranks == Ranks()
    assert shape_of({"attention_backend": "trtllm_mha"}, MODEL, "bfloat16", ()).sinks == "float32"


@pytest.mark.parametrize("setting", [unknown.setting for unknown in UNKNOWN])
def test_a_server_that_shares_its_tensors_in_unknown_ways_is_not_predicted(setting: str) -> None:
    assert unpredicted({"device": "cpu", "tp_size": 2}, MODEL) == ""
    assert f"{setting}=something" in unpredicted({setting: "something", "tp_size": 1}, MODEL)


def test_a_server_on_a_cpu_adds_heads() -> None:
    assert "2 key heads for 4 ranks" in unpredicted({"device": "cpu", "tp_size": 4}, MODEL)
    assert unpredicted({"device": "cuda", "tp_size": 4}, MODEL) == ""


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
