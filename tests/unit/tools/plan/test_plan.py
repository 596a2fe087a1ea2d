"""`moe-trm plan` as users meet it: a page, JSON, settings that load, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_trm.cli import COMMANDS, main
from moe_trm.config import load
from moe_trm.errors import BundleError, CheckpointError, ConfigError
from moe_trm.recording.bundle import BundleReader
from moe_trm.tools.plan.build import Assumptions, Plan, Work, build
from moe_trm.tools.plan.cluster import Cluster
from moe_trm.tools.plan.gpus import GPUS, gpu_of
from moe_trm.tools.plan.lengths import log_normal, recorded
from moe_trm.tools.plan.speed import Efficiency, cache_bytes, decode_rate, train_seconds, training_operations
from moe_trm.tools.plan.text import as_data, page
from moe_trm.tools.plan.wire import rank_bits, route_bytes
from routing.record import combinations
from tests.unit.tools.plan.published import MODELS, hf_config

ROOT = Path(__file__).parents[4]
QWEN_4_NODES = str(ROOT / "configs" / "qwen3_30b_a3b_4_nodes.yaml")
AIR = str(ROOT / "configs" / "glm_4_5_air.yaml")
ZERO_3 = ("learner.backend=deepspeed", "learner.deepspeed.zero_stage=3", "learner.parallel.expert=1")
MEASURED = Efficiency(rollout_tokens_s=10_000, learner_tokens_s=100_000)


def plan(
    path: str = QWEN_4_NODES,
    model: str = "qwen3_30b_a3b",
    nodes: int = 4,
    overrides: tuple[str, ...] = (),
    efficiency: Efficiency = MEASURED,
    gpu: str = "h100",
) -> Plan:
    config = load(path, overrides)
    lengths = log_normal(400, 0.8, config.rollout.max_new_tokens, 100)
    cluster = Cluster(nodes, 8, gpu_of(gpu), 1)
    return build(config, Work(hf_config(model), Assumptions(efficiency, lengths, 3.3, 4.0), "config.json"), cluster)


def command(*words: str, model: str = "qwen3_30b_a3b") -> list[str]:
    return ["plan", QWEN_4_NODES, "--hf-config", str(MODELS / f"{model}.json"), *words]


@pytest.mark.parametrize(
    ("path", "model", "nodes", "overrides"),
    [
        (QWEN_4_NODES, "qwen3_30b_a3b", 4, ()),
        (AIR, "glm_4_5_air", 5, ()),
        (QWEN_4_NODES, "gpt_oss_120b", 9, ("pipeline.mode=async", "pipeline.max_staleness=3")),
        (
            QWEN_4_NODES,
            "moonlight_16b_a3b",
            2,
            ZERO_3,
        ),
        (QWEN_4_NODES, "kimi_k2", 65, ("learner.parallel.expert=64", "rollout.server.tensor_parallel=8")),
    ],
)
def test_pages_fit_80_columns_and_json_has_the_same(
    path: str, model: str, nodes: int, overrides: tuple[str, ...]
) -> None:
    found = plan(path, model, nodes, overrides)
    shown = page(found)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown == page(plan(path, model, nodes, overrides))
    data = json.loads(json.dumps(as_data(found)))
    assert data["parameters"]["total"] == found.model.total()
    kinds = data["layout"]["bytes"].values()
    assert data["layout"]["total_bytes"] == pytest.approx(sum(kind["value"] for kind in kinds))
    assert sum(line.endswith("  *") for line in shown.splitlines()) == 1


def test_routes_without_replay_are_said_to_be_for_the_probe() -> None:
    probed = page(plan(overrides=("replay.mode=none",)))
    assert "probe.every=0 leaves them out" in probed
    assert "routes, wire" not in page(plan(overrides=("replay.mode=none", "probe.every=0")))
    assert "probe.every=0" not in page(plan(overrides=("replay.mode=R3",)))


def test_examples_of_its_own_help_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """In a fresh clone, which has no weights."""
    [examples] = [command.examples for command in COMMANDS if command.name == "plan"]
    for example in examples:
        words = example.replace(" --json plan.json", "").split()
        assert main(["plan", str(ROOT / words[0]), *words[1:]]) == 0
    assert "of 141.00 GB: fits" in capsys.readouterr().out


def test_the_command_writes_json_and_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(command("--nodes", "4", "--json", str(out), "--median-tokens", "300")) == 0
    assert "of 80.00 GB: fits" in capsys.readouterr().out
    assert json.loads(out.read_text())["fits"] is True
    assert main(command("--nodes", "4", "--gpu", "a100-40")) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize("overrides", [(), (*ZERO_3, "learner.recompute=full")])
def test_adapters_are_planned(overrides: tuple[str, ...]) -> None:
    """Less to train, as many bytes to push, and copies of adapters alone where older weights are kept."""
    stale = ("pipeline.mode=async", *overrides)
    full, lora = plan(overrides=stale), plan(overrides=(*stale, "learner.lora.rank=16"))
    memory, before = lora.layout.memory, full.layout.memory
    assert memory["gradients"] < before["gradients"] / 10
    assert memory["optimizer"] < before["optimizer"] / 10
    assert memory["weights"] > before["weights"]
    assert lora.push_s == full.push_s
    assert lora.host_bytes < full.host_bytes / 10
    shown = page(lora)
    assert max(map(len, shown.splitlines())) <= 80
    assert "train in place of these" in shown
    data = as_data(lora)
    assert data["parameters"]["adapters"] == lora.model.adapter_total


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown GPU.*V100.*a100, h100"):
        gpu_of("V100")
    assert gpu_of("H100") is GPUS["h100"]
    config = load(QWEN_4_NODES)
    with pytest.raises(ConfigError, match="too few GPUs"):
        Cluster(1, 8, gpu_of("h100"), 1).split(config.rollout)
    with pytest.raises(ConfigError, match="no such distribution"):
        log_normal(100, 0.0, 1000, 0)
    with pytest.raises(BundleError, match="no answers"):
        recorded(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", QWEN_4_NODES, "--nodes", "4"], "A plan needs no weights: --hf-config qwen3_30b_a3b."),
        (["plan", "--nodes", "4"], "or --hf-config"),
        (["plan", QWEN_4_NODES, "--hf-config", "no_such.json"], "config.json cannot be read"),
        (command("--gpu", "abacus"), "one of a100-40, a100, h100, h200, b200"),
        (command("--nodes", "0"), "no such machine"),
    ],
)
def test_the_command_ends_with_a_typed_error(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_a_config_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "config.json"
    bad.write_text("[1]")
    assert main(["plan", QWEN_4_NODES, "--hf-config", str(bad)]) == 2


def test_architectures_without_a_family_are_refused() -> None:
    assumptions = Assumptions(MEASURED, log_normal(400, 0.8, 8192, 100), 3.3, 4.0)
    cluster, config = Cluster(4, 8, gpu_of("h100"), 1), load(QWEN_4_NODES)
    with pytest.raises(CheckpointError, match="architecture is not supported"):
        build(config, Work({"architectures": ["X"]}, assumptions, "config.json"), cluster)


def test_measured_speeds_replace_assumed_ones() -> None:
    guessed, measured = plan(efficiency=Efficiency()), plan()
    assert (guessed.decode_tokens_s.basis, measured.decode_tokens_s.basis) == ("assumed", "measured")
    assert measured.decode_tokens_s.value == pytest.approx(10_000)
    assert measured.train_s.value == pytest.approx(96 * 8 * (measured.assumptions.lengths.mean + 100) / 100_000)
    options = {item["option"] for item in as_data(measured)["assumptions"]}
    assert {"--rollout-tokens-s", "--learner-tokens-s"}.isdisjoint(options)
    assert {"--rollout-tokens-s", "--learner-tokens-s", "--bundle"} <= {
        item["option"] for item in as_data(guessed)["assumptions"]
    }
    # Lengths are still assumed, so no simulated step is called measured.
    assert {mode.basis for mode in measured.modes} == {"assumed"}


def test_a_measured_speed_is_that_of_the_configured_mode() -> None:
    """Stale samples need the passes that a synchronous run does not make: one more for each older version.

    The first batch is sampled by the weights that train it; with staleness 1, every other one by those before.
    """
    found = plan()
    step = {each.mode.mode: each.timeline for each in found.modes}
    config, hf = load(QWEN_4_NODES), hf_config("qwen3_30b_a3b")
    assert config.pipeline.recovery == "same"
    stale = load(QWEN_4_NODES, ["pipeline.mode=one_step"])
    fresh, own, with_older = (
        training_operations(found.model, hf, one, 100 + found.assumptions.lengths.mean / 2, older)
        for one, older in ((config, 0.0), (stale, 0.0), (stale, 1.0))
    )
    ratio = step["one_step"].learner_busy_s / step["sync"].learner_busy_s
    assert ratio == pytest.approx((own + 7 * with_older) / (8 * fresh))
    assert step["async"].learner_busy_s >= step["one_step"].learner_busy_s > step["sync"].learner_busy_s


def test_packs_train_faster_than_padded_rows_by_what_is_not_computed() -> None:
    padded, packed = (
        plan(efficiency=Efficiency(), overrides=(f"batch.layout={kind}",)) for kind in ("padded", "packed")
    )
    assert packed.columns.value == 1 < padded.columns.value
    assert padded.train_s.value / packed.train_s.value == pytest.approx(padded.columns.value, rel=0.01)
    assert f"{padded.columns.value:.2f} columns computed for each token" in page(padded)


def test_shared_cores_slow_overlapping_modes_alone() -> None:
    own, shared = plan(), plan(efficiency=replace(MEASURED, sharing=0.5))
    steps = [[found.timeline.step_s for found in one.modes] for one in (own, shared)]
    assert steps[0][0] == steps[1][0]
    assert all(slow > fast for fast, slow in zip(steps[0][1:], steps[1][1:], strict=True))


def test_a_share_is_at_most_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command("--sharing", "1.5"))
    assert "1.5 is above 1" in capsys.readouterr().err


def test_recorded_lengths_are_measured() -> None:
    lengths = recorded(str(ROOT / "tests" / "data" / "bundle-5"))
    assert lengths.basis == "measured"
    reader = BundleReader(str(ROOT / "tests" / "data" / "bundle-5"))
    records = [record for step in reader.steps() for record in reader.read(step)]
    assert list(lengths.values) == sorted(int(record.sampled.sum()) for record in records)
    assert lengths.prompt_tokens == pytest.approx(np.mean([(~record.sampled).sum() for record in records]))


def test_one_node_that_colocates_serves_and_trains_on_all_gpus() -> None:
    found = plan(nodes=1, overrides=("rollout.colocate=true",), gpu="b200")
    assert (found.ranks, found.serving.servers) == (8, 1)
    assert [each.mode.mode for each in found.modes] == ["sync"]


def test_routes_have_the_bytes_of_the_codec() -> None:
    """The table of docs/routes.md, without its header's tenth of a byte."""
    qwen, deepseek = route_bytes(hf_config("qwen3_30b_a3b")), route_bytes(hf_config("deepseek_v3"))
    assert (qwen["wire"].value, qwen["bundle"].value) == (384, 246)
    assert deepseek["wire"].value == 464
    assert deepseek["bundle"].value == pytest.approx(355.4, abs=0.2)
    assert deepseek["json"].value * 32768 == pytest.approx(86e6, rel=0.01)
    for experts, top_k in ((128, 8), (256, 8), (64, 8), (8, 2), (4, 4)):
        assert rank_bits(experts, top_k) == combinations.rank_bits(experts, top_k)


