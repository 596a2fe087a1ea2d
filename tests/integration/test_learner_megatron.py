"""The Megatron learner on real ranks: one process, expert parallel 2 and data parallel 2, with the same global work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_trm.types import TokenBatch
from tests.exact_kl import exact_kl
from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import (
    load_reference,
    make_checkpoint,
    make_dense_checkpoint,
)
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch

PLAIN, EP2, EP2_PLAIN, DP2 = "train:distributed=0", "train:expert=2", "train:expert=2:distributed=0", "train:expert=1"
TIED, DENSE, DENSE_TP2 = "train:model=tied", "train:model=dense:mode=none", "train:model=dense:mode=none:tensor=2"
RECOMPUTE, BF16 = "train:recompute=full", "train:dtype=bfloat16"
SEQUENTIAL = "train:distributed=0:experts=sequential"

MISFITS: dict[str, dict[str, Any]] = {
    "vocabulary": {"config": {"vocab_size": 120}},
    "lacking": {"tensors": lambda t: {k: v for k, v in t.items() if "experts.5.up_proj" not in k}},
    "surplus": {"tensors": lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of most runs; the others lie beside it."""
    folder = tmp_path_factory.mktemp("learner")
    make_checkpoint(folder / "tied", tie_word_embeddings=True, norm_topk_prob=False)
    make_dense_checkpoint(folder / "dense")
    main = make_checkpoint(folder / "main")
    for name, change in MISFITS.items():
        (folder / name).mkdir()
        save_file(
            change.get("tensors", lambda t: t)(load_file(main / "model.safetensors")),
            folder / name / "model.safetensors",
        )
        config = json.loads((main / "config.json").read_text()) | change.get("config", {})
        (folder / name / "config.json").write_text(json.dumps(config))
    return main


@pytest.fixture(scope="module")
def one(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    runs = [PLAIN, RECOMPUTE, BF16, TIED, DENSE, SEQUENTIAL, "replay", "replay:recompute=full"]
    return run_ranks(
        tmp_path_factory.mktemp("one"), checkpoint, 1, *runs, *(f"misfit:model={name}" for name in MISFITS)
    )


@pytest.fixture(scope="module")
def two(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(
        tmp_path_factory.mktemp("two"),
        checkpoint,
        2,
        EP2_PLAIN,
        EP2,
        DP2,
        DENSE_TP2,
        "edges:expert=2",
        "replay:expert=2",
    )


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[k].view(torch.uint8), right[k].view(torch.uint8)) for k in left
    )


