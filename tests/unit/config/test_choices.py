"""Every `auto` as a value: before rules look, the same when it is read again, and told with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.start.preflight import load_here
from moe_trm.cli import main
from moe_trm.config import InvalidConfigError, load, resolve
from moe_trm.config.choices import replay_mode, settle, settle_here, wants_routes
from moe_trm.config.rules import refusals
from moe_trm.config.schema import Config, ReplayMode
from moe_trm.learner.checkpoint.folder import STATE_FILE, CheckpointFolder, FileEntry


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {checkpoint: start}\n")
    return path


def config(**sections: Any) -> Config:
    """A configuration of padded rows, the rollout's routes and pushes by files, unless `sections` say otherwise."""
    chosen = {"batch": {"layout": "padded"}, "replay": {"mode": "R3"}, "sync": {"method": "disk"}, **sections}
    return Config.model_validate({"model": {"checkpoint": "m"}, **chosen})


def refused(path: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(InvalidConfigError) as caught:
        load(path, overrides)
    return {problem.key: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("minibatches", "epochs", "max_age", "expected"),
    [
        (1, 1, 0, "none"),
        (2, 1, 0, "R2"),
        (3, 1, 0, "R2"),
        (1, 2, 0, "R2"),
        (4, 1, 0, "R3"),
        (2, 4, 0, "R3"),
        (1, 1, 1, "R3"),
        (2, 1, 3, "R3"),
    ],
)
def test_auto_follows_off_policiness_and_age(minibatches: int, epochs: int, max_age: int, expected: ReplayMode) -> None:
    run = config(
        replay={"mode": "auto"},
        learner={"minibatches": minibatches, "epochs": epochs},
        pipeline={"mode": "async", "max_staleness": max_age},
    )
    mode, why = replay_mode(run.learner, run.replay, run.pipeline, run.correction)
    assert mode == expected
    assert str(max_age or minibatches * epochs) in why or minibatches == 1


@pytest.mark.parametrize(
    ("rollout", "rules", "mode", "said"),
    [
        ({}, [], "off", "nothing is truncated"),
        ({"top_p": 0.95}, [], "keep", "truncated"),
        ({"top_k": 50}, [], "keep", "truncated"),
        ({"min_p": 0.1}, [], "keep", "truncated"),
        ({}, [{"name": "trm_max", "thresholds": {"max_kl": 0.1, "divergence": "exact"}}], "keep", "divergence=exact"),
        ({}, [{"name": "trm_max", "thresholds": {"max_kl": 0.1}}], "off", "nothing is truncated"),
    ],
)
def test_masks_are_recorded_where_there_is_something_to_mask(
    rollout: dict[str, Any], rules: list[dict[str, Any]], mode: str, said: str
) -> None:
    """An untruncated run over a real vocabulary would record thousands of ids for every token."""
    run = config(rollout=rollout, correction={"rules": rules})
    settled, choices = settle(run)
    [choice] = [choice for choice in choices if choice.key == "sampling_mask.mode"]
    assert (settled.sampling_mask.mode, choice.value) == (mode, mode)
    assert said in choice.reason
    assert settle(settled) == (settled, ())
    assert run.keeps_masks == settled.keeps_masks == (mode == "keep")
    for given in ("keep", "off"):
        asked = config(rollout=rollout, correction={"rules": rules}, sampling_mask={"mode": given})
        assert settle(asked) == (asked, ())
        assert asked.keeps_masks == (given == "keep")


AWAY = {"url": "http://10.0.0.7:30000", "trusted_network": True}
"""A server on another machine."""


@pytest.mark.parametrize(
    ("sections", "method", "said"),
    [
        ({}, "disk", "the run starts the server"),
        ({"rollout": {"url": "http://127.0.0.1:30000"}}, "disk", "on this machine"),
        ({"rollout": {"url": "http://[::1]:30000"}}, "disk", "on this machine"),
        ({"rollout": AWAY}, "distributed", "sync.dir"),
        ({"rollout": {**AWAY, "url": None, "urls": ["http://a:1"]}}, "distributed", "sync.dir"),
        ({"rollout": {**AWAY, "url": None, "urls": ["http://a:1", "http://b:1"]}}, "disk", "there are 2"),
        ({"rollout": AWAY, "sync": {"dir": "/mnt/pushes"}}, "disk", "sync.dir names"),
        ({"rollout": AWAY, "pipeline": {"mode": "async", "partial": "interrupt"}}, "disk", "cannot interrupt"),
        ({"rollout": {**AWAY, "server": {"tensor_parallel": 8}}}, "distributed", "sync.dir"),
        ({"rollout": {**AWAY, "engine": "vllm"}}, "distributed", "sync.dir"),
        ({"rollout": {**AWAY, "engine": "vllm", "server": {"tensor_parallel": 2}}}, "disk", "takes no broadcasts"),
        ({"rollout": {"engine": "bundle", "bundle": "b"}}, "disk", "takes no weights"),
        ({"rollout": {"engine": "bundle", "bundle": "b"}, "sync": {"method": "distributed"}}, "distributed", ""),
    ],
)
def test_weights_travel_by_files_where_the_server_sees_them(sections: dict[str, Any], method: str, said: str) -> None:
    run = config(**{"sync": {}, **sections})
    settled, choices = settle(run)
    reasons = [choice.reason for choice in choices if choice.key == "sync.method"]
    assert settled.sync.method == method
    assert said in reasons[0] if said else not reasons
    assert settle(settled) == (settled, ())
    assert not [problem for problem in refusals(run) if problem.key in ("sync.method", "pipeline.partial")]


def test_the_reason_says_what_the_other_mode_would_lose(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever the choice is told; `config explain` has all of them."""
    others = {"none": ("R2", "R3"), "R2": ("R3",), "R3": ("R2",)}
    reasons = []
    for minibatches, max_age in ((1, 0), (2, 0), (8, 0), (1, 1), (1, 4)):
        run = config(
            replay={"mode": "auto"},
            learner={"minibatches": minibatches},
            pipeline={"mode": "async", "max_staleness": max_age},
        )
        mode, why = replay_mode(run.learner, run.replay, run.pipeline, run.correction)
        assert all(f"{other} would" in why for other in others[mode])
        assert "." not in why
        reasons.append(why)
    assert len(set(reasons)) == 5
    assert main(["config", "explain", "replay.mode"]) == 0
    said = capsys.readouterr().out
    assert [line.split(":")[0].split()[-1] for line in said.splitlines() if "auto ->" in line] == [
        "none", "R2", "R3", "R3",
    ]  # fmt: skip
    assert reasons[1] in said


def test_loading_gives_the_value_and_keeps_the_reason(file: Path, tmp_path: Path) -> None:
    resolved = resolve(file)
    assert resolved.config.replay.mode == load(file).replay.mode == "R2"
    choice, mask, push = resolved.choices
    assert (mask.key, mask.value) == ("sampling_mask.mode", "off")
    assert (push.key, push.value) == ("sync.method", "disk")
    assert (choice.key, str(choice)) == ("replay.mode", f"auto -> R2: {choice.reason}")
    assert "2 optimizer steps" in choice.reason
    again = tmp_path / "config.json"
    again.write_text(json.dumps(resolved.config.dump()))
    assert resolve(again).config == resolved.config
    assert resolve(again).choices == ()


def test_show_tells_what_was_asked_and_what_it_became(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(file), "learner.minibatches=1"]) == 0
    lines = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["replay.mode"].startswith("replay.mode: none ")
    assert "# default, auto -> none: one optimizer step" in lines["replay.mode"]
    assert "chosen at launch" in lines["rollout.server.device"]
    assert "chosen at launch" in lines["learner.transformer_engine"]


@pytest.mark.parametrize(
    "without_anchor", ["correction.preset=bypass_ppo_clip", "pipeline.proximal=average"], ids=["bypass", "average"]
)
def test_auto_replays_the_rollout_where_there_is_no_pass_to_freeze(file: Path, without_anchor: str) -> None:
    """R2 itself is refused there."""
    assert "R2" in str(refused(file, without_anchor, "replay.mode=R2"))
    choice = resolve(file, [without_anchor]).choices[0]
    assert (choice.key, choice.value) == ("replay.mode", "R3")
    assert "R2 would replay the routes of a pass" in choice.reason
    assert load(file, [without_anchor, "learner.minibatches=1"]).replay.mode == "none"


def test_a_refused_choice_is_told_with_its_reason(file: Path) -> None:
    """With a typo elsewhere too, and to whoever asks the rules without loading."""
    needs_routes, asked = ["loss.name=rspo", "learner.minibatches=1"], ["replay.mode=none"]
    said = refused(file, *needs_routes)["replay.mode"]
    assert "both passes must use the same experts" in said
    assert "auto -> none: one optimizer step" in said
    assert "auto" not in refused(file, *needs_routes, *asked)["replay.mode"]
    assert {"replay.mode", "optimizer.rate"} <= set(refused(file, *needs_routes, "optimizer.rate=1"))
    run = config(replay={"mode": "auto"}, loss={"name": "rspo"}, learner={"minibatches": 1})
    assert [problem.key for problem in refusals(run)] == ["replay.mode"]


def test_routes_are_wanted_by_what_auto_became_or_by_the_probe(file: Path) -> None:
    assert not wants_routes(load(file, ["learner.minibatches=1", "probe.every=0"]))
    assert not wants_routes(config(replay={"mode": "auto"}, learner={"minibatches": 1}, probe={"every": 0}))
    assert wants_routes(load(file, ["learner.minibatches=4", "probe.every=0"]))
    assert wants_routes(load(file, ["learner.minibatches=1", "probe.every=5"]))


@pytest.mark.parametrize(
    ("cuda", "problem", "switch", "device"),
    [(False, "", "off", "cpu"), (True, "no library", "off", "cuda"), (True, "", "on", "cuda")],
)
def test_the_machine_decides_layers_and_device(cuda: bool, problem: str, switch: str, device: str) -> None:
    settled, choices = settle_here(config(), cuda=cuda, problem=lambda: problem)
    assert (settled.learner.transformer_engine, settled.rollout.server.device) == (switch, device)
    assert {choice.key: choice.value for choice in choices} == {
        "learner.transformer_engine": switch,
        "rollout.server.device": device,
    }
    assert any(choice.reason == "no library" for choice in choices) is bool(problem)
    assert settle_here(settled, cuda=not cuda, problem=lambda: "another") == (settled, ())


def test_a_machine_decides_nothing_for_engines_that_are_not_its_own() -> None:
    attached = config(rollout={"url": "http://127.0.0.1:1"}, learner={"backend": "deepspeed"})
    assert settle_here(attached, cuda=True, problem=lambda: "") == (attached, ())
    recorded = config(rollout={"engine": "bundle", "bundle": "b"}, learner={"transformer_engine": "off"})
    assert settle_here(recorded, cuda=True, problem=lambda: "") == (recorded, ())


@pytest.mark.parametrize(
    ("learner", "cuda", "known", "layout", "said"),
    [
        ({}, False, False, "packed", "without padding"),
        ({"backend": "deepspeed"}, False, True, "packed", "without padding"),
        ({"backend": "deepspeed"}, False, False, "padded", "every layer of this model"),
        ({"fp8": "tensorwise", "dtype": "bfloat16"}, False, True, "padded", "8-bit"),
        ({}, True, True, "padded", "on CPUs only"),
        ({"backend": "deepspeed"}, True, True, "padded", "on CPUs only"),
    ],
)
def test_rows_are_packed_where_packs_were_proved(
    learner: dict[str, str], cuda: bool, known: bool, layout: str, said: str
) -> None:
    given = config(learner=learner, batch={"layout": "auto"})
    settled, choices = settle_here(given, cuda=cuda, problem=lambda: "", known_model=lambda: known)
    assert settled.batch.layout == layout
    [choice] = [choice for choice in choices if choice.key == "batch.layout"]
    assert (choice.value, said in choice.reason) == (layout, True)
    asked = config(learner=learner, batch={"layout": "padded"})
    assert settle_here(asked, cuda=False, problem=lambda: "no library")[0].batch.layout == "padded"


def test_a_launch_packs_rows_of_a_model_that_deepspeed_and_we_know(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "start").mkdir()
    own = ["learner.backend=deepspeed", "batch.layout=auto", f"model.checkpoint={tmp_path / 'start'}"]
    assert load(file, own).batch.layout == "auto"
    assert load_here(str(file), own)[0].batch.layout == "padded"
    for name, expected in (("Qwen3MoeForCausalLM", "packed"), ("NobodysForCausalLM", "padded")):
        (tmp_path / "start" / "config.json").write_text(json.dumps({"architectures": [name]}))
        assert load_here(str(file), own)[0].batch.layout == expected


@pytest.mark.parametrize(
    ("saved", "resume", "expected"),
    [
        ({"batch": {"layout": "padded"}}, "auto", "padded"),
        ({"batch": {}}, "auto", "padded"),
        ({}, "auto", "padded"),
        ({"batch": {"layout": "packed"}}, "auto", "packed"),
        ({"batch": {"layout": "padded"}}, "never", "packed"),
        ({"batch": {"layout": "padded"}}, "PATH", "padded"),
        (None, "auto", "packed"),
    ],
    ids=str,
)
def test_a_run_keeps_the_layout_of_the_checkpoint_it_goes_on_from(
    saved: dict[str, Any] | None,
    resume: str,
    expected: str,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    root = tmp_path / "runs" / "first" / "checkpoints"
    folder = CheckpointFolder(root)
    if saved is not None:
        for step, settings in ((1, {"batch": {"layout": "packed"}}), (2, saved)):
            folder.partial(step)
            folder.commit(step, {STATE_FILE: FileEntry(0, "")}, settings)
    name = "second" if resume == "PATH" else "first"
    own = [f"run_dir={tmp_path / 'runs'}", f"name={name}"]
    own += [f"checkpoint.resume={resume.replace('PATH', str(folder.path(2)))}"]
    assert load_here(str(file), own)[0].batch.layout == expected
    assert load_here(str(file), [*own, "batch.layout=packed"])[0].batch.layout == "packed"


def test_a_checkpoint_that_cannot_be_read_decides_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "first" / "checkpoints" / "step-000001").mkdir(parents=True)
    own = [f"run_dir={tmp_path}", "name=first"]
    assert load_here(str(file), own)[0].batch.layout == "packed"


FP8 = ["learner.fp8=tensorwise", "learner.dtype=bfloat16"]
QUANTISED = ["rollout.quantization=fp8", "sync.verify=false"]


@pytest.mark.parametrize(
    ("overrides", "key"), [(FP8, "learner.transformer_engine"), (QUANTISED, "rollout.quantization")]
)
def test_what_the_machine_decides_is_judged_by_the_same_rules(
    file: Path, overrides: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    load(file, overrides)  # read on a machine that need not be the one it runs on
    with pytest.raises(InvalidConfigError, match="no CUDA device" if key.startswith("learner") else "need CUDA") as it:
        load_here(str(file), overrides)
    assert [problem.key for problem in it.value.problems] == [key]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("launch.start.preflight.transformer_engine_problem", lambda: "")
    assert {choice.key for choice in load_here(str(file), overrides)[1]} == {
        "replay.mode",
        "sampling_mask.mode",
        "sync.method",
        "learner.transformer_engine",
        "batch.layout",
        "rollout.server.device",
    }


def test_a_missing_gpu_is_told_before_what_could_be_mended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once: else a user mends the dtype, to be told then that no dtype helps on this machine."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidConfigError, match="no CUDA device") as it:
        load_here(str(file), [*FP8, "learner.dtype=float32"])
    assert [problem.key for problem in it.value.problems] == ["learner.transformer_engine", "learner.dtype"]


def test_quantised_servers_elsewhere_and_recordings_need_no_cuda_here(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    load_here(str(file), [*QUANTISED, "rollout.url=http://127.0.0.1:1"])
    load_here(str(file), [*QUANTISED, "rollout.engine=bundle", "rollout.bundle=b"])
