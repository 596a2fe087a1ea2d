"""The Megatron learner on every parallel layout of two ranks, and on products of four, against one process.

Of padded rows and of packs; the one process has padded rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import make_checkpoint
from tests.integration.learner_support.work import NUM_BATCHES, global_batch

pytestmark = pytest.mark.long  # test_replay_layouts.py and test_learner_conformance.py hold what it joins

LAYOUTS = {
    "EP2": "expert=2",
    "TP2+SP": "tensor=2:expert_tensor=2",
    "TP2xEP2": "tensor=2:expert=2",
    "PP2": "pipeline=2",
    "PP2+VPP2": "pipeline=2:virtual_pipeline=2",
    "CP2": "context=2",
    "PP2+VPP2-uneven": "pipeline=2:pipeline_layout=Ett|t|t|L",
    "PP2-3+1": "pipeline=2:first_stage_layers=3",
    "PP2-embedding-alone": "pipeline=2:pipeline_layout=E|t*4L",
    "PP2+VPP2-empty-stage": "pipeline=2:pipeline_layout=Ett|tt||L",
}
ODD = ("PP2-3+1", "PP2-embedding-alone", "PP2+VPP2-empty-stage")
"""Stages with unlike numbers of layers: for the slow tests, and not packed."""
FEW = {name: LAYOUTS[name] for name in ("EP2", "PP2+VPP2-uneven")}
"""With the two of `PACKED`, every way to divide a model once; the others are for the slow tests."""
REST = {name: options for name, options in LAYOUTS.items() if name not in FEW}
PRODUCTS = {
    "TP2xPP2": "tensor=2:expert_tensor=2:pipeline=2",
    "TP2xCP2": "tensor=2:expert_tensor=2:context=2",
    "CP2xPP2xEP2": "context=2:pipeline=2:expert=2",
    "TP2xEP4": "tensor=2:expert=4",
    "PP4": "pipeline=4",
    "TP2xEP2xPP2+VPP2": "tensor=2:expert=2:pipeline=2:virtual_pipeline=2",
    "EP2xPP2+VPP2-uneven": "expert=2:pipeline=2:pipeline_layout=Ett|t|t|L",
    "PP4-loss-alone": "pipeline=4:pipeline_layout=Ett|t|t|L",
}
ONE_PACKED = "expert=1:layout=packed"


def packed(layouts: dict[str, str]) -> dict[str, str]:
    """The same on packs of tokens."""
    return {f"{name} packed": f"{options}:layout=packed" for name, options in layouts.items()}


PACKED = packed({name: LAYOUTS[name] for name in ("TP2+SP", "CP2")})
"""The layouts that cut packs."""
PACKED_MORE = {name: options for name, options in LAYOUTS.items() if f"{name} packed" not in PACKED and name not in ODD}
MORE = REST | packed(PACKED_MORE)
RECOMPUTE = ("none", "full")
TIED = {name: (FEW | PACKED)[name] for name in ("TP2+SP packed", "PP2+VPP2-uneven")}
"""Few layouts whose ranks share the tied embedding: parts of it, or two copies."""
SLOW_RECOMPUTE = "selective"
PACKED_SLOW = ("full", SLOW_RECOMPUTE)
TIED_SLOW = [name for name in FEW | PACKED if name not in TIED]
MODES = ("R3", "R2")
THREE = {
    name: f"{LAYOUTS[name.removesuffix(' packed')]}:batches=3" + ":layout=packed" * name.endswith(" packed")
    for name in ("PP2", "PP2+VPP2", "PP2+VPP2-uneven packed")
}
"""Three micro-batches in a minibatch, which two ranks with virtual stages cannot take in turns."""
MOE_LAYERS = 3


def matrix(options: str, recompute: str) -> str:
    return f"matrix:{options}:recompute={recompute}"


def train(options: str, model: str = "main") -> str:
    return f"train:model={model}:{options}"


REFERENCE = matrix("expert=1:liars=0", "none")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the second one dense, and a vocabulary that two ranks cannot share evenly; `tied` beside it."""
    folder = tmp_path_factory.mktemp("layouts")
    make_checkpoint(folder / "tied", num_hidden_layers=4, vocab_size=129, tie_word_embeddings=True)
    return make_checkpoint(folder / "main", num_hidden_layers=4, vocab_size=129)


