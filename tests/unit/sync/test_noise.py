"""Noise on pushed weights, of norms and of routers: its schedule, its draws, and where it goes."""

from __future__ import annotations

import math

import pytest
import torch

from moe_trm.config.precision_rules import surprises
from moe_trm.config.rules import warnings
from moe_trm.config.schema import Config
from moe_trm.models.registry import FAMILIES, MOE_FAMILIES
from moe_trm.models.tiny.families import COMMON
from moe_trm.step.probe.rounding_shares import roundings
from moe_trm.sync import distributed
from moe_trm.sync.manifest import Meeting
from moe_trm.sync.rounding import NormNoise, Rounding, RouterNoise, computes_in, rounding_of
from moe_trm.sync.tensors import tensor_digest
from tests.unit.sections import sections_of

NOISE = NormNoise(0.01, 0.0001, stages=3, steps=40, seed=7)
INPUT, POST = (f"model.layers.3.{name}_layernorm.weight" for name in ("input", "post_attention"))


def sigma(version: int, noise: NormNoise = NOISE) -> float:
    return Rounding("float32", noises=(noise,)).at(version).noises[0].sigma


def test_the_schedule_against_the_loop_of_the_released_code() -> None:
    """An interval without noise, then stages of equal length that fall geometrically; the last one stays."""
    trend = [0.01 * (0.0001 / 0.01) ** (k / 2) for k in range(3)]
    for version in range(45):
        interval = int(min(version, 40) // (40 / 4))
        expected = 0.0 if interval == 0 else trend[min(interval - 1, 2)]
        assert sigma(version) == pytest.approx(expected), version
    assert sorted({sigma(version) for version in range(41)}) == pytest.approx(sorted([0.0, *trend]))
    assert sigma(1, NormNoise(0.05, 1e-4, stages=1, steps=2, seed=0)) == 0.05


def test_noise_is_that_of_its_version_name_and_seed() -> None:
    weight = torch.ones(4096)

    def drawn(version: int = 20, name: str = INPUT, seed: int = 7) -> torch.Tensor:
        noise = NormNoise(0.01, 0.0001, stages=3, steps=40, seed=seed)
        return Rounding("float32", noises=(noise,)).at(version).pushed(name, weight)

    first = drawn() - 1
    assert torch.equal(first, drawn() - 1)
    assert float(first.std()) == pytest.approx(sigma(20), rel=0.05)
    assert abs(float(first.mean())) < 4 * sigma(20) / math.sqrt(4096)
    for other in (drawn(version=21), drawn(name=POST), drawn(seed=8)):
        assert abs(float(torch.corrcoef(torch.stack([first, other - 1]))[0, 1])) < 0.1
    assert torch.equal(drawn(version=9), weight)
    assert torch.equal(weight, torch.ones(4096))


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.experts.1.up_proj.weight",
        "model.embed_tokens.weight",
    ],
)
def test_only_the_norms_of_blocks_are_noisy(name: str) -> None:
    weight = torch.randn(6, 8) if "norm" not in name else torch.randn(8)
    noisy, plain = Rounding("float32", noises=(NOISE,)).at(20), Rounding("float32")
    assert torch.equal(noisy.pushed(name, weight), plain.pushed(name, weight))


def test_noise_goes_on_before_the_cast_and_beside_fake_quantisation() -> None:
    weight, matrix = torch.full((16,), 0.8), torch.randn(4, 8)
    both = Rounding("bfloat16", "int8", noises=(NOISE,)).at(20)
    pushed = both.pushed(INPUT, weight)
    assert pushed.dtype == torch.bfloat16
    assert torch.equal(pushed, NormNoise(0.01, 0.0001, 3, 40, 7, version=20).added(INPUT, weight).bfloat16())
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert torch.equal(both.pushed(name, matrix), Rounding("bfloat16", "int8").pushed(name, matrix))
    assert torch.equal(both.held(INPUT, weight), weight.bfloat16())


def config(**rollout: object) -> Config:
    return Config.model_validate(
        {"model": {"checkpoint": "x"}, "rollout": {"norm_noise": 0.01, **rollout}, "train": {"steps": 40}, "seed": 7}
    )


def pushed_of(chosen: Config) -> Rounding:
    return rounding_of(*sections_of(chosen, "rollout", "train", "seed"))


def test_pushes_of_a_run_are_noisy_and_its_passes_are_not() -> None:
    assert pushed_of(config(norm_noise_stages=3)).noises == (NOISE,)
    [ended] = pushed_of(config(norm_noise_stages=3, norm_noise_end=0.002)).noises
    assert ended == NormNoise(0.01, 0.002, 3, 40, 7)
    assert pushed_of(config(norm_noise=0.0)).noises == ()
    learner = config().learner.model_copy(update={"round_like_rollout": True})
    assert computes_in(
        *sections_of(config().model_copy(update={"learner": learner}), "learner", "rollout", "train", "seed")
    ) == Rounding("bfloat16")
    # What nobody repeats is not called rounding.
    assert not roundings(*sections_of(config(fake_quantization="int8"), "learner", "rollout"))


