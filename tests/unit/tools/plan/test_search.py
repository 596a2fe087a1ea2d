"""The search of `moe-trm plan`: plans that load and fit, and public set-ups among them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from moe_trm.cli import main
from moe_trm.config import load
from moe_trm.config.rules import refusals
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.learner.megatron.layout import check_layout
from moe_trm.tools.plan.build import Assumptions, Work, build, overrides
from moe_trm.tools.plan.candidates import PINNED_MEGATRON
from moe_trm.tools.plan.cluster import Cluster
from moe_trm.tools.plan.commands import WORKLOAD
from moe_trm.tools.plan.exchange import HOST_BYTES, exchange_seconds
from moe_trm.tools.plan.gpus import gpu_of
from moe_trm.tools.plan.lengths import log_normal
from moe_trm.tools.plan.memory import stepped_elements
from moe_trm.tools.plan.parameters import model_of
from moe_trm.tools.plan.search import Found, search, with_servers
from moe_trm.tools.plan.speed import Efficiency
from moe_trm.tools.plan.text import bottleneck, proposals
from tests.unit.tools.plan.published import hf_config

ROOT = Path(__file__).parents[4]
AIR = str(ROOT / "configs" / "glm_4_5_air.yaml")


def work(model: str, config: Config) -> Work:
    longest = config.rollout.max_new_tokens
    return Work(hf_config(model), Assumptions(Efficiency(), log_normal(longest / 4, 0.8, longest, 512), 3.3, 4.0), "c")


@cache
def found(model: str, nodes: int, *settings: str, server_nodes: int | None = None) -> tuple[Config, Found]:
    config = load(WORKLOAD, settings)
    return config, search(config, work(model, config), Cluster(nodes, 8, gpu_of("h100"), 1), server_nodes)


@pytest.mark.parametrize(("model", "nodes"), [("qwen3_30b_a3b", 1), ("glm_4_5_air", 4), ("deepseek_v3", 24)])
def test_plans_load_fit_and_are_what_they_say(model: str, nodes: int) -> None:
    """GLM-4.5-Air has 46 layers, DeepSeek-V3 61: stages are uneven. Each is as fast as the plan of its settings."""
    before, result = found(model, nodes)
    assert 1 <= len(result.plans) <= 3
    steps = [plan.configured.timeline.step_s for plan in result.plans]
    assert steps == sorted(steps)
    for plan in result.plans:
        settings = overrides(plan.config, before)
        again = load(WORKLOAD, settings)
        assert not refusals(again)
        assert again.model_copy(update={"replay": plan.config.replay}) == plan.config
        check_layout(again, PINNED_MEGATRON, hf_config(model), world_size=plan.ranks)
        assert plan.serving.servers * plan.serving.gpus <= 8 * nodes
    first = result.plans[0]
    assert build(first.config, work(model, before), first.cluster).fits
    shown = proposals(result, before)
    assert max(len(line) for line in shown.splitlines() if "=" not in line) <= 80
    assert all(bottleneck(plan).split()[0] in shown for plan in result.plans)
    stale = [plan for plan in result.plans if plan.config.pipeline.mode == "async"]
    assert shown.count("asynchronous, unlike the configuration") == len(stale) > 0


def test_a_model_that_fits_nowhere_is_a_sentence() -> None:
    _, result = found("kimi_k2", 4)
    assert not result.plans
    assert "no plan fits" in result.why
    assert "server (2,053 GB of weights)" in result.why


def test_many_nodes_do_not_wait_for_one_server() -> None:
    """Sixteen nodes kept one server, and the learner waited 97% of the time."""
    _, result = found("qwen3_30b_a3b", 16)
    assert result.plans[0].serving.servers > 1
    assert result.plans[0].configured.timeline.learner_idle < 0.7


def test_colocated_memory_is_of_both_sides() -> None:
    """The learner stays where it is while the server samples. The optimizer leaves when that does not fit."""
    _, result = found("qwen3_30b_a3b", 1)
    shared = next(plan for plan in result.plans if plan.config.rollout.colocate)
    assert shared.serving.bytes_per_gpu > shared.layout.resident
    assert shared.config.learner.offload_optimizer
    assert shared.layout.memory["optimizer"] == 0
    assert shared.host_bytes == pytest.approx(16 * 30.5e9 / 8, rel=0.01)
    with_state = shared.config.model_copy(
        update={"learner": shared.config.learner.model_copy(update={"offload_optimizer": False})}
    )
    assert not build(with_state, work("qwen3_30b_a3b", with_state), shared.cluster).fits


SLIME_QWEN = ("tensor=4", "expert=8"), ("prompts_per_step=32", "group_size=8", "max_new_tokens=8192"), 20480
SLIME_GLM = (
    ("tensor=8", "pipeline=4", "context=2", "expert=16"),
    ("prompts_per_step=128", "group_size=8", "max_new_tokens=32768"),
    2 * 16384 + 4096,
)
VERL_DEEPSEEK = (
    ("pipeline=16", "expert=16", "first_stage_layers=4", "last_stage_layers=1"),
    ("prompts_per_step=512", "group_size=4", "max_new_tokens=4096"),
    6144,
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "server", "public"),
    [("qwen3_30b_a3b", 8, SLIME_QWEN), ("glm_4_5", 32, SLIME_GLM), ("deepseek_v3", 32, VERL_DEEPSEEK)],
)
def test_public_set_ups_fit_and_the_search_finds_their_kind(
    model: str, server: int, public: tuple[tuple[str, ...], tuple[str, ...], int]
) -> None:
    """Colocated with CPU Adam, whole layers computed again: accepted, and no faster than the plan that is found.

    The layouts are those of slime's and verl's scripts (`benchmarks/plan_public.py` has their names).
    """
    layout, workload, tokens = public
    settings = [
        *(f"learner.parallel.{one}" for one in layout),
        *(f"rollout.{one}" for one in workload),
        f"learner.micro_batch_tokens={tokens}",
        "learner.minibatches=1",
        "learner.recompute=full",
        "learner.offload_optimizer=true",
        "rollout.colocate=true",
        "pipeline.mode=sync",
    ]
    nodes = {"qwen3_30b_a3b": 1, "glm_4_5": 8, "deepseek_v3": 32}[model]
    config, result = found(model, nodes, *settings)
    shared = next(plan for plan in result.plans if plan.config.rollout.colocate)
    own, cluster = work(model, config), Cluster(nodes, 8, gpu_of("h100"), 1)
    held = build(config, own, cluster).layout.resident
    served = with_servers(config, own.model(config), own, cluster, 8 * nodes, server, held)
    assert served is not None
    theirs = build(served[1], own, cluster)
    assert theirs.fits
    assert shared.configured.timeline.step_s <= 1.05 * theirs.configured.timeline.step_s


def test_a_model_that_megatron_has_no_layers_for_is_planned_with_deepspeed() -> None:
    before, result = found("qwen3_5_35b_a3b", 2)
    assert before.learner.backend == "megatron"
    assert result.plans
    assert all("learner.backend=deepspeed" in overrides(plan.config, before) for plan in result.plans)


def test_a_given_number_of_server_nodes_is_kept() -> None:
    _, result = found("qwen3_30b_a3b", 4, server_nodes=2)
    assert {plan.cluster.server_nodes for plan in result.plans} == {2}
    assert not any(plan.config.rollout.colocate for plan in result.plans)


def test_a_layout_that_cannot_be_is_refused_after_plans_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", AIR, "--hf-config", "glm_4_5_air", "--nodes", "5", "learner.parallel.tensor=3"]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("1. ")
    assert "do not divide over the ranks" in said.err


def test_a_plan_needs_a_model_and_a_machine_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = ["plan", "rollout.max_new_tokens=4096", "--hf-config", "qwen3_30b_a3b", "--nodes", "2", "--json", str(out)]
    assert main(words) == 0
    data = json.loads(out.read_text())
    assert data["proposals"][0]["fits"]
    assert "rollout.max_new_tokens=4096" in data["proposals"][0]["settings"]
    assert "learner.dtype=bfloat16" in capsys.readouterr().out
    assert main(["plan", "--hf-config", "kimi_k2", "--nodes", "1", "--json", str(out)]) == 1
    assert json.loads(out.read_text())["proposals"] == []


def test_a_plan_says_that_it_counts_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hf-config", "qwen3_5_35b_a3b", "--nodes", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("These are counts of the text model alone.")
    assert re.search(r"all +34\.66 B", printed)


def test_ranks_exchange_more_beyond_a_node_and_step_on_the_host() -> None:
    hf = hf_config("qwen3_30b_a3b")
    model, gpu = model_of(hf), gpu_of("h100")

    def seconds(*settings: str, world: int = 64) -> float:
        config = load(WORKLOAD, [f"learner.{one}" for one in settings])
        return exchange_seconds(model, hf, config, gpu, 8, world, 1e6, Efficiency())

    plain = seconds()
    assert seconds("parallel.expert=8") > 0
    assert seconds("parallel.expert=16") > 1.5 * seconds("parallel.expert=8") - plain
    offloaded = load(WORKLOAD, ["learner.offload_optimizer=true"]).learner
    stepped = stepped_elements(model, offloaded, 64, 0)
    assert stepped == pytest.approx(model.total() / 64)
    assert seconds("offload_optimizer=true") - plain == pytest.approx(4 * stepped * HOST_BYTES / 20e9)
    assert seconds("parallel.expert=8", world=8) < seconds("parallel.expert=8", "recompute=full", world=8)


def test_a_server_may_not_be_larger_than_its_gpus() -> None:
    config = load(WORKLOAD, ["rollout.server.tensor_parallel=16"])
    with pytest.raises(ConfigError, match="too few GPUs"):
        build(config, work("qwen3_30b_a3b", config), Cluster(1, 8, gpu_of("h100"), 1))
