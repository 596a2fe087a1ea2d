"""Memory of a rank by kind: sums worked out by hand, and what torch holds for a tiny model."""

from __future__ import annotations

import pytest
import torch

from moe_trm.config.schema import LearnerConfig, ParallelConfig
from moe_trm.models.registry import FAMILIES, MOE_FAMILIES
from moe_trm.models.tiny.families import tiny_family
from moe_trm.tools.plan.kept import layer_kept
from moe_trm.tools.plan.memory import (
    GATHERED_ROWS,
    Load,
    activations,
    deepspeed_memory,
    head_bytes,
    in_flight,
    layer_work,
    megatron_memory,
    rank_elements,
    replay_bytes,
    stage_memory,
)
from moe_trm.tools.plan.parameters import model_of
from moe_trm.tools.plan.speed import layers_of
from tests.unit.tools.plan.published import hf_config

GB = 10**9
QWEN = hf_config("qwen3_30b_a3b")


def learner(dtype: str = "bfloat16", recompute: str = "full", **parallel: int) -> LearnerConfig:
    return LearnerConfig.model_validate({"dtype": dtype, "recompute": recompute, "parallel": parallel})


def load(world: int = 24, tokens: int = 16384, *, keeps_masks: bool = True) -> Load:
    return Load(tokens, tokens, world, keeps_masks, replays=True, other_gb=0.0)


def test_the_four_node_recipe_holds_what_its_file_says() -> None:
    """`configs/qwen3_30b_a3b_4_nodes.yaml`: about 46 GB of weights, gradients and optimizer state."""
    _, memory = megatron_memory(model_of(QWEN), QWEN, learner(expert=8), load())
    dense, experts = 1_543_000_000, 28_991_000_000 // 8
    assert memory["weights"] == pytest.approx(2 * (dense + experts), rel=1e-3)
    assert memory["gradients"] == 2 * memory["weights"]
    assert memory["optimizer"] == pytest.approx(12 * (dense / 24 + experts / 3), rel=1e-3)
    assert sum(memory[kind] for kind in ("weights", "gradients", "optimizer")) == pytest.approx(46 * GB, rel=0.01)


def test_the_five_node_recipe_holds_what_its_file_says() -> None:
    """`configs/glm_4_5_air.yaml`: about 64 GB."""
    air = hf_config("glm_4_5_air")
    stage, memory = megatron_memory(model_of(air), air, learner(tensor=4, pipeline=2, expert=16), load(32))
    assert stage == 1
    assert sum(memory[kind] for kind in ("weights", "gradients", "optimizer")) == pytest.approx(64 * GB, rel=0.03)


@pytest.mark.parametrize("name", MOE_FAMILIES)
def test_weights_gradients_and_optimizer_are_what_torch_holds(name: str) -> None:
    """One process in float32, within 5%."""
    model = tiny_family(name)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    hf = {**model.config.to_dict(), "architectures": [FAMILIES[name].architecture]}
    _, memory = deepspeed_memory(model_of(hf), hf, learner("float32", "none"), load(1, 64))
    held = {
        "weights": sum(tensor.nbytes for tensor in model.state_dict().values()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters()),
        "optimizer": sum(
            value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim > 0
        ),
    }
    for kind, nbytes in held.items():
        assert memory[kind] == pytest.approx(nbytes, rel=0.05), kind


def test_ranks_together_hold_every_parameter() -> None:
    hf = hf_config("deepseek_v3")
    model = model_of({**hf, "num_hidden_layers": 60})
    one = ParallelConfig()
    assert sum(rank_elements(model, one, 0)) == model.total()
    stages = ParallelConfig(pipeline=4)
    assert sum(sum(rank_elements(model, stages, stage)) for stage in range(4)) == model.total()
    shared = ParallelConfig(tensor=8, expert=32)
    whole = sum(part.elements for part in model.parts if part.share == "whole")
    assert 8 * (rank_elements(model, shared, 0)[0] - whole) + whole == model.total(("experts",))
    assert 32 * rank_elements(model, shared, 0)[1] == model.by_kind["experts"][0]


def test_a_tied_output_layer_on_another_stage_is_a_copy() -> None:
    model = model_of({**QWEN, "tie_word_embeddings": True})
    assert sum(rank_elements(model, ParallelConfig(), 0)) == model.total()
    halves = ParallelConfig(pipeline=2)
    assert sum(sum(rank_elements(model, halves, stage)) for stage in range(2)) == model.total() + model.output.elements


