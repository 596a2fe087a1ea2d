"""Several hosts on this machine: network namespaces whose cables end in a hub that cuts, delays and drops.

Every host has an address, a hostname and a hosts file of its own. Files are shared, as on a cluster. The hub is a
thread between TAP devices, because not every kernel can delay and drop by itself (netem). Nothing outside of the
namespaces is reached.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import selectors
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from moe_trm.runtime.gloo import INTERFACE

ROOT = Path(__file__).parents[2]

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MTU = 9000
FRAME_BYTES = MTU + 64
HOSTS_FILES = Path("/etc/netns")
NETWORK = "10.77.0"


@dataclass
class Port:
    """A host's end of its cable. Bytes of `device` are frames; `cut`: none pass."""

    device: int
    cut: bool = False
    stations: set[bytes] = field(default_factory=set)


class Hub:
    """Passes frames on. `delay_s` and `loss` (a share of frames) hold for every cable. Leaving it ends it."""

    def __init__(self) -> None:
        self.delay_s, self.loss = 0.0, 0.0
        self._ports = list[Port]()
        self._waiting = list[tuple[float, int, Port, bytes]]()
        self._random, self._order, self._over = random.Random(0), itertools.count(), threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="hub", daemon=True)

    def plug(self, interface: str) -> Port:
        """A new device with this name, and its port."""
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", interface.encode(), IFF_TAP | IFF_NO_PI))
        self._ports.append(port := Port(device))
        return port

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for port in self._ports:
            os.close(port.device)

    def _pass_on(self) -> None:
        with selectors.DefaultSelector() as ready:
            for port in self._ports:
                ready.register(port.device, selectors.EVENT_READ, port)
            while not self._over.is_set():
                until = self._waiting[0][0] - time.monotonic() if self._waiting else 0.1
                for key, _ in ready.select(max(0.0, until)):
                    self._take(key.data)
                while self._waiting and self._waiting[0][0] <= time.monotonic():
                    _, _, port, frame = heapq.heappop(self._waiting)
                    if not port.cut:
                        with suppress(OSError):  # its interface is down, or its queue is full: the frame is lost
                            os.write(port.device, frame)

    def _take(self, port: Port) -> None:
        with suppress(OSError):
            frame = os.read(port.device, FRAME_BYTES)
            receiver, sender = frame[:6], frame[6:12]
            port.stations.add(sender)
            if port.cut or (self.loss and self._random.random() < self.loss):
                return
            known = [other for other in self._ports if receiver in other.stations]
            for other in known or self._ports:
                if other is not port:
                    due = time.monotonic() + self.delay_s
                    heapq.heappush(self._waiting, (due, next(self._order), other, frame))


@dataclass
class Host:
    """One host: its hostname, which is also its name in the others' hosts files, and its namespace."""

    name: str
    address: str
    namespace: str
    port: Port
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def inside(self, command: Sequence[str]) -> list[str]:
        """The words that run `command` on this host."""
        namespace = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*namespace, "bash", "-c", 'hostname "$0" && exec "$@"', self.name, *command]

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path
    ) -> subprocess.Popen[bytes]:
        """`command` on this host, in `folder`; its output goes to `log`."""
        elsewhere = {name: value for name, value in os.environ.items() if name != INTERFACE}  # tests before may set it
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.inside(command),
                stdout=output,
                stderr=output,
                # Its rollout engine is a file of these tests, which imports from them.
                env={**elsewhere, "PYTHONPATH": str(ROOT), **environment},
                cwd=folder,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def kill_all(self) -> None:
        """Every process of this host, at once."""
        for _ in range(3):  # one may be starting another
            listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
            for process in listed.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        for begun in self.started:
            begun.wait()

    def vanish(self) -> None:
        """Its cable is cut and everything on it is dead, without a word to the others."""
        self.port.cut = True
        self.kill_all()


def missing() -> str:
    """Why there can be no hosts here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("unshare") and Path("/dev/net/tun").exists()):
        return "network namespaces need ip, unshare and /dev/net/tun"
    name = f"moetrm{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"no network namespace can be made: {made.stderr.strip()}" if made.returncode else ""


@contextmanager
def hosts(*names: str, own_names: Mapping[str, str] | None = None) -> Iterator[tuple[Hub, list[Host]]]:
    """Hosts of these names inside. `own_names`: the address by which a host knows itself, where it is another."""
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    hub, made, group = Hub(), list[Host](), os.getpid()
    try:
        for number, name in enumerate(names, 1):
            namespace, interface = f"moetrm{group}h{number}", f"mt{group % 10**7}h{number}"
            _ip("netns", "add", namespace)
            made.append(Host(name, addresses[name], namespace, hub.plug(interface)))
            known = {**addresses, name: (own_names or {}).get(name, addresses[name])}
            (HOSTS_FILES / namespace).mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in known.items())]
            (HOSTS_FILES / namespace / "hosts").write_text("\n".join([*lines, ""]))
            _ip("link", "set", interface, "netns", namespace)
            inside = ("-n", namespace)
            _ip(*inside, "addr", "add", f"{addresses[name]}/24", "dev", interface)
            _ip(*inside, "link", "set", interface, "mtu", str(MTU), "up")
            _ip(*inside, "link", "set", "lo", "up")
        with hub:
            yield hub, made
    finally:
        for host in made:
            host.kill_all()
            subprocess.run(["ip", "netns", "del", host.namespace], check=False)
            shutil.rmtree(HOSTS_FILES / host.namespace, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
