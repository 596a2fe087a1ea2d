"""Starts and stops one stock SGLang server as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from moe_trm.config.choices import server_device
from moe_trm.config.schema import Config, ServerConfig
from moe_trm.errors import CheckpointError, ConfigError, EngineError
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.registry import find_family
from moe_trm.rollout.sglang.environment import child_environment
from moe_trm.rollout.sglang.last_words import last_words
from moe_trm.rollout.sglang.port import held_port
from moe_trm.rollout.sglang.served_folder import RANDOM_WEIGHTS, check_quantised, folder_to_serve
from moe_trm.runtime.lifeline import Lifeline

LAST_BYTES = 1 << 18
"""End of the log in which an error is looked for."""
POLL_S = 0.25
"""Pause between two looks at a process or a port that is not ready yet."""
KEPT_OUTPUT_BYTES = 16 * 2**20
"""Most of the server's output that is kept beside its log, apart from what has not been copied yet."""
COPIED_BYTES = 2**20
"""Most bytes of it that are copied at once."""
KILL_PATIENCE_S = 5.0
"""Longest wait for killed processes to disappear."""


@dataclass
class Server:
    """A running server: its address, its key, and its process group.

    The group is stopped as a whole, at the latest when this process ends. `log_begin` is the size of the log at its
    start: what is before that, others wrote.
    """

    url: str
    api_key: str
    log_path: Path
    process: subprocess.Popen[bytes]
    log_pump: threading.Thread
    lifeline: Lifeline
    log_begin: int = 0

    def poll(self) -> int | None:
        """Exit status of the server, None while it runs."""
        return self.process.poll()

    def stop(self, grace_s: float = 3.0) -> None:
        """End the server and every process it started. Safe to call twice.

        Its main process is asked first; after `grace_s` seconds the group is killed.
        """
        if self.poll() is None:
            # Only the main process: workers that end on their own look like a crash to it, and it waits to write a
            # diagnosis.
            self.process.terminate()
            _group_is_gone(self.process, grace_s)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        else:
            _group_is_gone(self.process, KILL_PATIENCE_S)
        self.process.wait()
        self.lifeline.release()
        self.log_pump.join(timeout=KILL_PATIENCE_S)

    def last_words(self) -> str:
        """The errors that the server wrote, or else its last lines; once it has ended, all of them."""
        if self.poll() is not None:
            self.log_pump.join(timeout=KILL_PATIENCE_S)
        with self.log_path.open("rb") as log:
            log.seek(max(self.log_begin, os.fstat(log.fileno()).st_size - LAST_BYTES))
            return last_words(log.read().decode(errors="replace"))


def start_server(config: Config, log_path: Path, api_key: str, *, cancelled: threading.Event | None = None) -> Server:
    """Start the server of `rollout.server` with `model.checkpoint` and wait until it generates.

    Args:
        config: only `model`, `rollout.server`, `sampling_mask` and `seed` are read.
        log_path: where the server's output goes; the folder is made, the key is masked.
        api_key: bearer token that every request but the health check must carry.
        cancelled: stop waiting, and end the server, once this is set.

    Raises:
        CheckpointError: the checkpoint folder does not exist, or its weights are in an unknown form.
        ConfigError: what is not known to work with quantised weights.
        EngineError: the port is taken, the server died while starting, or it was not ready within `startup_timeout_s`.
    """
    checkpoint = Path(config.model.checkpoint).resolve()
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            "no checkpoint to serve",
            where="config key model.checkpoint",
            got=str(checkpoint),
            expected="a folder with config.json",
        )
    check_quantised(config)
    settings = config.rollout.server
    log_path.parent.mkdir(parents=True, exist_ok=True)
    served = folder_to_serve(checkpoint, log_path.parent)
    with (
        held_port(settings.host, settings.port) as port,
        tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="moe-trm-server-") as secret,
    ):
        # A file only this user can read: arguments are visible to everyone on the machine.
        secret.write(f'api-key: "{api_key}"\n')
        secret.flush()
        command = launch_command(config, served, port, config_file=secret.name)
        command += RANDOM_WEIGHTS if served != checkpoint else ()
        environment = child_environment(os.environ, on_cpu(settings))
        server = _spawn(command, environment, settings.host, port, log_path, api_key)
        try:
            _wait_until_ready(server, settings.startup_timeout_s, cancelled or threading.Event())
        except BaseException:
            server.stop(grace_s=1.0)
            raise
    return server


def on_cpu(settings: ServerConfig) -> bool:
    """True when the server runs without CUDA."""
    return server_device(settings, cuda=torch.cuda.is_available())[0] == "cpu"