def test_virtual_stages_take_turns() -> None:
    model = model_of({**QWEN, "num_hidden_layers": 8})
    layers = layers_of(ParallelConfig(pipeline=2, virtual_pipeline=2), len(model.layers))
    assert layers == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_uneven_stages_hold_what_their_settings_say() -> None:
    model = model_of(hf_config("deepseek_v3"))
    for parallel, counts in (
        (ParallelConfig(pipeline=4, first_stage_layers=16), [16, 15, 15, 15]),
        (ParallelConfig(pipeline=2, account_for_loss=True), [31, 30]),
        (ParallelConfig(pipeline=2, pipeline_layout="Et*20|t*20|t*21|L"), [41, 20]),
    ):
        assert [len(layers) for layers in layers_of(parallel, len(model.layers))] == counts
        ranks = range(parallel.pipeline)
        assert sum(sum(rank_elements(model, parallel, rank)) for rank in ranks) == model.total()
    alone = ParallelConfig(pipeline=3, pipeline_layout="E|t*61|L")
    assert [rank_elements(model, alone, rank)[1] for rank in (0, 2)] == [0, 0]
    assert sum(rank_elements(model, alone, 0)) == model.embedding.elements


def test_what_a_layer_keeps_is_worked_out_by_hand() -> None:
    """Qwen3-30B-A3B in bfloat16 with Transformer Engine's layers, bytes of a token."""
    kept = layer_kept(QWEN, learner(), "fused", is_moe=True)
    norms = 2 * (2 * 2048 + 4 + 2 * 2048)
    rotated_and_weighted = 2 * (2 * 32 + 4) * 128 + 4 * 32
    before_norms = 2 * 32 * 128 + 4 * 32 + 4 * 4
    projected = 2 * (32 + 2 * 4) * 128
    assert kept.outside == norms + rotated_and_weighted + before_norms + projected
    rows = 8 * (2 * (2048 + 6 * 768) + 4)
    assert kept.inside == rows + 10 * 128 + 28 * 8
    assert (kept.entry, kept.columns) == (2 * 2048, 4 * 2 * 128)


def test_layers_of_a_cpu_keep_more() -> None:
    """Norms their normed values in float32, attention its keys and values repeated for every head."""
    fused, plain = (layer_kept(QWEN, learner("float32"), kernels, is_moe=True) for kernels in ("fused", "plain"))
    assert plain.inside == fused.inside
    normed = 4 * (2 * 2048 + (32 + 4) * 128)
    assert plain.outside - fused.outside == normed + 4 * (2 * 32 - 4) * 128


def test_tensor_ranks_share_rows_of_experts_that_they_do_not_share() -> None:
    """With `expert_tensor` equal to `tensor`, each rank has a part of the columns of every rank's rows."""
    whole, apart, together = (
        layer_kept(QWEN, learner(tensor=t, expert=e, expert_tensor=et), "fused", is_moe=True).inside
        for t, e, et in ((1, 1, 1), (2, 2, 1), (2, 1, 2))
    )
    assert apart == whole / 2
    assert together - apart == 8 * (2 * 2048 + 4) / 2


def test_recomputation_keeps_less() -> None:
    layers = tuple(range(48))
    none, selective, full = (
        activations(QWEN, learner(recompute=kind), layers, 1000, 1) for kind in ("none", "selective", "full")
    )
    assert none > selective > full
    kept = layer_kept(QWEN, learner(), "fused", is_moe=True)
    assert none == pytest.approx(48 * 1000 * (kept.whole + kept.columns))
    assert full == 2 * 1000 * 48 * 2048
    work = [layer_work(QWEN, learner(recompute=kind), layers, 1000) for kind in ("none", "selective", "full")]
    assert work == sorted(work)
    assert work[2] - work[0] == pytest.approx(1000 * (kept.whole + kept.columns))


def test_backward_counts_once_what_the_head_gives_back() -> None:
    """The head's tensors are gone before a layer runs backward."""
    model = model_of(QWEN)
    _, small = megatron_memory(model, QWEN, learner(expert=8), load(tokens=1024))
    _, large = megatron_memory(model, QWEN, learner(expert=8), load(tokens=65536))
    assert small["backward"] == 0
    work = layer_work(QWEN, learner(expert=8), range(48), 65536)
    assert large["logits head"] + large["backward"] == pytest.approx(work)
    first = stage_memory(model, QWEN, learner(expert=8, pipeline=2), load(16), 0)
    assert (first["logits head"], first["backward"]) == (0, layer_work(QWEN, learner(expert=8), range(24), 16384))