def test_keys_and_values_of_a_token() -> None:
    assert cache_bytes(hf_config("qwen3_30b_a3b"), 1) == 2 * 48 * 2 * 4 * 128
    assert cache_bytes(hf_config("qwen3_30b_a3b"), 8) == 2 * 48 * 2 * 1 * 128
    assert cache_bytes(hf_config("deepseek_v3"), 8) == 2 * 61 * 576


def test_more_requests_decode_more_tokens_each_more_slowly() -> None:
    found = plan()
    rate = decode_rate(found.model, hf_config("qwen3_30b_a3b"), gpu_of("h100"), 8, 1000, Efficiency(), 512)
    speeds = [rate(n) for n in (1, 8, 64, 512)]
    assert speeds == sorted(speeds, reverse=True)
    assert [n * speed for n, speed in zip((1, 8, 64, 512), speeds, strict=True)] == sorted(
        n * speed for n, speed in zip((1, 8, 64, 512), speeds, strict=True)
    )


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (("learner.minibatches=1",), 4),
        (("learner.minibatches=4",), 4.75),
        (("learner.minibatches=4", "learner.recompute=none"), 3.75),
        (("pipeline.mode=async",), 6),
        (("pipeline.mode=async", "pipeline.behavior=merged", "correction.rules=[]"), 5),
        (("learner.epochs=2", "learner.recompute=none"), 7),
    ],
)
def test_training_time_counts_every_pass(overrides: tuple[str, ...], passes: float) -> None:
    """In forwards: three for training, one more with full recomputation, and the anchors."""
    hf: dict[str, Any] = hf_config("qwen3_30b_a3b")
    model, gpu = plan().model, gpu_of("h100")
    seconds = train_seconds(model, hf, load(QWEN_4_NODES, overrides), gpu, 24, 1e6, 0, Efficiency())
    forward = 2 * model.active(("embedding",)) * 1e6 / (24 * gpu.tflops * 1e12 * Efficiency.train_flops)
    assert seconds == pytest.approx(passes * forward)


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys, moe_trm.tools.plan.commands; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