def launch_command(config: Config, checkpoint: Path, port: int, config_file: str) -> list[str]:
    """The complete command line of the server. Raises `ConfigError` for what its device cannot do."""
    settings = config.rollout.server
    if settings.deterministic and on_cpu(settings):
        raise ConfigError(
            "SGLang's deterministic kernels need CUDA",
            where="rollout.server.deterministic",
            got="true on a CPU",
            expected="false, or a CUDA device",
            fix="set rollout.server.deterministic=false; rollout.server.dtype=float32 leaves the least rounding here",
        )
    options = {
        "--config": config_file,
        "--model-path": str(checkpoint),
        "--host": settings.host,
        "--port": port,
        "--dtype": settings.dtype,
        "--tp-size": settings.tensor_parallel,
        "--max-total-tokens": settings.max_total_tokens,
        "--max-running-requests": settings.max_running_requests,
        "--chunked-prefill-size": settings.chunked_prefill_size,
        "--random-seed": config.seed,
        # A line for every answer takes the server longer than to read its request.
        "--log-level-http": "warning",
    }
    flags = ["--enable-return-routed-experts"]
    flags += ["--enable-fp32-lm-head"] if settings.fp32_head else []
    flags += ["--enable-deterministic-inference"] if settings.deterministic else []
    if on_cpu(settings):
        options |= {
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--cuda-graph-backend-decode": "disabled",
            "--cuda-graph-backend-prefill": "disabled",
            # The KV cache is sized by --max-total-tokens; this fraction only has to leave room for it.
            "--mem-fraction-static": 0.1,
        }
        if (family := find_family(read_hf_config(checkpoint))) is not None and family.sinks:
            # `torch_native` has no sinks; without triton its name stands for the attention of packages/sglang_cpu,
            # which wants one cache for all layers.
            options["--attention-backend"] = "triton"
            flags.append("--disable-hybrid-swa-memory")
        # Without --sleep-on-idle the waiting scheduler takes a whole core from the learner.
        # Overlap hides work from a device. Here it would compute one more token for every answer that is finished.
        flags += ["--sleep-on-idle", "--skip-server-warmup", "--disable-overlap-schedule"]
    elif config.rollout.colocate:
        flags += ["--enable-memory-saver"]
    if config.rollout.quantization is not None:
        options["--quantization"] = config.rollout.quantization
    arguments = [str(part) for pair in options.items() for part in pair]
    return [sys.executable, "-m", "sglang.launch_server", *arguments, *flags, *settings.extra_args]


def _spawn(
    command: list[str],
    environment: dict[str, str],
    host: str,
    port: int,
    log_path: Path,
    api_key: str,
) -> Server:
    log_begin = log_path.stat().st_size if log_path.exists() else 0
    # A file, not a pipe: a pipe that nobody empties would stop the server whenever this process is stopped or slow.
    with tempfile.NamedTemporaryFile(prefix="moe-trm-output-") as output:
        source = open(output.name, "rb", buffering=0)  # noqa: SIM115 - the log pump closes it
        # The server appends, so that a file that was emptied begins anew.
        written = os.open(output.name, os.O_WRONLY | os.O_APPEND)
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=written, stderr=written, start_new_session=True
    )
    lifeline = Lifeline(process.pid)
    pump = threading.Thread(
        target=_pump,
        args=(process, source, written, log_path, api_key.encode()),
        daemon=True,
        name="rollout-log",
    )
    pump.start()
    address = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    return Server(f"http://{address}:{port}", api_key, log_path, process, pump, lifeline, log_begin)


def _pump(process: subprocess.Popen[bytes], source: FileIO, written: int, log_path: Path, secret: bytes) -> None:
    """Copy the server's output to the log without the key, which SGLang prints among its arguments.

    Args:
        process: the server; the copy ends after it.
        source: its output so far, a file without a name that only this user can read.
        written: descriptor by which the server writes; the file is emptied once much of it has been copied.
        log_path: where the copy goes.
        secret: the key.
    """
    with source, log_path.open("ab", buffering=0) as log:
        begun, over = b"", False
        while not over:
            over = process.poll() is not None  # looked at before the last copy, which so misses nothing
            while data := source.read(COPIED_BYTES):
                lines, newline, begun = (begun + data).rpartition(b"\n")
                log.write((lines + newline).replace(secret, b"***"))
            if source.tell() > KEPT_OUTPUT_BYTES and source.tell() == os.fstat(written).st_size:
                os.truncate(written, 0)
                source.seek(0)
            if not over:
                time.sleep(POLL_S)
        log.write(begun.replace(secret, b"***"))
    os.close(written)


def _wait_until_ready(server: Server, timeout_s: float, cancelled: threading.Event) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = server.poll()
        if status is not None:
            raise EngineError(
                f"the rollout server died while starting ({_ended(status)})",
                where=str(server.log_path),
                got=server.last_words(),
                expected="a server that answers /health",
                fix="Mend what it says; the whole log and every argument of the server are in the file above.",
            )
        if _answers(f"{server.url}/health"):
            return
        if cancelled.wait(POLL_S):
            raise EngineError("the rollout server was not needed any more", where=str(server.log_path))
    raise EngineError(
        "the rollout server did not become ready",
        where=str(server.log_path),
        got=server.last_words(),
        expected=f"an answer on {server.url}/health within {timeout_s:g} s",
        fix="Raise rollout.server.startup_timeout_s if the model is large; else the log tells why.",
    )


def _ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    return f"ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _group_is_gone(leader: subprocess.Popen[bytes], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        leader.poll()
        try:
            os.killpg(leader.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
