"""The doctor's checks that need no engine: versions, space, ports, tokenizers, and the words of a failed probe."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launch.start.checks import Check, attempt
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError, EngineError
from moe_trm.tools.doctor import examine as examine_module
from moe_trm.tools.doctor.environment import environment
from moe_trm.tools.doctor.probe import NEUTRAL, ProbeFailed, last_error
from moe_trm.tools.doctor.served import differing


def config(tmp_path: Path, **sections: object) -> Config:
    return Config.model_validate({"model": {"checkpoint": str(tmp_path)}, "run_dir": str(tmp_path), **sections})


def looked(config: Config) -> list[Check]:
    """Every check of the machine."""
    folder, keeps = config.model.checkpoint, config.checkpoint
    return [*environment(folder, config.rollout, config.learner, config.sync, keeps, config.run_dir)]


def named(found: list[Check], name: str) -> Check:
    return next(check for check in found if check.name == name)


def test_a_taken_port_fails_and_a_free_one_passes(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = named(looked(config(tmp_path, rollout={"server": {"port": port}})), "port")
    assert (check.status, str(port) in check.says) == ("fail", True)
    assert "rollout.server.port=0" in check.fix
    assert named(looked(config(tmp_path, rollout={"server": {"port": 0}})), "port").status == "ok"


def test_too_little_space_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_trm.tools.doctor.environment.checkpoint_bytes", lambda _folder: 2**60)
    found = looked(config(tmp_path))
    assert {named(found, name).status for name in ("disk", "weight pushes", "memory")} == {"fail"}


def test_cuda_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = looked(config(tmp_path, rollout={"server": {"device": "cuda"}}))
    assert named(found, "devices").status == "fail"


def test_a_failed_probe_names_no_path_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's own folder is removed unless it was asked to keep it."""

    def fails(*_arguments: object) -> None:
        raise ProbeFailed("it failed", where=f"{tmp_path}/job.log", got=f"died ({tmp_path}/doctor/rollout.log)")

    monkeypatch.setattr(examine_module, "zero_update", fails)
    monkeypatch.setattr(examine_module, "_before", lambda *_arguments: iter(()))
    for kept in (True, False):
        found = examine_module.examine("c.yaml", [], config(tmp_path), 1, tmp_path, lambda _check: None, kept=kept)
        [check] = found.checks
        assert (str(tmp_path) in check.says + check.fix) is kept
        assert ("--keep" in check.fix) is not kept
        assert "doctor/rollout.log" in check.says


def test_an_error_of_several_lines_stays_one(tmp_path: Path) -> None:
    error = EngineError("it died", where="a.log", got="first\nsecond", expected="life", fix="mend it")
    assert last_error(f"starting\nerror: {error}\nend") == f"error: {error}"


def test_a_typed_error_is_a_failed_check() -> None:
    def look() -> str:
        raise ConfigError("no such thing", where="here", got=1, expected=2, fix="do this")

    assert attempt("it", look) == Check("it", "fail", "no such thing (here): got 1, expected 2", "do this")
    assert attempt("it", lambda: "fine") == Check("it", "ok", "fine")


def test_only_keys_that_change_numbers_differ() -> None:
    a = {"rope_theta": 1e4, "dtype": "float32", "num_experts": 8}
    assert differing(a, a | {"dtype": "bfloat16", "_name_or_path": "x"}) == {}
    assert differing(a, {"rope_theta": 1e6, "num_experts": 8}) == {"rope_theta": (1e4, 1e6)}


def test_the_last_words_of_a_failed_run() -> None:
    log = (
        "step 0\nControllerError: the controller refused 'push'\n"
        "  got:      SyncError: the engine's weights differ\n  do:       look\nlearner rank 0 ended"
    )
    assert last_error(log) == (
        "ControllerError: the controller refused 'push'\n"
        "  got:      SyncError: the engine's weights differ\n  do:       look"
    )
    assert last_error("nothing\ntyped") == "nothing\ntyped"


def test_the_probe_changes_nothing_that_it_measures() -> None:
    keys = {word.split("=")[0] for word in NEUTRAL}
    assert not {
        key
        for key in keys
        if key.startswith(("rollout", "sampling_mask", "learner.parallel", "learner.dtype", "model", "sync"))
    }
