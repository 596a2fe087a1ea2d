"""Everything that is missing is told in one message, before a process is started."""

from __future__ import annotations

import json
import socket
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from zmq import Socket, ZMQError
from zmq.constants import SocketType
from zmq.sugar.context import Context

from launch.job import run_job
from launch.start.places import LONGEST_SOCKET, check_folders, check_server
from launch.start.preflight import check_launch
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError, SeveralRefusals
from moe_trm.runtime.private import Scratch
from tests.unit.sections import sections_of


def config(folder: Path, **sections: Any) -> Config:
    return Config.model_validate({"model": {"checkpoint": str(folder / "none")}, "run_dir": str(folder), **sections})


def folders_of(chosen: Config) -> list[Any]:
    return sections_of(chosen, "checkpoint", "record", "sync", "name", "run_dir")


def test_checkpoint_prompts_and_run_dir_are_missed_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = {
        "model": {"checkpoint": str(tmp_path / "nowhere")},
        "run_dir": str(tmp_path / "file"),
        "task": {"name": "jsonl", "prompts": "no.jsonl", "eval_prompts": "nor.jsonl"},
    }
    with pytest.raises(SeveralRefusals) as caught:
        check_launch(Config.model_validate(run), world_size=1)
    said = str(caught.value)
    assert len(caught.value.reasons) == 3
    for words in ("checkpoint folder not found", "no.jsonl", "nor.jsonl", "config key run_dir"):
        assert words in said
    # The command line does the same, with the port and the device, which only it starts anything on.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run["rollout"] = {"server": {"port": taken.getsockname()[1]}}
        (tmp_path / "run.yaml").write_text(json.dumps(run))
        with pytest.raises(SeveralRefusals) as caught:
            run_job(str(tmp_path / "run.yaml"), [])
    assert len(caught.value.reasons) == 4
    assert "not available" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("run_dir", {"run_dir": "FILE/runs"}),
        ("run_dir", {"run_dir": "/proc"}),
        ("checkpoint.dir", {"checkpoint": {"dir": "FILE/x"}}),
        ("record.bundle", {"record": {"bundle": "FILE"}}),
        ("sync.dir", {"sync": {"dir": "FILE/x"}}),
    ],
)
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, key: str, sections: dict[str, Any]) -> None:
    file = tmp_path / "file"
    file.touch()
    named = json.loads(json.dumps(sections).replace("FILE", str(file)))
    with pytest.raises(ConfigError, match=rf"config key {key}"):
        check_folders(*folders_of(config(tmp_path, **named)))
    assert sorted(tmp_path.iterdir()) == [file]


def test_a_folder_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    check_folders(*folders_of(config(tmp_path / "a" / "b", checkpoint={"dir": str(tmp_path / "c")})))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("num_bytes", "refused"), [(78, False), (79, True), (95, True)])
def test_a_folder_for_temporary_files_is_short_enough_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, refused: bool
) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    long = folder / ("x" * (num_bytes - len(str(folder)) - 1))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    refusal = pytest.raises(ConfigError, match="at most 78 bytes") if refused else nullcontext()
    with refusal:
        check_folders(*folders_of(config(tmp_path)))
    server: Socket[bytes]
    with Scratch(long) as scratch, Context.instance().socket(SocketType.PAIR) as server:
        made = pytest.raises(ZMQError) if refused else nullcontext()
        with made:
            server.bind(f"ipc://{scratch}/{LONGEST_SOCKET}")
    long.rmdir()
    folder.rmdir()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.server\.device"):
        check_server(config(Path("x"), rollout={"server": {"device": "cuda", "port": 0}}).rollout)
    check_server(config(Path("x"), rollout={"server": {"port": 0}}).rollout)
