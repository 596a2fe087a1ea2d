"""Adapters on both learners and every layout, against transformers with adapters written by hand, in float64."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from moe_trm.checkpoint.pieces import PieceReader
from moe_trm.config.schema import LearnerConfig, LoraConfig
from moe_trm.export.adapter import saved_factors
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.adapter import A, B, factor_name
from moe_trm.learner.lora.files import write_adapter
from moe_trm.learner.lora.targets import adapted_modules, matrix_modules, modules_of
from moe_trm.learner.protocol import Scores
from moe_trm.models.hf_config import read_hf_config
from routing.hf import HFReplayer
from routing.replay import ReplayRecords
from tests.integration.learner_support.families import make_family
from tests.integration.learner_support.lora import ALPHA, LR, RANK
from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import load_reference, make_checkpoint, random_routes
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch, objective

SCRIPT = Path(__file__).parent / "learner_support" / "lora.py"
EVERYTHING = "targets=attention+experts+router"
STARTED = f"{EVERYTHING}:start=adapter"
ONE = f"backend=megatron:{STARTED}"
ZERO_2, ZERO_3 = (f"backend=deepspeed:{STARTED}:stage={stage}" for stage in (2, 3))
FRESH = [f"backend={backend}:{EVERYTHING}" for backend in ("megatron", "deepspeed")]
ALONE = [
    f"{ONE}:liars=1",
    f"{ONE}:recompute=full",
    f"{ONE}:recompute=selective",
    f"{ONE}:layout=packed",
    f"{ONE}:distributed=0",
    f"{ZERO_2}:layout=packed",
    f"{ZERO_2}:recompute=full",
    f"{ZERO_2}:liars=1",
]
TWO = [
    f"backend=megatron:{STARTED}:{layout}"
    for layout in (
        "tensor=2:expert=2",
        "tensor=2:expert=2:layout=packed:liars=1",
        "tensor=2:expert=2:recompute=full",
        "tensor=2:expert=2:distributed=0",
        "expert=2",
        "expert=2:distributed=0",
        "pipeline=2",
        "pipeline=2:recompute=full",
        "context=2",
        "context=2:layout=packed",
        "expert=1",
    )
] + [ZERO_2, ZERO_3, f"{ZERO_3}:recompute=full", f"{ZERO_3}:layout=packed", f"{ZERO_2}:layout=packed"]
PARTS = [
    f"backend={backend}:targets={targets}{more}"
    for backend, more in (("megatron", ":expert=2"), ("megatron", ":tensor=2:expert=2"), ("deepspeed", ":stage=3"))
    for targets in ("q_proj+up_proj", "experts", "router")
] + [
    "backend=megatron:targets=attention+router:tensor=2:expert_tensor=2",
    # The other stage has nothing to train, or a dense layer that has not.
    "backend=megatron:targets=model.layers.3.self_attn.q_proj:pipeline=2",
    "backend=megatron:targets=experts:pipeline=2:virtual_pipeline=2",
]
LOW = [
    f"backend={backend}:{STARTED}:dtype=bfloat16{more}"
    for backend, more in (("megatron", ":expert=2"), ("deepspeed", ""))
]
BACKENDS = ("megatron", "deepspeed")
OTHERS = ("glm4_moe", "mixtral", "deepseek_v3")
FAMILIES = [f"backend={backend}:{EVERYTHING}:model={name}" for backend in BACKENDS for name in OTHERS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the second one dense; beside it an adapter whose B is not zero."""
    folder = tmp_path_factory.mktemp("lora")
    start = make_checkpoint(folder / "main", num_hidden_layers=4)
    torch.manual_seed(7)
    source, adapter = HfCheckpoint(start), folder / "adapter"
    lora, hf = LoraConfig(rank=RANK, alpha=ALPHA), read_hf_config(start)
    factors = {}
    for module in sorted(modules(start, EVERYTHING)):
        outputs, inputs = source.shape(f"{module}.weight")
        factors[factor_name(module, A)] = torch.randn(RANK, inputs) / inputs**0.5
        factors[factor_name(module, B)] = torch.randn(outputs, RANK) / 40
    adapter.mkdir()
    write_adapter(adapter, factors, lora, matrix_modules(modules_of(hf, source.names), hf), str(start))
    return start


def modules(start: Path, run: str) -> frozenset[str]:
    match = re.search(r"targets=([^:]+)", run)
    assert match is not None
    hf = read_hf_config(start)
    return adapted_modules(
        modules_of(hf, HfCheckpoint(start).names), LoraConfig(rank=RANK, targets=tuple(match[1].split("+"))), hf
    )