def test_a_stage_sends_what_it_computed_and_keeps_it() -> None:
    model = model_of(QWEN)
    flight = 2 * 16384
    first = stage_memory(model, QWEN, learner(expert=8, pipeline=2), load(16), 0)
    assert first["activations"] == activations(QWEN, learner(expert=8), range(24), 16384, 2) + flight * 2 * 2048


def test_stages_without_layers_have_the_ends_alone() -> None:
    hf = hf_config("deepseek_v3")
    model, settings = model_of(hf), LearnerConfig(parallel=ParallelConfig(pipeline=3, pipeline_layout="E|t*61|L"))
    first, last = (stage_memory(model, hf, settings, load(3), stage) for stage in (0, 2))
    assert first["backward"] == first["logits head"] == first["replay"] == last["backward"] == 0
    assert (first["weights"], last["logits head"]) == (4 * model.embedding.elements, head_bytes(hf, settings, load(3)))


def test_no_more_micro_batches_are_in_flight_than_there_are() -> None:
    four, virtual = ParallelConfig(pipeline=4), ParallelConfig(pipeline=2, virtual_pipeline=2)
    assert [in_flight(four, stage, None) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(four, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert [in_flight(virtual, stage, None) for stage in range(2)] == [2.5, 1.5]


def test_the_first_stage_keeps_the_micro_batches_on_their_way() -> None:
    one, four = (activations(QWEN, learner(recompute="none"), (0, 1), 1000, flight) for flight in (1, 4))
    assert four == 4 * one


def test_tensor_and_context_ranks_share_activations() -> None:
    """All but the rotary angles, which every tensor rank has."""
    model = model_of(QWEN)
    alone = megatron_memory(model, QWEN, learner(recompute="none"), load(8))[1]["activations"]
    shared = megatron_memory(model, QWEN, learner(recompute="none", tensor=4, context=2), load(8))[1]["activations"]
    angles = 48 * 16384 * 4 * 2 * 128
    assert shared == pytest.approx((alone - angles) / 8 + angles / 2)


def test_replay_holds_ids_to_replay_and_to_prove() -> None:
    """int64 ids, twice. Dense layers have none."""
    hf = hf_config("deepseek_v3")
    assert replay_bytes(hf, range(61), 1000) == 1000 * 58 * 8 * 16
    assert replay_bytes(hf, (0, 1, 2), 1000) == 0


def test_the_head_never_holds_full_logits() -> None:
    full = 4 * 16384 * 151936
    over_kept = head_bytes(QWEN, learner(), load())
    over_all = head_bytes(QWEN, learner(), load(keeps_masks=False))
    gradient, norm, states = 6 * 151936 * 2048, 16384 * (2 * 2048 + 4), 8 * 16384 * 2048
    assert over_kept == gradient + norm + states + 8 * GATHERED_ROWS * 2048
    assert over_all == gradient + norm + states + 2**29
    assert over_all < full
    few = Load(100, 100, 8, keeps_masks=True, replays=True, other_gb=0, kept_ids=2)
    assert head_bytes(QWEN, learner(), few) == gradient + 100 * (2 * 2048 + 4 + 8 * 2048) + 8 * 200 * 2048


def test_zero_stages_share_more_and_more() -> None:
    def at(stage: int, *, offload: bool = False) -> dict[str, float]:
        settings = {"deepspeed": {"zero_stage": stage}, "offload_optimizer": offload}
        config = LearnerConfig.model_validate({"backend": "deepspeed", "dtype": "bfloat16", **settings})
        return deepspeed_memory(model_of(QWEN), QWEN, config, load(8))[1]

    total = model_of(QWEN).total()
    assert (at(1)["gradients"], at(2)["gradients"]) == (4 * total, 4 * total / 8)
    assert at(2)["weights"] == 2 * total
    assert at(3)["weights"] < at(2)["weights"] / 2
    assert at(2)["optimizer"] == 12 * total / 8
    assert at(2, offload=True)["optimizer"] == 0
