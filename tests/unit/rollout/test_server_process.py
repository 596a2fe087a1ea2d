"""Supervision of a child process, with a small stand-in named `sglang` on the path.

It starts, refuses, dies, times out, and the whole tree is stopped.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, EngineError
from moe_trm.rollout.servers import process as supervisor
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.port import held_port
from moe_trm.rollout.servers.process import start_server
from moe_trm.rollout.sglang.environment import child_environment
from moe_trm.rollout.sglang.launch import launch_command
from moe_trm.runtime.private import remove_abandoned
from tests.unit.processes import alive, wait_until_dead


def config(tmp_path: Path, *extra: str, port: int = 0, timeout_s: float = 20.0) -> Config:
    server = {"port": port, "device": "cpu", "extra_args": extra, "startup_timeout_s": timeout_s}
    return Config.model_validate({"model": {"checkpoint": str(tmp_path)}, "rollout": {"server": server}})


@pytest.mark.parametrize("extra", [(), ("--stubborn", "yes")])
def test_stop_ends_the_whole_tree_within_seconds(tmp_path: Path, pids_file: Path, extra: tuple[str, ...]) -> None:
    server = start_server(Served.of(config(tmp_path, *extra)), tmp_path / "run" / "rollout.log", "secret-key")
    pids = [int(pid) for pid in pids_file.read_text().split()]
    running, left = [alive(pid) for pid in pids], left_by(pids[0], server.scratch.path)
    started = time.monotonic()
    server.stop(grace_s=0.5)
    server.stop(grace_s=0.5)
    assert time.monotonic() - started < 5
    assert running == [True, True]
    assert len(left) == 2
    assert server.poll() is not None
    assert wait_until_dead(pids)
    assert not any(path.exists() for path in left)


def test_a_semaphore_made_while_it_serves_goes_with_the_server(tmp_path: Path, pids_file: Path) -> None:
    """A kill of the group takes Python's resource tracker too, which would have removed it."""
    server = start_server(Served.of(config(tmp_path)), tmp_path / "rollout.log", "secret-key")
    try:
        assert server.answers("/model_info", timeout_s=20)
        name = Path(f"{pids_file}.lock").read_text()
        semaphore = Path(f"/dev/shm/sem.{name.removeprefix('/')}")
        assert semaphore.exists()
    finally:
        server.stop(grace_s=0.0)
    assert not semaphore.exists()


def left_by(process: int, scratch: Path) -> list[Path]:
    """What the stand-in leaves behind: its file of shared memory, and a temporary one in its private folder."""
    shared = Path(f"/dev/shm/sglang_loads_{process}_fake.shm")
    return [path for path in (shared, *scratch.glob("tmp*")) if path.exists()]