@dataclass(frozen=True)
class Run:
    """A finished run."""

    ranks: Ranks
    name: str
    start: Path

    def factors(self, when: str, kind: str = "weight") -> dict[str, Tensor]:
        """The factors that were saved, by peft's names without their prefix."""
        targets = re.search(r"targets=([^:]+)", self.name)
        assert targets is not None
        lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=tuple(targets[1].split("+")))
        backend: Any = "deepspeed" if "deepspeed" in self.name else "megatron"
        learner = LearnerConfig(backend=backend, lora=lora)
        reader = PieceReader(sorted((self.ranks.folder / self.name / when).glob("*")))
        return saved_factors(reader, read_hf_config(self.start), HfCheckpoint(self.start), learner)

    def scores(self) -> dict[str, Tensor]:
        """Log-probs of every micro-batch, which are the same on all ranks that have them."""
        found: dict[str, Tensor] = {}
        for rank in range(self.ranks.num_ranks):
            for name, values in self.ranks.saved(self.name, "scores", rank).items():
                assert torch.equal(found.setdefault(name, values), values), name
        return found

    def facts(self, rank: int = 0) -> dict[str, float]:
        return {name: float(value) for name, value in self.ranks.saved(self.name, "facts", rank).items()}


class Finished:
    """Runs by name, each done once, when it is first asked for; those of one group share their processes."""

    GROUPS = ((1, [ONE]), (1, [ZERO_2, *FRESH]), (1, ALONE), (2, TWO), (2, PARTS), (2, LOW), (1, FAMILIES))

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self._done: dict[str, Ranks] = {}

    def __getitem__(self, key: tuple[int, str]) -> Run:
        num_ranks, run = key
        place = f"{num_ranks}/{run}"
        if place not in self._done:
            group = next(group for size, group in self.GROUPS if size == num_ranks and run in group)
            folder = self._folder / str(num_ranks)
            done = run_ranks(folder, self._checkpoint, num_ranks, *group, script=SCRIPT)
            self._done |= {f"{num_ranks}/{each}": done for each in group}
        model = re.search(r"model=([^:]+)", run)
        start = self._checkpoint if model is None else self._checkpoint.with_name(model[1])
        return Run(self._done[place], run, start)


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("runs"), checkpoint)


@dataclass
class Exact:
    """The expected results in float64.

    Attributes:
        scores: by kind and batch.
        norm: of the first gradient.
        stepped: factors after the first step.
    """

    scores: dict[str, Tensor]
    norm: float
    stepped: dict[str, Tensor]


def merged_by_hand(model: Any, factors: dict[str, Tensor], adapted: frozenset[str]) -> dict[str, Tensor]:
    """Weights of transformers' model with adapters, written down once more."""

    def changed(module: str, base: Tensor) -> Tensor:
        if module not in adapted:
            return base
        return base + ALPHA / RANK * factors[factor_name(module, B)] @ factors[factor_name(module, A)]

    found = {}
    for name, base in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            prefix, width = name.removesuffix(".gate_up_proj"), base.shape[1] // 2
            found[name] = torch.stack(
                [
                    torch.cat(
                        [
                            changed(f"{prefix}.{e}.gate_proj", base[e, :width]),
                            changed(f"{prefix}.{e}.up_proj", base[e, width:]),
                        ]
                    )
                    for e in range(len(base))
                ]
            )
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            found[name] = torch.stack([changed(f"{prefix}.{e}.down_proj", base[e]) for e in range(len(base))])
        else:
            found[name] = changed(name.removesuffix(".weight"), base)
    return found


def exact(start: Path, factors: dict[str, Tensor], adapted: frozenset[str]) -> Exact:
    model = load_reference(start).double()
    model.set_experts_implementation("eager")
    model.requires_grad_(False)
    leaves = {name: tensor.double().clone().requires_grad_() for name, tensor in factors.items()}

    def logprobs(number: int) -> Tensor:
        batch = global_batch(number, keep_mask=False)
        weights = merged_by_hand(model, leaves, adapted)
        out = functional_call(model, weights, (batch.input_ids,), {"use_cache": False})
        scaled = (out.logits / TEMPERATURE).log_softmax(-1)
        return scaled.gather(-1, batch.target_ids[..., None])[..., 0] * batch.mask

    scores = {}
    for number in range(NUM_BATCHES):
        scores[f"score.{number}"] = found = logprobs(number)
        batch = global_batch(number, keep_mask=False)
        objective([batch], [])(0, Scores(found)).backward()
    norm = torch.cat([leaf.grad.flatten() for leaf in leaves.values() if leaf.grad is not None]).norm()
    torch.optim.AdamW(leaves.values(), lr=LR, eps=1.0, betas=(0.9, 0.95), weight_decay=0.0).step()
    with torch.no_grad():
        scores |= {f"moved.{number}": logprobs(number) for number in range(NUM_BATCHES)}
        replayer = HFReplayer(model, max_local_flip_rate=1.0)
        for number in range(NUM_BATCHES):
            batch = global_batch(number, keep_mask=False)
            routes = ReplayRecords(random_routes(batch, replayer.layer_ids, seed=number))
            with replayer.use(routes, batch.input_ids, batch.target_ids, batch.valid):
                scores[f"r3.{number}"] = logprobs(number)
    replayer.detach()
    stepped = {name: leaf.detach() for name, leaf in leaves.items()}
    return Exact({name: value.detach() for name, value in scores.items()}, float(norm), stepped)