def worst_relative(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest error of any tensor, relative to the tensor's norm."""
    assert got.keys() == expected.keys()
    return max(float((got[k] - expected[k]).norm() / expected[k].norm()) for k in expected)


@pytest.mark.parametrize(("run", "model"), [(TIED, "tied"), (DENSE, "dense")])
def test_tied_and_dense_models_round_trip_and_train(one: Ranks, checkpoint: Path, run: str, model: str) -> None:
    before = one.exported(run, "before")
    assert same_bits(before, load_file(checkpoint.with_name(model) / "model.safetensors"))
    assert ("lm_head.weight" in before) == (model == "dense")
    after = one.exported(run, "after")
    assert all(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vocabulary", "[128, 64]\n  expected: [120, 64]\n  do:       vocab_size"),
        ("lacking", "2 missing"),
        ("surplus", "q_proj.bias"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(one: Ranks, name: str, said: str) -> None:
    message = (one.folder / f"misfit:model={name}" / "message").read_text()
    assert message.startswith("CheckpointError")
    assert said in message


def test_each_rank_exports_only_the_experts_it_owns(two: Ranks) -> None:
    shards = sorted((two.folder / EP2 / "before").glob("*.safetensors"))
    numbers = [
        {int(n.split("experts.")[1].split(".")[0]) for n in load_file(shard) if "experts." in n} for shard in shards
    ]
    assert numbers == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert all("experts." in name for name in load_file(shards[1]))


@pytest.mark.parametrize(("run", "model"), [(PLAIN, "main"), (TIED, "tied"), (DENSE, "dense")])
def test_logprobs_agree_with_hugging_face(one: Ranks, checkpoint: Path, run: str, model: str) -> None:
    reference = load_reference(checkpoint.with_name(model))
    saved = one.union(run, "logprobs")
    for number in range(NUM_BATCHES):
        batch = global_batch(number)
        with torch.no_grad():
            full, mass = reference_logprobs(reference, batch)
        torch.testing.assert_close(saved[f"full.{number}"], full, atol=1e-4, rtol=0)
        torch.testing.assert_close(saved[f"mass.{number}"], mass, atol=1e-4, rtol=0)
        torch.testing.assert_close(saved[f"score.{number}"], full - mass, atol=1e-4, rtol=0)
        with torch.no_grad():
            kl = reference_kl(reference, batch)
        torch.testing.assert_close(saved[f"kl.{number}"], kl, atol=1e-4, rtol=1e-4)
        assert torch.equal(saved[f"kl.{number}"], saved[f"update_kl.{number}"])
        assert kl.max() > 0.1


def reference_logprobs(model: Any, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """`[B, R]` full-vocabulary log-probs and log kept mass from plain logits, 0 off the mask."""
    logits = model(batch.input_ids, attention_mask=batch.valid.long()).logits.float() / TEMPERATURE
    assert batch.kept_ids is not None
    assert batch.kept_offsets is not None
    everything_NV = logits.log_softmax(-1)[batch.mask]
    target_N = everything_NV.gather(-1, batch.target_ids[batch.mask][:, None])[:, 0]
    bounds = batch.kept_offsets.tolist()
    rows = [row[batch.kept_ids[a:b]] for row, a, b in zip(everything_NV, bounds, bounds[1:], strict=False)]
    mass_N = torch.stack([row.logsumexp(0) for row in rows])
    zeros = torch.zeros(batch.mask.shape)
    return zeros.masked_scatter(batch.mask, target_N), zeros.masked_scatter(batch.mask, mass_N)


def reference_kl(model: Any, batch: TokenBatch) -> Tensor:
    """`[B, R]` exact KL of the batch's recorded distribution from the model's on the kept support."""
    logits_NV = (model(batch.input_ids, attention_mask=batch.valid.long()).logits.float() / TEMPERATURE)[batch.mask]
    assert batch.kept_ids is not None
    assert batch.kept_offsets is not None
    assert batch.kept_logprobs is not None
    bounds = batch.kept_offsets.tolist()
    rows = [row[batch.kept_ids[a:b]].log_softmax(0) for row, a, b in zip(logits_NV, bounds, bounds[1:], strict=False)]
    kl_N = exact_kl(batch.kept_logprobs, torch.cat(rows), batch.kept_offsets)
    return torch.zeros(batch.mask.shape).masked_scatter(batch.mask, kl_N)


@pytest.mark.parametrize("run", [PLAIN, RECOMPUTE, BF16])
def test_scoring_and_training_forwards_are_bit_identical(one: Ranks, run: str) -> None:
    saved = one.union(run, "logprobs")
    for number in range(NUM_BATCHES):
        assert torch.equal(saved[f"score.{number}"], saved[f"update.{number}"])
        assert torch.equal(saved[f"score.{number}"], saved[f"again.{number}"])


@pytest.mark.parametrize("run", [EP2, DP2])
def test_scoring_and_training_forwards_are_bit_identical_on_two_ranks(two: Ranks, run: str) -> None:
    saved = two.union(run, "logprobs")
    assert len(saved) == 8 * NUM_BATCHES
    for number in range(NUM_BATCHES):
        assert torch.equal(saved[f"score.{number}"], saved[f"update.{number}"])


@pytest.mark.parametrize("run", [EP2_PLAIN, EP2, DP2])
def test_two_ranks_train_like_one(one: Ranks, two: Ranks, run: str) -> None:
    before = one.exported(PLAIN, "before")
    expected = {k: v - before[k] for k, v in one.exported(PLAIN, "after").items()}
    got = {k: v - before[k] for k, v in two.exported(run, "after").items()}
    # With eps = lr = 1 an Adam step is close to the gradient itself, so its scale counts; the rest is rounding of
    # weight differences.
    assert worst_relative(got, expected) < 1e-5
    assert worst_relative(two.exported(run, "after"), one.exported(PLAIN, "after")) < 1e-6
    norms = [float(ranks.saved(name, "facts")["grad_norm"]) for ranks, name in ((one, PLAIN), (two, run))]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_tensor_parallel_ranks_train_a_dense_model_like_one(one: Ranks, two: Ranks) -> None:
    assert same_bits(two.exported(DENSE_TP2, "before"), one.exported(DENSE, "before"))
    assert worst_relative(two.exported(DENSE_TP2, "after"), one.exported(DENSE, "after")) < 1e-6


def test_reduced_gradients_are_plain_sums(one: Ranks, two: Ranks) -> None:
    expected = one.union(PLAIN, "gradients")
    got = two.union(EP2_PLAIN, "gradients")
    assert worst_relative(got, expected) < 5e-6
    total = torch.cat([g.flatten() for g in expected.values()])
    error = torch.cat([(got[k] - expected[k]).flatten() for k in expected])
    assert float(error.norm() / total.norm()) < 1e-6


def test_experts_together_compute_what_megatrons_own_do_one_by_one(one: Ranks) -> None:
    assert same_bits(one.union(PLAIN, "logprobs"), one.union(SEQUENTIAL, "logprobs"))
    assert worst_relative(one.union(PLAIN, "gradients"), one.union(SEQUENTIAL, "gradients")) < 1e-6


def test_recompute_changes_nothing(one: Ranks) -> None:
    assert same_bits(one.exported(RECOMPUTE, "after"), one.exported(PLAIN, "after"))


def test_bfloat16_learner_trains_and_stays_near_float32(one: Ranks) -> None:
    exact, rounded = one.union(PLAIN, "logprobs"), one.union(BF16, "logprobs")
    errors = torch.cat([(exact[f"full.{i}"] - rounded[f"full.{i}"]).abs().flatten() for i in range(NUM_BATCHES)])
    assert float(errors.median()) < 0.05
    assert not same_bits(one.exported(BF16, "before"), one.exported(BF16, "after"))


def test_final_checkpoint_opens_in_transformers(two: Ranks, checkpoint: Path) -> None:
    folder = two.folder / EP2 / "final"
    weights = load_reference(folder).state_dict()
    after = two.exported(EP2, "after")
    assert torch.equal(weights["lm_head.weight"], after["lm_head.weight"])
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert (folder / "generation_config.json").read_bytes() == (checkpoint / "generation_config.json").read_bytes()
    assert same_bits(two.exported(EP2, "final"), after)


@pytest.mark.parametrize(("ranks", "run"), [("one", BF16), ("two", EP2), ("two", EP2_PLAIN)])
def test_a_snapshot_scores_as_then_and_leaves_the_weights_as_now(
    request: pytest.FixtureRequest, ranks: str, run: str
) -> None:
    finished: Ranks = request.getfixturevalue(ranks)
    saved = finished.union(run, "logprobs")
    for number in range(NUM_BATCHES):
        assert torch.equal(saved[f"old.{number}"], saved[f"score.{number}"])
    assert same_bits(finished.exported(run, "restored"), finished.exported(run, "after"))
    assert not same_bits(finished.exported(run, "after"), finished.exported(run, "before"))


def test_zero_learning_rate_leaves_every_bit(two: Ranks) -> None:
    run = "edges:expert=2"
    assert same_bits(two.exported(run, "zero_lr"), two.exported(run, "before"))


def test_warm_up_is_linear_and_ignores_the_refused_step(two: Ranks) -> None:
    facts = two.saved("edges:expert=2", "facts")
    assert [float(facts[f"lr.{i}"]) for i in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.3])


@pytest.mark.parametrize(
    ("ranks", "run"), [("one", "replay"), ("one", "replay:recompute=full"), ("two", "replay:expert=2")]
)
def test_replay_is_applied_reported_and_bit_identical_between_passes(
    request: pytest.FixtureRequest, ranks: str, run: str
) -> None:
    finished: Ranks = request.getfixturevalue(ranks)
    for rank in range(finished.num_ranks):
        saved = finished.saved(run, "logprobs", rank)
        for i in range(NUM_BATCHES // finished.num_ranks):
            assert torch.equal(saved[f"r2.{i}"], saved[f"native.{i}"])
            assert torch.equal(saved[f"r3_update.{i}"], saved[f"r3.{i}"])
            assert not torch.allclose(saved[f"r3.{i}"], saved[f"native.{i}"], atol=1e-3)
    facts = {k: float(v) for k, v in finished.saved(run, "facts").items()}
    token_layers = facts["valid"] * facts["layers"]
    forwards = 2 if "recompute" in run else 1
    assert facts["score_replayed"] == 2 * token_layers
    assert facts["update_replayed"] == forwards * token_layers
    assert facts["score_applied"] == facts["update_applied"] == 1.0
    assert facts["update_flips"] > 0.8
    assert facts["layer_flips"] == pytest.approx(facts["update_flips"])