def test_a_server_answers_although_nobody_reads_its_output(
    tmp_path: Path, pids_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process that watches it is stopped: more than any pipe holds."""
    monkeypatch.setattr(
        supervisor, "_pump", lambda process, source, written, log, secret: [source.close(), log.close()]
    )
    server = start_server(Served.of(config(tmp_path, "--chatty", "yes")), tmp_path / "rollout.log", "secret-key")
    try:
        for _ in range(3):
            with urllib.request.urlopen(f"{server.url}/health", timeout=20) as response:
                assert response.status == 200
    finally:
        server.stop(grace_s=0.5)


def test_output_that_has_been_copied_is_not_kept(
    tmp_path: Path, pids_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KEPT_OUTPUT_BYTES", 1000)
    log = tmp_path / "rollout.log"
    server = start_server(Served.of(config(tmp_path, "--chatty", "yes")), log, "secret-key")
    try:
        for _ in range(3):
            urllib.request.urlopen(f"{server.url}/health", timeout=20).close()
            time.sleep(2 * supervisor.POLL_S)
    finally:
        server.stop(grace_s=0.5)
    chatter = [line for line in log.read_text().splitlines() if line.startswith("chatter")]
    assert len(chatter) > 3
    assert set(chatter) == {"chatter " * 50_000}


class Disk(io.BytesIO):
    """A log on a disk with `room` bytes, which takes a part of what does not fit."""

    room = 6

    def write(self, data: Any) -> int:
        if data and not self.room:
            raise OSError(errno.ENOSPC, "full")
        taken = super().write(bytes(data)[: self.room])
        self.room -= taken
        return taken

    def close(self) -> None:
        self.said = self.getvalue()


class Output(list[bytes]):
    """What a server writes, until it ends. Before its last line there is room on the disk again."""

    def __init__(self, disk: Disk) -> None:
        super().__init__([b"the first line\n", b"the second\n", b"the third\n"])
        self.disk = disk

    def read(self, _: int) -> bytes:
        self.disk.room = 1000 if len(self) == 1 else self.disk.room
        return self.pop(0) if self else b""

    def poll(self) -> int | None:
        return None if self else 0

    def tell(self) -> int:
        return 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_what_a_full_disk_did_not_take_is_said_once_there_is_room() -> None:
    disk = Disk()
    output: Any = Output(disk)
    supervisor._pump(output, output, os.open(os.devnull, os.O_WRONLY), cast(Any, disk), b"secret")
    missing = len("the first line\nthe second\n") - 6
    assert disk.said.decode() == f"the fi[{missing} bytes are missing here: this log could not be written]\nthe third\n"


def test_a_full_disk_under_its_log_does_not_let_the_output_pile_up(
    tmp_path: Path, pids_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KEPT_OUTPUT_BYTES", 1000)
    full = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 - the log pump closes it
    monkeypatch.setattr(supervisor, "append_private", lambda *_, **__: full)
    server = start_server(Served.of(config(tmp_path, "--chatty", "yes")), tmp_path / "rollout.log", "secret-key")
    try:
        for _ in range(3):
            urllib.request.urlopen(f"{server.url}/health", timeout=20).close()
        until, kept = time.monotonic() + 60, Path(f"/proc/{server.process.pid}/fd/1")
        while kept.stat().st_size and time.monotonic() < until:
            time.sleep(0.05)
        assert not kept.stat().st_size
        assert server.log_pump.is_alive()
    finally:
        server.stop(grace_s=0.5)


def test_the_key_reaches_the_server_but_neither_its_arguments_nor_the_log(tmp_path: Path, pids_file: Path) -> None:
    log = tmp_path / "rollout.log"
    server = start_server(Served.of(config(tmp_path)), log, "secret-key")
    arguments = Path(f"/proc/{server.process.pid}/cmdline").read_text()
    environment = Path(f"/proc/{server.process.pid}/environ").read_text()
    server.stop(grace_s=0.5)
    assert "secret-key" not in arguments
    assert "MOE_TRM_API_KEY" not in environment
    assert log.read_text().splitlines()[0] == 'server_args api-key: "***" 1 1'


def test_a_server_that_dies_shows_its_last_words(tmp_path: Path, pids_file: Path) -> None:
    with pytest.raises(EngineError, match="died while starting") as caught:
        start_server(Served.of(config(tmp_path, "--die", "yes")), tmp_path / "rollout.log", "key")
    said = str(caught.value)
    assert "bad option: --die" in said
    # Neither its arguments nor a file that is gone again.
    assert "server_args" not in said
    assert "moe-trm-server-" not in said
    assert str(tmp_path / "rollout.log") in said


def test_a_server_that_dies_does_not_tell_what_one_before_it_wrote(tmp_path: Path, pids_file: Path) -> None:
    log = tmp_path / "rollout.log"
    log.write_text("Traceback (most recent call last):\n  File x\nValueError: of an earlier run\n")
    with pytest.raises(EngineError, match="died while starting") as caught:
        start_server(Served.of(config(tmp_path, "--die", "yes")), log, "key")
    assert "earlier run" not in str(caught.value)


def test_a_server_that_never_answers_is_stopped(tmp_path: Path, pids_file: Path) -> None:
    with pytest.raises(EngineError, match="did not become ready"):
        start_server(Served.of(config(tmp_path, "--never", "yes", timeout_s=2.0)), tmp_path / "rollout.log", "key")
    assert wait_until_dead([int(pid) for pid in pids_file.read_text().split()])


def test_a_taken_port_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EngineError, match="not available"):
            start_server(Served.of(config(tmp_path, port=taken.getsockname()[1])), tmp_path / "rollout.log", "key")


def test_a_missing_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to serve"):
        start_server(Served.of(config(tmp_path / "nowhere")), tmp_path / "rollout.log", "key")


def test_the_launcher_stops_its_server_on_a_signal(tmp_path: Path, pids_file: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"name: r\nrun_dir: {tmp_path}\nmodel: {{checkpoint: {tmp_path}}}\n"
        "rollout: {server: {port: 0, device: cpu}}\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MOE_TRM_API_KEY"}
    command = [sys.executable, "-m", "launch.rollout", str(path)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(3)]
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=15) == 0, launcher.stdout.read()
    assert "ready at http://127.0.0.1:" in lines[1]
    key = lines[2].rpartition("=")[2].strip()
    assert len(key) > 20
    assert key not in (tmp_path / "r" / "rollout.log").read_text()
    assert wait_until_dead([int(pid) for pid in pids_file.read_text().split()])


def test_the_command_line_of_each_device(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    cpu = launch_command(Served.of(config(tmp_path)), tmp_path, 7, "k.yaml")
    pairs = dict(pairwise(cpu))
    assert pairs["--attention-backend"] == "torch_native"
    assert pairs["--max-total-tokens"] == "65536"
    # What other processes may take of the free memory while the server loads.
    assert float(pairs["--mem-fraction-static"]) >= 0.9
    assert int(pairs["--max-mamba-cache-size"]) == 4 * int(pairs["--max-running-requests"])
    assert {"--sleep-on-idle", "--enable-return-routed-experts", "--skip-server-warmup"} <= set(cpu)
    assert "--disable-overlap-schedule" in cpu
    server = config(tmp_path).rollout.server.model_copy(update={"device": "cuda"})
    base = config(tmp_path)
    cuda = launch_command(
        Served.of(base.model_copy(update={"rollout": base.rollout.model_copy(update={"server": server})})),
        tmp_path,
        7,
        "k.yaml",
    )
    assert "--enable-return-routed-experts" in cuda
    assert not {"torch_native", "--sleep-on-idle", "--skip-server-warmup", "--disable-overlap-schedule"} & set(cuda)
    assert "--enable-memory-saver" not in cuda
    plain = {"A": "1", "TORCHINDUCTOR_CACHE_DIR": "/cache", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    own = {"TMPDIR": str(tmp_path)}
    assert child_environment(plain, False, tmp_path, alone=False, dtype="bfloat16") == plain | own
    on_cpu = child_environment(plain, True, tmp_path, alone=False, dtype="bfloat16")
    alone = child_environment({}, False, tmp_path, alone=True, dtype="float16")
    assert (alone["GLOO_SOCKET_IFNAME"], alone["SGLANG_MAMBA_CONV_DTYPE"]) == ("lo", "float16")
    assert on_cpu["TORCHDYNAMO_DISABLE"] == on_cpu["SGLANG_ENABLE_TORCH_INFERENCE_MODE"] == "1"


def test_a_hybrid_gets_the_interval_that_transformers_does_not_write(tmp_path: Path) -> None:
    hf = {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    pairs = dict(pairwise(launch_command(Served.of(config(tmp_path)), tmp_path, 7, "k.yaml")))
    assert json.loads(pairs["--json-model-override-args"]) == {"full_attention_interval": 4}
    (tmp_path / "config.json").write_text(json.dumps({**hf, "full_attention_interval": 4}))
    assert "--json-model-override-args" not in launch_command(Served.of(config(tmp_path)), tmp_path, 7, "k.yaml")


def test_attention_with_sinks_has_a_backend_of_its_own_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 2}')
    command = launch_command(Served.of(config(tmp_path)), tmp_path, 7, "k.yaml")
    assert dict(pairwise(command))["--attention-backend"] == "triton"
    assert "--disable-hybrid-swa-memory" in command


@pytest.mark.parametrize(("device", "frees"), [("cuda", True), ("cpu", False)])
def test_only_a_server_on_a_gpu_can_free_its_memory(tmp_path: Path, device: str, frees: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = {"device": device, "port": 7}
    shared = Config.model_validate(
        {"model": {"checkpoint": str(tmp_path)}, "rollout": {"colocate": True, "server": server}}
    )
    assert ("--enable-memory-saver" in launch_command(Served.of(shared), tmp_path, 7, "k.yaml")) is frees


OWNER = """
import os, sys
from pathlib import Path
from typing import Any
from tests.unit.rollout.test_server_process import config
from moe_trm.rollout.servers import process as supervisor
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.port import held_port
from moe_trm.rollout.servers.process import start_server
server = start_server(Served.of(config(Path(sys.argv[1]))), Path(sys.argv[1]) / "rollout.log", "key")
print("serving", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_server_ends_with_its_owner_even_when_both_cannot_act(tmp_path: Path, pids_file: Path, stopped: bool) -> None:
    """The owner is killed; the server is stopped, so that it could not end itself."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"serving\n"
        pids = [int(pid) for pid in pids_file.read_text().split()]
        if stopped:
            os.killpg(pids[0], signal.SIGSTOP)
        assert all(map(alive, pids))
        owner.kill()
    assert wait_until_dead(pids)
    [scratch] = tmp_path.glob("moe-trm-*")
    assert len(left := left_by(pids[0], scratch)) == 2
    remove_abandoned(tmp_path)
    assert not any(path.exists() for path in left)


def test_nobody_gets_the_port_of_a_server_that_has_not_listened_yet() -> None:
    """Neither one who asks for it nor an outgoing connection; the server itself does, as uvicorn binds."""
    with held_port("127.0.0.1", 0) as port, socket.socket() as other, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(EngineError, match="not available"), held_port("127.0.0.1", number):
            pass


def test_of_two_jobs_that_start_at_one_port_the_second_is_told() -> None:
    """Neither server listens yet. The second learner would reach the first server, and blame its key."""
    with held_port("127.0.0.1", 0) as port:
        second = held_port("127.0.0.1", port)
        with pytest.raises(EngineError, match="another job starts its server there"), second:
            raise AssertionError("both start")
    with held_port("127.0.0.1", port):
        pass