_exact: dict[tuple[str, ...], Exact] = {}


def expected(run: Run) -> Exact:
    """Each reference is made once: by the model, the targets and what the factors begin as."""
    key = (str(run.start), *(part for part in run.name.split(":") if part.startswith(("targets", "start", "dtype"))))
    if key not in _exact:
        _exact[key] = exact(run.start, run.factors("begun"), modules(run.start, run.name))
    return _exact[key]


def relative(got: dict[str, Tensor], wanted: dict[str, Tensor], begun: dict[str, Tensor]) -> float:
    """Error of the factors' moves."""
    errors = torch.cat([(got[name].double() - wanted[name]).flatten() for name in wanted])
    moves = torch.cat([(wanted[name] - begun[name].double()).flatten() for name in wanted])
    return float(errors.norm() / moves.norm())


FAST = [(1, ONE)]
SLOW = [
    *((1, run) for run in (ZERO_2, *FRESH)),
    *((1, run) for run in ALONE),
    *((2, run) for run in TWO),
    *((2, run) for run in PARTS),
]
CASES = [
    *(pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in FAST),
    *(pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=pytest.mark.slow) for case in SLOW),
]
EVERY = [*CASES, *(pytest.param(1, run, id=run, marks=pytest.mark.slow) for run in FAMILIES)]


@pytest.fixture(scope="module", autouse=True)
def families(request: pytest.FixtureRequest, checkpoint: Path) -> None:
    """Checkpoints of other families, where a slow test asks for them."""
    if any(item.get_closest_marker("slow") for item in request.session.items if item.path == request.path):
        for name in OTHERS:
            make_family(name, checkpoint.with_name(name))


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_log_probs_gradients_and_a_step_are_those_of_adapters_by_hand(
    finished: Finished, num_ranks: int, name: str
) -> None:
    run = finished[num_ranks, name]
    scores, reference = run.scores(), expected(run)
    for kind, tolerance in (("score", 2e-5), ("update", 2e-5), ("moved", 2e-4), ("r3", 2e-4)):
        for number in range(NUM_BATCHES):
            wanted = reference.scores[f"{'score' if kind == 'update' else kind}.{number}"]
            torch.testing.assert_close(scores[f"{kind}.{number}"].double(), wanted, rtol=0, atol=tolerance)
    facts = run.facts()
    assert facts["applied"]
    assert facts["first_norm"] == pytest.approx(reference.norm, rel=1e-4)
    begun, stepped = run.factors("begun"), run.factors("stepped")
    assert stepped.keys() == reference.stepped.keys()
    assert relative(stepped, reference.stepped, begun) < 2e-4
    if "start=" not in name:
        # B is zero, so A has no gradient yet, and the policy is the base's.
        assert all(torch.equal(stepped[key], begun[key]) for key in begun if ".lora_A." in key)
    assert all(bool((stepped[key] != begun[key]).any()) for key in begun if ".lora_B." in key and "experts" not in key)


@pytest.mark.parametrize(("num_ranks", "name"), EVERY)
def test_the_base_stays_and_nothing_but_factors_has_a_state(finished: Finished, num_ranks: int, name: str) -> None:
    run = finished[num_ranks, name]
    source, adapted = HfCheckpoint(run.start), modules(run.start, name)
    before, after = (run.ranks.exported(name, when) for when in ("before", "after"))
    assert before.keys() == after.keys()
    for tensor in before:
        module = tensor.removesuffix(".weight")
        if module not in adapted:
            assert torch.equal(before[tensor], source.read(tensor)), tensor
            assert torch.equal(after[tensor], source.read(tensor)), tensor
        elif "start=" not in name:
            assert torch.equal(before[tensor], source.read(tensor)), tensor
        if module in adapted and "experts" not in module:
            assert not torch.equal(after[tensor], before[tensor]), tensor
    for rank in range(num_ranks):
        facts = run.facts(rank)
        assert facts["frozen_same"]
        assert facts["num_frozen"] > 20 or "model=" not in name
        # A pipeline stage may have nothing to train.
        assert 0 <= facts["trained"] < facts["all"] / 2
        # The optimizer's state is that of the factors, on this rank or shared, with padding.
        assert facts["moments"] <= 1.1 * facts["trained"] + 512
        assert bool(facts["moments"]) == bool(facts["trained"])
        assert facts["snapshot_bytes"] <= 4.4 * facts["trained"] + 8192
        assert facts["frozen_gradients"] == 0
    total = sum(tensor.numel() for tensor in run.factors("stepped").values())
    assert sum(run.facts(rank)["trained"] for rank in range(num_ranks)) >= total


