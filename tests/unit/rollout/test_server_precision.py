"""A float32 output layer and deterministic sampling: what the server is told, and what each request asks for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from moe_trm.config.precision_rules import refusals, surprises
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError, RecordRejected
from moe_trm.rollout.server_engine import Seeds, ServerEngine
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.sglang.launch import launch_command
from moe_trm.types import Prompt, SamplingParams
from tests.unit.rollout.local_app import listening
from tests.unit.rollout.test_sglang_engine import HF
from tests.unit.sections import sections_of


def config(tmp_path: Path, *, url: str | None = None, min_p: float = 0.0, **server: Any) -> Config:
    (tmp_path / "config.json").write_text(json.dumps({**HF, "head_dim": 64}))
    rollout = {"url": url, "min_p": min_p, "server": server}
    return Config.model_validate({"model": {"checkpoint": str(tmp_path)}, "rollout": rollout})


def refused(chosen: Config) -> list[Any]:
    return [*refusals(*sections_of(chosen, "rollout", "sync", "learner", "batch"))]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_float32_head_is_an_option_of_the_server_on_every_device(tmp_path: Path, device: str) -> None:
    option = "--enable-fp32-lm-head"
    assert option in launch_command(Served.of(config(tmp_path, device=device, fp32_head=True)), tmp_path, 7, "k.yaml")
    assert option not in launch_command(Served.of(config(tmp_path, device=device)), tmp_path, 7, "k.yaml")


def test_a_float32_head_of_a_float32_server_changes_nothing(tmp_path: Path) -> None:
    def said(dtype: str) -> list[str]:
        chosen = config(tmp_path, dtype=dtype, fp32_head=True)
        told = surprises(*sections_of(chosen, "learner", "rollout", "replay", "probe", "correction"))
        return [text for text in told if "fp32_head" in text]

    assert not said("bfloat16")
    assert len(said("float32")) == 1


def test_deterministic_sampling_is_refused_on_a_cpu_with_its_own_reason(tmp_path: Path) -> None:
    option = "--enable-deterministic-inference"
    assert option in launch_command(
        Served.of(config(tmp_path, device="cuda", deterministic=True)), tmp_path, 7, "k.yaml"
    )
    [problem] = refused(config(tmp_path, device="cpu", deterministic=True))
    assert (problem.key, "need CUDA" in problem.what) == ("rollout.server.deterministic", True)
    with pytest.raises(ConfigError, match="need CUDA"):
        launch_command(Served.of(config(tmp_path, device="cpu", deterministic=True)), tmp_path, 7, "k.yaml")
    assert not refused(config(tmp_path, device="cpu", deterministic=True, url="http://127.0.0.1:9"))


def test_deterministic_sampling_and_a_bound_on_the_probability_are_refused(tmp_path: Path) -> None:
    [problem] = refused(config(tmp_path, device="cuda", deterministic=True, min_p=0.1))
    assert problem.key == "rollout.min_p"


def test_every_answer_has_a_seed_of_its_own_that_sixty_four_bits_hold() -> None:
    seeds = Seeds(3)
    found = [seeds.of_sample(number) for number in range(1000)] + [seeds.next() for _ in range(1000)]
    assert len(set(found)) == 2000
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in found)
    assert Seeds(3).of_sample(7) == found[7]
    assert Seeds(4).of_sample(7) != found[7]
    assert Seeds(None).of_sample(7) is Seeds(None).next() is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_samples_of_one_prompt_are_asked_for_with_different_seeds(tmp_path: Path, deterministic: bool) -> None:
    """The same ones when they are asked for in another order, and never the server's default for all of them."""

    async def asked(order: list[int]) -> dict[int, object]:
        found: list[dict[str, object]] = []

        async def generate(request: web.Request) -> web.StreamResponse:
            found.append((await request.json())["sampling_params"])
            return web.json_response({})

        params = SamplingParams(max_new_tokens=4)
        async with listening(web.post("/generate", generate)) as url:
            engine = ServerEngine(config(tmp_path, url=url, deterministic=deterministic), None)
            try:
                for number in order:
                    with pytest.raises(RecordRejected):
                        await engine.generate(Prompt("p", (1, 2)), params, sample_id=number, group_id=0)
            finally:
                await engine.close()
        return {number: one.get("sampling_seed") for number, one in zip(order, found, strict=True)}

    first, second = (asyncio.run(asked(order)) for order in ([0, 1, 2], [2, 0, 1]))
    assert first == second
    assert len({*first.values()} - {None}) == (3 if deterministic else 0)
