"""A fleet without its pauses; a small stand-in named `sglang` on the path of what the supervisor starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.rollout.servers import fleet

FAKE_SERVER = '''
"""Serves /health after a while; a child and the server itself ignore SIGTERM when told to.

It computes or sleeps for so many seconds before it first says which model it serves. Like SGLang it leaves a temporary
file, one of shared memory and, once it has been asked for /model_info, a semaphore."""
import http.server, json, mmap, multiprocessing, os, signal, subprocess, sys, tempfile, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("server_args", open(options["--config"]).read().strip(), os.environ["SGLANG_USE_CPU_ENGINE"], \
os.environ["OMP_NUM_THREADS"], flush=True)
if "--die" in sys.argv:
    sys.exit("bad option: --die")
child = subprocess.Popen([sys.executable, "-c", \
"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
def leave(*args):
    child.kill()
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
left = tempfile.NamedTemporaryFile(delete=False)
shared = open(f"/dev/shm/sglang_loads_{os.getpid()}_fake.shm", "wb+")
shared.truncate(4096)
mapped = mmap.mmap(shared.fileno(), 4096)
locks = []
open(os.environ["FAKE_PIDS"], "w").write(f"{os.getpid()} {child.pid}")
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--never" in sys.argv:
    time.sleep(60)
pending = {name: float(sys.argv[sys.argv.index(name) + 1]) for name in ("--burn", "--doze") if name in sys.argv}
def take(burn, doze):
    until = time.monotonic() + burn
    while time.monotonic() < until:
        pass
    time.sleep(doze)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/model_info":
            take(pending.pop("--burn", 0), pending.pop("--doze", 0))
            locks.append(multiprocessing.get_context("spawn").Lock())
            open(os.environ["FAKE_PIDS"] + ".lock", "w").write(locks[0]._semlock.name)
        if "--chatty" in sys.argv:
            print("chatter " * 50_000, flush=True)
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
'''


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that looks, asks and repeats at once."""
    for name, seconds in (("FIRST_PAUSE_S", 0.02), ("LONGEST_PAUSE_S", 0.05), ("WATCH_S", 0.05), ("SILENCE_S", 0.1)):
        monkeypatch.setattr(fleet, name, seconds)
    for name in ("PROBE_TIMEOUT_S", "HEALTH_S"):
        monkeypatch.setattr(fleet, name, 1.0)


@pytest.fixture
def pids_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(FAKE_SERVER)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("MOE_TRM_API_KEY", "must not reach the child")
    return tmp_path / "pids"