@pytest.mark.parametrize(("num_ranks", "name"), EVERY)
def test_pushed_weights_are_base_and_factors(finished: Finished, num_ranks: int, name: str) -> None:
    run = finished[num_ranks, name]
    source, after, factors = HfCheckpoint(run.start), run.ranks.exported(name, "after"), run.factors("stepped")
    for module in modules(run.start, name):
        a, b = (factors[factor_name(module, factor)].double() for factor in (A, B))
        wanted = source.read(f"{module}.weight").double() + ALPHA / RANK * (b @ a)
        torch.testing.assert_close(after[f"{module}.weight"].double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_ranks", "name"), EVERY)
def test_replay_is_proved_and_a_resumed_run_has_the_same_bits(finished: Finished, num_ranks: int, name: str) -> None:
    run = finished[num_ranks, name]
    scores = run.scores()
    for number in range(NUM_BATCHES):
        # The weights at the start were factors alone, and came back.
        assert torch.equal(scores[f"start.{number}"], scores[f"score.{number}"])
        assert torch.equal(scores[f"r3_update.{number}"], scores[f"r3.{number}"])
        assert torch.equal(scores[f"update.{number}"], scores[f"score.{number}"])
    for rank in range(num_ranks):
        facts = run.facts(rank)
        assert facts["replay_applied"] == 1.0
        assert facts["replay_replayed"] > 0
        assert facts["second_norm"] > 0
        assert facts["other_base"]
        told = {key: value for key, value in facts.items() if key.startswith("liar_")}
        assert set(told.values()) <= {1.0}
        assert bool(told) == ("liars=1" in name)
    second, resumed = run.factors("second"), run.factors("resumed")
    assert all(torch.equal(second[key], resumed[key]) for key in second)
    assert any(bool((second[key] != value).any()) for key, value in run.factors("stepped").items())


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_both_learners_agree_on_other_families(finished: Finished, family: str) -> None:
    """Two implementations of model, adapters and step, which begin with the same factors."""
    one, two = (finished[1, next(run for run in FAMILIES if backend in run and family in run)] for backend in BACKENDS)
    for name, values in one.scores().items():
        kind = name.partition(".")[0]
        if kind in ("score", "update", "start", "moved"):
            torch.testing.assert_close(two.scores()[name], values, rtol=0, atol=2e-5 if kind != "moved" else 2e-4)
    begun = one.factors("begun")
    assert all(torch.equal(two.factors("begun")[name], values) for name, values in begun.items())
    wanted = {name: values.double() for name, values in one.factors("stepped").items()}
    assert relative(two.factors("stepped"), wanted, begun) < 2e-4
    assert two.facts()["first_norm"] == pytest.approx(one.facts()["first_norm"], rel=1e-4)


@pytest.mark.slow
def test_the_base_has_one_checksum_on_every_layout(finished: Finished) -> None:
    runs = [finished[1, ONE], *(finished[2, name] for name in TWO if "megatron" in name)]
    assert len({run.facts()["base_checksum"] for run in runs}) == 1
    zero = [finished[1, ZERO_2], *(finished[2, name] for name in TWO if "deepspeed" in name)]
    assert len({run.facts()["base_checksum"] for run in zero}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", LOW)
def test_bfloat16_computes_with_what_it_pushes(finished: Finished, name: str) -> None:
    """The pushed weights in transformers give the learner's log-probs but for bfloat16's arithmetic."""
    run = finished[2, name]
    before, scores = run.ranks.exported(name, "before"), run.scores()
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in before.values())
    reference = expected(run)
    for number in range(NUM_BATCHES):
        difference = (scores[f"score.{number}"].double() - reference.scores[f"score.{number}"]).abs()
        assert float(difference.mean()) < 0.05
    assert run.facts()["frozen_same"]
    assert relative(run.factors("stepped"), reference.stepped, run.factors("begun")) < 0.2