@pytest.fixture(scope="module")
def one(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    runs = [train("expert=1"), train("expert=1", "tied"), REFERENCE]
    runs += [train(ONE_PACKED), train(ONE_PACKED, "tied"), matrix(ONE_PACKED, "none"), matrix(ONE_PACKED, "full")]
    return run_ranks(tmp_path_factory.mktemp("one"), checkpoint, 1, *runs)


def runs_of(layouts: dict[str, str], *recompute: str) -> list[str]:
    runs = [train(options, model) for options in layouts.values() for model in ("main", "tied")]
    return runs + [matrix(options, kind) for options in layouts.values() for kind in recompute]


@pytest.fixture(scope="module")
def two(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    runs = [train(options) for options in (FEW | PACKED).values()]
    runs += [train(options, "tied") for options in TIED.values()]
    runs += [matrix(options, "none") for options in (FEW | PACKED).values()]
    runs += [matrix(options, "full") for options in FEW.values()]
    return run_ranks(tmp_path_factory.mktemp("two"), checkpoint, 2, *runs)


@pytest.fixture(scope="module")
def more(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    runs = runs_of(MORE, *RECOMPUTE, SLOW_RECOMPUTE)
    runs += [matrix(options, SLOW_RECOMPUTE) for options in FEW.values()]
    runs += [train((FEW | PACKED)[name], "tied") for name in TIED_SLOW]
    runs += [train(options) for options in THREE.values()]
    runs += [matrix(options, kind) for options in PACKED.values() for kind in PACKED_SLOW]
    return run_ranks(tmp_path_factory.mktemp("more"), checkpoint, 2, *runs)


@pytest.fixture(scope="module")
def four(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    runs = runs_of(PRODUCTS, *RECOMPUTE, SLOW_RECOMPUTE)
    return run_ranks(tmp_path_factory.mktemp("four"), checkpoint, 4, *runs)


@pytest.fixture(scope="module")
def four_packed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    runs = runs_of(packed(PRODUCTS), *RECOMPUTE, SLOW_RECOMPUTE)
    return run_ranks(tmp_path_factory.mktemp("four_packed"), checkpoint, 4, *runs)


SLOW = [
    *(("more", name, options) for name, options in MORE.items()),
    *(("four", *case) for case in PRODUCTS.items()),
    *(("four_packed", *case) for case in packed(PRODUCTS).items()),
]
CASES = [
    *(pytest.param("two", options, id=name) for name, options in (FEW | PACKED).items()),
    pytest.param("one", ONE_PACKED, id="one process packed"),
    *(pytest.param(ranks, options, id=name, marks=pytest.mark.slow) for ranks, name, options in SLOW),
]
STEPPED = [
    *(pytest.param("two", options, "main", id=f"{name}-main") for name, options in (FEW | PACKED).items()),
    *(pytest.param("two", options, "tied", id=f"{name}-tied") for name, options in TIED.items()),
    *(
        pytest.param("more", (FEW | PACKED)[name], "tied", id=f"{name}-tied", marks=pytest.mark.slow)
        for name in TIED_SLOW
    ),
    *(pytest.param("one", ONE_PACKED, model, id=f"one process packed-{model}") for model in ("main", "tied")),
    *(
        pytest.param(ranks, options, model, id=f"{name}-{model}", marks=pytest.mark.slow)
        for ranks, name, options in SLOW
        for model in ("main", "tied")
    ),
]
REPLAYED = [
    *(pytest.param("two", options, "none", id=f"{name}-none") for name, options in (FEW | PACKED).items()),
    *(pytest.param("two", options, "full", id=f"{name}-full") for name, options in FEW.items()),
    *(pytest.param("one", ONE_PACKED, kind, id=f"one process packed-{kind}") for kind in RECOMPUTE),
    *(
        pytest.param("more", options, kind, id=f"{name}-{kind}", marks=pytest.mark.slow)
        for name, options in PACKED.items()
        for kind in PACKED_SLOW
    ),
    *(
        pytest.param("more", options, SLOW_RECOMPUTE, id=f"{name}-{SLOW_RECOMPUTE}", marks=pytest.mark.slow)
        for name, options in FEW.items()
    ),
    *(
        pytest.param(ranks, options, kind, id=f"{name}-{kind}", marks=pytest.mark.slow)
        for ranks, name, options in SLOW
        for kind in (*RECOMPUTE, SLOW_RECOMPUTE)
    ),
]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("ranks", "options", "recompute"), REPLAYED)
def test_replayed_log_probs_and_router_gradients_are_those_of_one_process(
    one: Ranks, ranks: str, options: str, mode: str, recompute: str, request: pytest.FixtureRequest
) -> None:
    world, run = request.getfixturevalue(ranks), matrix(options, recompute)
    expected, routers = one.saved(REFERENCE, "logprobs"), one.saved(REFERENCE, f"routers-{mode}")
    valid = sum(int(global_batch(number).valid.sum()) for number in range(NUM_BATCHES))
    seen_routers: set[str] = set()
    for rank in range(world.num_ranks):
        facts = {key: float(value) for key, value in world.saved(run, "facts", rank).items()}
        # Scored once, forwarded once by the update, and once more by recomputation: the three MoE layers of every real
        # token.
        assert facts[f"{mode}.replayed"] == (2 if recompute == "none" else 3) * valid * MOE_LAYERS
        assert facts[f"{mode}.applied"] == 1.0
        assert facts[f"{mode}.flips"] > 0.5
        norm = float(one.saved(REFERENCE, "facts")[f"{mode}.grad_norm"])
        assert facts[f"{mode}.grad_norm"] == pytest.approx(norm, rel=1e-5)
        for name, values in world.saved(run, "logprobs", rank).items():
            if name.startswith(mode):
                close(values, expected[name])
                assert torch.equal(values, world.saved(run, "logprobs", rank)[name.replace("update", "score")])
        for name, gradient in world.saved(run, f"routers-{mode}", rank).items():
            close(gradient, routers[name])
            seen_routers.add(name)
    assert seen_routers == routers.keys()
    assert len(routers) == MOE_LAYERS


@pytest.mark.parametrize(("ranks", "options"), CASES)
def test_one_wrong_sample_of_many_is_named_whoever_holds_its_parts(
    ranks: str, options: str, request: pytest.FixtureRequest
) -> None:
    world = request.getfixturevalue(ranks)
    for rank in range(world.num_ranks):
        facts = {name: float(value) for name, value in world.saved(matrix(options, "none"), "facts", rank).items()}
        told = {name: value for name, value in facts.items() if name.startswith("liar_")}
        assert told.keys() >= {"liar_random", "liar_shifted", "liar_a_quarter_shifted", "liar_one_layer"}
        assert set(told.values()) == {1.0}, told
        assert facts["honest_flips"] == 0.0
        assert facts["moved_samples"] >= 16


@pytest.mark.parametrize(("ranks", "options"), CASES)
def test_ranks_of_one_model_agree_on_every_bit(ranks: str, options: str, request: pytest.FixtureRequest) -> None:
    world = request.getfixturevalue(ranks)
    by_number: dict[str, list[Tensor]] = {}
    for rank in range(world.num_ranks):
        for name, values in world.saved(matrix(options, "none"), "logprobs", rank).items():
            by_number.setdefault(name, []).append(values)
    assert len(by_number) == 4 * NUM_BATCHES
    for values in by_number.values():
        assert all(torch.equal(values[0], other) for other in values)


@pytest.mark.parametrize(("ranks", "options", "model"), STEPPED)
def test_weights_are_loaded_and_exported_bit_for_bit_and_step_like_one_process(
    one: Ranks, ranks: str, options: str, model: str, checkpoint: Path, request: pytest.FixtureRequest
) -> None:
    world, run, reference = request.getfixturevalue(ranks), train(options, model), train("expert=1", model)
    before, source = world.exported(run, "before"), load_file(checkpoint.with_name(model) / "model.safetensors")
    assert before.keys() == source.keys()
    assert all(torch.equal(before[name], source[name]) for name in source)
    after, expected = world.exported(run, "after"), one.exported(reference, "after")
    for name, value in expected.items():
        # With eps = lr = 1 an Adam step is close to the gradient itself, so its scale counts.
        moved, requested = after[name] - before[name], value - source[name]
        assert float((moved - requested).norm() / requested.norm()) < 2e-5, name
    norms = [float(found.saved(name, "facts")["grad_norm"]) for found, name in ((one, reference), (world, run))]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize(("ranks", "options"), [case for case in CASES if "packed" in str(case.id)])
def test_every_score_of_a_pack_is_that_of_padded_rows(
    one: Ranks, ranks: str, options: str, request: pytest.FixtureRequest
) -> None:
    """Masked and full log-probs, kept mass and exact KL, in scoring passes, in the update, and at a snapshot."""
    world, expected = request.getfixturevalue(ranks), one.saved(train("expert=1"), "logprobs")
    seen: set[str] = set()
    for rank in range(world.num_ranks):
        found = world.saved(train(options), "logprobs", rank)
        seen |= found.keys()
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], atol=1e-5, rtol=0)
    assert seen == expected.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in THREE if "VPP" in name])
def test_virtual_stages_take_any_number_of_micro_batches(one: Ranks, more: Ranks, name: str) -> None:
    expected = one.saved(train("expert=1"), "logprobs")
    for rank in range(2):
        found = more.saved(train(THREE[name]), "logprobs", rank)
        assert found.keys() == {key for key in expected if not key.endswith(".3")}
        for key, values in found.items():
            torch.testing.assert_close(values, expected[key], atol=1e-5, rtol=0)
    norms = [float(more.saved(train(options), "facts")["grad_norm"]) for options in (THREE["PP2"], THREE[name])]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
