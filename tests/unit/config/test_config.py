"""Loading: every problem at once, with its key; overrides; sources; rules."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from moe_trm.cli import main
from moe_trm.config import InvalidConfigError, load, resolve
from moe_trm.config.flat import flatten
from moe_trm.config.rules import warnings
from moe_trm.errors import ConfigError
from moe_trm.run_folder.history import differences


def problems(path: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(InvalidConfigError) as caught:
        load(path, overrides)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_file_override_default_and_their_sources(file: Path) -> None:
    resolved = resolve(file, ["replay.mode=R2", "optimizer.betas.1=0.99", "name=007"])
    assert (resolved.config.optimizer.lr, resolved.config.replay.mode, resolved.config.name) == (3e-4, "R2", "007")
    assert resolved.config.optimizer.betas == (0.9, 0.99)
    assert resolved.sources == {
        "model.checkpoint": "file",
        "optimizer.lr": "file",
        "replay.mode": "override",
        "optimizer.betas.1": "override",
        "name": "override",
    }


def test_an_override_replaces_its_own_key_and_no_longer_one(file: Path) -> None:
    """`rollout.url` is a beginning of `rollout.urls`; a section is one of all that is in it."""
    keys = flatten(load(file).dump())
    pairs = [(key, longer) for key in keys for longer in keys if longer.startswith(key) and longer != key]
    assert ("rollout.url", "rollout.urls") in pairs
    file.write_text("model: {checkpoint: m}\nrollout: {urls: ['https://a:1'], top_p: 0.5, server: {port: 7}}\n")
    found = resolve(file, ["rollout.url=null", "rollout.server={port: 8}"]).sources
    assert found["rollout.urls.0"] == "file"
    assert found["rollout.top_p"] == "file"
    assert found["rollout.url"] == found["rollout.server.port"] == "override"
    assert resolve(file, ["correction.rules=[]"]).sources["correction.rules"] == "override", "an empty list is a value"


def test_later_override_wins_and_replaces_what_the_file_said(file: Path) -> None:
    resolved = resolve(file, ["optimizer.lr=1e-5", "optimizer.lr=2e-5"])
    assert resolved.config.optimizer.lr == 2e-5
    assert resolved.sources["optimizer.lr"] == "override"


def test_lists_by_index_and_as_a_value(file: Path) -> None:
    by_index = load(
        file,
        ["correction.rules.0.name=trm_max", "correction.rules.0.thresholds.bound=0.5", "correction.rules.1.name=opsm"],
    )
    as_value = load(file, ["correction.rules=[{name: trm_max, thresholds: {bound: 0.5}}, {name: opsm}]"])
    assert by_index == as_value
    assert [rule.name for rule in by_index.correction.rules] == ["trm_max", "opsm"]
    assert "expected an index from 0 to 0" in problems(file, "correction.rules.1.name=x")["correction.rules.1.name"]


def test_a_setting_that_is_gone_is_refused_with_what_does_its_work(file: Path) -> None:
    told = problems(file, "rollout.server.wait_s=30")["rollout.server.wait_s"]
    assert "no longer a setting" in told
    assert "rollout.server.startup_timeout_s" in told


def test_it_is_left_out_of_what_a_run_wrote(file: Path) -> None:
    """That has every setting of its version, and nobody chose them."""
    written = load(file).dump()
    written["rollout"]["server"]["wait_s"] = 0.0
    file.write_text(json.dumps(written))
    assert load(file).dump() == {**written, "rollout": load(file).rollout.model_dump(mode="json")}
    assert not differences(written, load(file).dump())


def test_every_problem_is_told_at_once_with_its_full_key(file: Path) -> None:
    told = problems(
        file,
        "replay.mod=R3",
        "replay.mode=R4",
        "lr=3",
        "rollout.group_size=7.5",
        "sync.verify=1",
        "rollout.top_p=2",
        "foo",
        "seed=-1",
    )
    assert "did you mean replay.mode?" in told["replay.mod"]
    assert "got 'R4'" in told["replay.mode"]
    assert "one of none, R2, R3, auto" in told["replay.mode"]
    assert "did you mean optimizer.lr?" in told["lr"]
    assert "got 7.5 (float), expected integer > 0" in told["rollout.group_size"]
    assert "expected true or false" in told["sync.verify"]
    assert "expected number > 0, <= 1" in told["rollout.top_p"]
    assert "integer >= 0" in told["seed"]
    assert "malformed override" in told[""]
    assert len(told) == 8


def test_missing_file_missing_key_bad_yaml_duplicate_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        load(tmp_path / "none.yaml")
    path = tmp_path / "run.yaml"
    path.write_text("name: x\n")
    assert "required and missing" in problems(path)["model"]
    for text, words in (
        ("a: [1", "not valid YAML"),
        ("name: x\nname: y\n", "duplicate key"),
        ("- 1\n", "must hold sections"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load(path)


@pytest.mark.parametrize("override", ["=1", "a b=1", "replay..mode=R3", "replay.mode", "rollout={", "name.deep=1"])
def test_malformed_overrides(file: Path, override: str) -> None:
    assert len(problems(file, override)) == 1


def test_interpolation_is_refused(file: Path) -> None:
    assert "interpolation" in problems(file, "run_dir=${oc.env:HOME}")["run_dir"]


def test_bare_off_is_the_word_but_nothing_else_is_converted(file: Path) -> None:
    assert load(file, ["sampling_mask.mode=off"]).sampling_mask.mode == "off"
    assert [load(file, [f"observe.panel={word}"]).observe.panel for word in ("on", "off")] == ["on", "off"]
    assert "sampling_mask.mode" in problems(file, "sampling_mask.mode=on")
    assert "rollout.server.port" in problems(file, "rollout.server.port='30000'")
    file.write_text("name: 12\nmodel: {checkpoint: x}\n")
    assert "quotes included" in problems(file)["name"]


def test_a_secret_is_never_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(file), "rollout.api_key=hunter2"]) == 0
    assert "hunter2" not in capsys.readouterr().out
    assert "hunter2" not in "".join(problems(file, "rollout.api_key=[hunter2]").values())


EXACT = "correction.rules=[{name: trm_max, thresholds: {max_kl: 0.1, divergence: exact}}]"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.engine=bundle"], "rollout.bundle"),
        (["rollout.engine=bundle", "rollout.bundle=b", "record.bundle=b"], "record.bundle"),
        (["rollout.router=http://r:1"], "rollout.router"),
        (["rollout.router=http://r:1", "rollout.urls=[http://a:1, http://r:1/]"], "rollout.router"),
        (["rollout.url=http://a:1"], "rollout.trusted_network"),
        (["rollout.urls=[http://127.0.0.1:1, http://127.0.0.1.example:1]"], "rollout.trusted_network"),
        (["rollout.url=http://127.0.0.1:1", "rollout.router=http://10.1.2.3:1"], "rollout.trusted_network"),
        (["rollout.server.host=0.0.0.0"], "rollout.trusted_network"),
        (["rollout.server.host='::'"], "rollout.trusted_network"),
        (["rollout.top_k=5000"], "rollout.top_k"),
        (["rollout.top_k=1"], "rollout.top_k"),
        ([EXACT, "sampling_mask.mode=off"], "sampling_mask.mode"),
        ([EXACT.replace("exact}", "exact, ratio: engine}")], "correction.rules"),
        (["task.name=gsm8k"], "task.prompts"),
        (["task.eval_size=0", "train.eval_every=2"], "train.eval_every"),
        (["kl.controller=adaptive"], "kl.coef"),
        (["kl.coef=0.1", "kl.where=reward", "kl.estimator=k3_is"], "kl.estimator"),
        (["kl.coef=0.1", "kl.where=advantage"], "kl.estimator"),
        (["kl.coef=0.1", "kl.where=advantage", "kl.estimator=k1", "batch.zero_variance=drop"], "batch.zero_variance"),
        (["kl.coef=0.1", "kl.teacher=[http://127.0.0.1:1]", "sampling_mask.mode=keep"], "sampling_mask.mode"),
        (["kl.coef=0.1", "kl.teacher=[http://127.0.0.1:1]", "rollout.temperature=0.5"], "rollout.temperature"),
        (["kl.coef=0.1", "kl.teacher=[http://a:1]", "sampling_mask.mode=off"], "rollout.trusted_network"),
        (["optimizer.min_lr=0.1"], "optimizer.min_lr"),
        (
            ["optimizer.schedule=cosine", "optimizer.warmup_steps=9", "optimizer.decay_steps=9"],
            "optimizer.warmup_steps",
        ),
        (["optimizer.schedule=wsd", "optimizer.final_steps=999"], "optimizer.final_steps"),
        (["optimizer.groups=[{match: '('}]"], "optimizer.groups.0.match"),
        (["eval.best_metric=eval/pass_at_4"], "eval.best_metric"),
        (["observe.sinks=[wandb, wandb]"], "observe.sinks"),
        (["task.eval_sets={a/b: x.jsonl}"], "task.eval_sets"),
        (["learner.micro_batch_rows=4", "learner.micro_batch_tokens=4096"], "learner.micro_batch_tokens"),
        (["batch.layout=packed", "learner.fp8=tensorwise", "learner.dtype=bfloat16"], "batch.layout"),
        (["rollout.max_new_tokens=64", "learner.micro_batch_tokens=63"], "learner.micro_batch_tokens"),
        (
            ["rollout.group_size=1", "advantage.name=reinforce_plus_plus", "batch.zero_variance=drop"],
            "batch.zero_variance",
        ),
        (["learner.minibatches=3"], "learner.minibatches"),
        (["rollout.group_size=1"], "rollout.group_size"),
        (["correction.rules=[{name: opsm}, {name: opsm}]"], "correction.rules"),
        (["learner.parallel.virtual_pipeline=2"], "learner.parallel.virtual_pipeline"),
        (["learner.parallel.expert_tensor=2"], "learner.parallel.expert_tensor"),
        (["learner.parallel.tensor=4", "learner.parallel.expert_tensor=3"], "learner.parallel.expert_tensor"),
        (["loss.name=rspo", "replay.mode=none"], "replay.mode"),
        (["loss.name=rspo", "replay.missing=native"], "replay.missing"),
        (["loss.name=rspo", "learner.parallel.pipeline=2"], "learner.parallel.pipeline"),
        (["loss.name=rspo", "pipeline.mode=async", "pipeline.behavior=interpolate"], "pipeline.behavior"),
        (["rollout.engine=sglnag"], "rollout.engine"),
        (["rollout.engine=nowhere.py:engine"], "rollout.engine"),
        (["learner.offload_optimizer=true", "learner.distributed_optimizer=false"], "learner.distributed_optimizer"),
        (["optimizer.extra={optimizer_cpu_offload: true}"], "optimizer.extra.optimizer_cpu_offload"),
    ],
)
def test_impossible_combinations_are_refused(file: Path, overrides: list[str], key: str) -> None:
    assert key in problems(file, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.server.host='::1'"],
        ["rollout.server.host=localhost"],
        ["rollout.url=https://a:1"],
        ["rollout.urls=[http://127.0.0.2:1, 'http://[::1]:1']"],
        ["rollout.url=http://a:1", "rollout.trusted_network=true"],
    ],
)
def test_a_key_that_no_stranger_hears_needs_no_word(file: Path, overrides: list[str]) -> None:
    assert load(file, overrides)


def test_a_probe_stops_no_run_that_replays_nothing(file: Path) -> None:
    """Its records do not train, and the setting is said to have no effect."""
    bounds = {mode: load(file, [f"replay.mode={mode}"]).replay.stops_above for mode in ("none", "R2", "R3")}
    assert bounds == {"none": 1.0, "R2": 0.3, "R3": 0.3}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.trusted_network=true"], "rollout.trusted_network has no effect"),
        (["rollout.url=http://127.0.0.1:1", "rollout.server.port=5"], "rollout.server.port has no effect"),
        (["rollout.engine=bundle", "rollout.bundle=b", "sync.verify=false"], "sync.verify has no effect"),
        (["replay.mode=none", "replay.max_local_flip_rate=0.1"], "replay.max_local_flip_rate has no effect"),
        (["probe.every=0", "probe.save=true"], "probe.save has no effect"),
        (["observe.sinks=[tensorboard]", "observe.project=p"], "observe.project has no effect"),
        (["observe.transcripts=0", "observe.transcript_rollouts=2"], "observe.transcript_rollouts has no effect"),
        (["task.name=jsonl", "task.prompts=p", "task.max_digits=2"], "task.max_digits has no effect"),
        (["task.prompts=p"], "task.prompts has no effect"),
        (["sampling_mask.mode=keep"], "nothing is truncated"),
        (["sampling_mask.mode=off", "sampling_mask.violation=drop"], "sampling_mask.violation has no effect"),
        (["sampling_mask.mode=off", "rollout.top_p=0.9"], "could not sample"),
        (["replay.mode=R2", "learner.minibatches=1"], "no second update"),
    ],
)
def test_settings_without_effect_are_told(
    file: Path, overrides: list[str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load(file, overrides)
    assert any(words in message for message in caplog.messages)


def test_defaults_give_no_warning(file: Path) -> None:
    assert resolve(file).warnings == ()


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("loss.name", "grpo", "did you mean advantage.name? It takes grpo"),
        ("correction.preset", "token_tis", "did you mean correction.rules? It takes token_tis"),
        ("advantage.name", "ppo_clip", "did you mean loss.name? It takes ppo_clip"),
        ("loss.name", "ppo_clap", "did you mean ppo_clip?"),
    ],
)
def test_the_name_of_another_kind_of_method_is_sent_to_its_setting(
    setting: str, value: str, words: str, file: Path
) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        load(file, [f"{setting}={value}"])
    assert words in str(refused.value)


def test_configuration_and_command_import_no_torch(file: Path) -> None:
    code = (
        "import sys, json; from moe_trm.cli import main; main(['config', 'show', sys.argv[1], '--json']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["checkpoint"] == "start"
    done = subprocess.run(
        [sys.executable, "-m", "moe_trm", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "config" in done.stdout


def test_a_quantised_rollout_is_a_policy_of_its_own(file: Path) -> None:
    with pytest.raises(InvalidConfigError, match="weights it rounded") as caught:
        load(file, ["rollout.quantization=fp8", "rollout.server.device=cpu"])
    assert {problem.key for problem in caught.value.problems} == {"sync.verify", "rollout.quantization"}
    good = load(
        file, ["rollout.quantization=fp8", "rollout.server.device=cuda", "sync.verify=false", "replay.mode=none"]
    )
    for said in ("policy of its own", "without a correction", "R3 does"):
        assert any(said in line for line in warnings(good)), said
    # A running server may be anywhere.
    attached = ["rollout.quantization=fp8", "rollout.url=http://127.0.0.1:1", "sync.verify=false"]
    corrected = load(file, [*attached, "rollout.server.device=cpu", "correction.preset=decoupled_token_is"])
    assert not any("without a correction" in line for line in warnings(corrected))


def test_a_run_s_own_record_is_read_without_warnings_of_its_defaults(file: Path, tmp_path: Path) -> None:
    """It has every setting, of which nobody set most."""
    written = tmp_path / "config.json"
    first = resolve(file, ["optimizer.min_lr=0.0001", "rollout.top_p=0.9"])
    assert [line for line in first.warnings if line.startswith("optimizer.min_lr has no effect")]
    written.write_text(json.dumps(first.config.dump()), encoding="utf-8")
    again = resolve(written)
    assert again.config == first.config
    assert again.warnings == first.warnings
    assert again.sources["rollout.top_p"] == "file"
    assert "rollout.min_p" not in again.sources
    # A file of somebody's own that states a default is taken at its word.
    assert any("kl.estimator has no effect" in line for line in resolve(file, ["kl.estimator=k3"]).warnings)


def test_fake_quantisation_needs_no_cuda_and_keeps_the_proof_of_pushes(file: Path) -> None:
    rounded = ["rollout.fake_quantization=int8", "rollout.server.device=cpu", "sync.verify=true"]
    config = load(file, [*rounded, "replay.mode=none"])
    assert config.rollout.rounds_weights == "int8"
    for said in ("policy of its own", "without a correction", "R3 does"):
        assert any(line.startswith("rollout.fake_quantization=int8") and said in line for line in warnings(config)), (
            said
        )
    with pytest.raises(InvalidConfigError, match="rounded once more") as caught:
        load(file, ["rollout.fake_quantization=int8", "rollout.quantization=fp8", "sync.verify=false"])
    assert [problem.key for problem in caught.value.problems] == ["rollout.fake_quantization"]
    assert any("no effect" in line for line in warnings(load(file, ["rollout.fake_quantization_block=64"])))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], False),
        (["rollout.fake_quantization_block=128"], True),
        (["learner.parallel.tensor=2"], True),
        (["learner.backend=deepspeed", "learner.deepspeed.zero_stage=3"], True),
        (["learner.backend=deepspeed", "learner.deepspeed.zero_stage=2"], False),
        (["learner.parallel.tensor=2", "probe.every=0"], False),
    ],
)
def test_a_share_that_ranks_cannot_measure_is_announced(file: Path, overrides: list[str], told: bool) -> None:
    config = load(file, ["rollout.fake_quantization=int8", *overrides])
    assert any("probe/quantization_k3_kl is not measured" in line for line in warnings(config)) == told


@pytest.mark.parametrize(
    ("learner", "rollout", "told"),
    [
        ("float16", "float16", False),
        ("float16", "bfloat16", True),
        ("bfloat16", "float16", True),
        ("bfloat16", "bfloat16", False),
        ("float32", "float16", False),
    ],
)
def test_float16_on_one_side_aligns_nothing(file: Path, learner: str, rollout: str, told: bool) -> None:
    config = load(file, [f"learner.dtype={learner}", f"rollout.server.dtype={rollout}"])
    assert any("aligns nothing" in line for line in warnings(config)) is told


def test_a_loss_scale_without_float16_is_idle(file: Path) -> None:
    scaled = "learner.loss_scale.initial=1024"
    assert any("learner.loss_scale has no effect" in line for line in warnings(load(file, [scaled])))
    assert not any("loss_scale" in line for line in warnings(load(file, [scaled, "learner.dtype=float16"])))
    with pytest.raises(InvalidConfigError, match="power of two"):
        load(file, ["learner.loss_scale.initial=1000"])