def test_it_is_told_that_the_rollout_is_a_policy_of_its_own() -> None:
    def told(chosen: Config) -> list[str]:
        sections = sections_of(chosen, "learner", "rollout", "replay", "probe", "correction")
        return [text for text in surprises(*sections) if "noise" in text]

    said = "\n".join(told(config()))
    assert "a behaviour policy of its own" in said
    assert "without a correction" in said
    assert not told(config(norm_noise=0.0))
    for setting in ({"norm_noise_stages": 3}, {"norm_noise_end": 0.002}):
        [idle] = told(config(norm_noise=0.0, **setting))
        assert f"rollout.{next(iter(setting))} has no effect" in idle


ROUTER = "model.layers.3.mlp.gate.weight"


def routed(relative: float = 0.5, *, each_push: bool = False, seed: int = 7) -> Rounding:
    return Rounding("float32", noises=(RouterNoise(relative, each_push, seed),))


def test_noise_on_routers_is_relative_to_the_tensor_and_one_draw_for_the_run_or_one_for_each_push() -> None:
    weight = 3 + 0.2 * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))

    def noise(rounding: Rounding, version: int = 4, name: str = ROUTER, weight: torch.Tensor = weight) -> torch.Tensor:
        return rounding.at(version).pushed(name, weight) - weight

    fixed, drawn = routed(), routed(each_push=True)
    assert float(noise(fixed).std()) == pytest.approx(0.5 * float(weight.std()), rel=0.05)
    torch.testing.assert_close(noise(fixed, version=5), noise(fixed))
    # The same draw goes on weights that training has moved.
    torch.testing.assert_close(noise(fixed, weight=2 * weight), 2 * noise(fixed), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(noise(routed(1.0)), 2 * noise(fixed), atol=1e-5, rtol=1e-4)
    assert torch.equal(noise(drawn), noise(drawn))
    others = [noise(drawn, version=5), noise(routed(seed=8)), noise(fixed, name=ROUTER.replace("3", "2"))]
    for mine, other in zip([noise(drawn), noise(fixed), noise(fixed)], others, strict=True):
        assert abs(float(torch.corrcoef(torch.stack([mine.flatten(), other.flatten()]))[0, 1])) < 0.05


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_noise_reaches_the_router_of_every_family_and_nothing_else(family: str) -> None:
    known = FAMILIES[family]
    hf = {**COMMON, **known.tiny}
    layer = known.layer(hf, int(hf["num_hidden_layers"]) - 1)
    links = {**layer.tensors, **layer.expert(0)}
    noisy = {
        (parameter, name)
        for parameter, link in links.items()
        for name in link.hf_names
        if not torch.equal(routed().pushed(f"model.layers.1.{name}", torch.eye(4)), torch.eye(4))
    }
    assert noisy == {("mlp.router.weight", *links["mlp.router.weight"].hf_names)}


def test_a_run_with_noisy_routers_says_loudly_that_it_is_an_experiment() -> None:
    noisy = config(norm_noise=0.0, fake_router_noise=0.5, fake_router_noise_each_push=True)
    assert pushed_of(noisy) == Rounding("bfloat16", noises=(RouterNoise(0.5, each_push=True, seed=7),))
    both = pushed_of(config(fake_router_noise=0.5, norm_noise_stages=3))
    assert both.noises == (NOISE, RouterNoise(0.5, each_push=False, seed=7))
    said = "\n".join(warnings(noisy))
    assert "AN EXPERIMENT, NOT A TRAINING RUN: rollout.fake_router_noise=0.5" in said
    assert "replay.max_local_flip_rate=1.0 measures them" in said
    # A fault that is planted is no rounding on purpose: the verdict and the doctor name it.
    assert noisy.rollout.rounds_weights is None
    assert not roundings(noisy.learner, noisy.rollout)
    plain = "\n".join(warnings(config(norm_noise=0.0, fake_router_noise_each_push=True)))
    assert "rollout.fake_router_noise_each_push has no effect: rollout.fake_router_noise=0" in plain
    assert "EXPERIMENT" not in plain


def test_a_broadcast_is_announced_as_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the noise of its version."""
    tensors = {INPUT: torch.ones(64), "model.layers.3.mlp.gate.weight": torch.ones(4, 8)}
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(distributed, "broadcast", lambda _group, tensor: sent.append(tensor))
    sender = object.__new__(distributed.Sender)
    sender._group = None  # type: ignore[assignment]
    sender.meeting = Meeting("group", "127.0.0.1", 1, distributed.BUCKET_BYTES)
    for rounding in (Rounding("bfloat16"), Rounding("float32", noises=(NOISE,)).at(20)):
        sent.clear()
        entries = distributed.announce(tensors.items(), rounding)
        sender.send(tensors.items(), rounding)
        [bucket] = sent
        received = [tensor for _, tensor in distributed.tensors_of(entries, bucket)]
        assert [entry.digest for entry in entries] == [*map(tensor_digest, received)]
        assert [entry.name for entry in entries] == [*tensors]
        assert bool((received[0] != 1).any()) == bool(rounding.noises)
