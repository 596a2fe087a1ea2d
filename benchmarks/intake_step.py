"""A step of many servers through the real intake processes, controller and rank clients; what each process needs.

`python -m benchmarks.intake_step [--processes N] [--answers N] [--servers N] [--ranks N] [--kills N] [--json FILE]`.
The servers answer with recorded bytes of DeepSeek-V3 once every request is in flight. Then intake processes and servers
are killed at random. One answer in sixteen is broken and must be rejected. Rows with memory say what a process must
hold, and by how much it grew. The books must balance.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.answering_servers import HF_CONFIG, MODEL, answer, answering
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.config.schema import Config
from moe_trm.rollout.client import RolloutClient
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.intake.receiving import ROOM_BYTES
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.service import ControllerService, Start
from moe_trm.sync.manifest import WeightPush
from moe_trm.tasks.reward_input import RewardInput
from moe_trm.types import Prompt, SamplingParams, TrainBatch

MB, KEY, GROUP, PROMPT = 1e6, "benchmark", 8, 16
BODIES = 16
"""Answers of different lengths; the last is broken."""
BOOKS = ("issued", "queued", "in_flight", "trained", "rejected", "dropped")


class Tokens:
    """The part of a tokenizer that sampling asks for."""

    vocab_size, stop_token_ids = MODEL.vocab_size, (1,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return f"{len(token_ids)} tokens"


class Prompts:
    """A task whose prompts choose the answers in turn."""

    tokens, reward_weights = Tokens(), dict[str, float]()

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(f"{step}-{place}", (place, *range(1, PROMPT))) for place in range(count)]

    def eval_sets(self) -> Mapping[str, tuple[Prompt, ...]]:
        return {}

    async def reward(self, sample: RewardInput) -> float:
        return 1.0

    async def close(self) -> None: ...


def config_of(folder: Path, urls: Sequence[str], processes: int, answers: int) -> Config:
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    return Config.model_validate(
        {
            "model": {"checkpoint": str(folder)},
            "rollout": {
                "urls": list(urls),
                "intake_processes": processes,
                "prompts_per_step": answers // GROUP,
                "group_size": GROUP,
                "concurrency": answers,
                "max_new_tokens": 1 << 16,
            },
            "replay": {"mode": "R3"},
            "sampling_mask": {"mode": "off"},
            "sync": {"verify": False},
            "learner": {"minibatches": 1, "micro_batch_rows": 1},
        }
    )


def run_controller(told: Connection, config: Config, endpoint: str, kills: int) -> None:
    """Serve one step; tell the growth of this process and of the intakes."""
    task: Any = Prompts()

    async def serve() -> dict[str, Any]:
        engine = ServerEngine(config, "key")
        controller = RolloutController(config, engine, task, SamplingParams(max_new_tokens=1 << 16))
        await engine.start()
        await controller.load_weights(WeightPush(0, config.model.checkpoint, ()))
        watch = Watch(engine)
        watching = asyncio.ensure_future(watch.run(kills))
        await ControllerService(controller, Start(endpoint, KEY, {}, None), "").serve()
        watching.cancel()
        return watch.found()

    told.send(asyncio.run(serve()))


class Watch:
    """Peaks of the controller and of its intake processes, which it kills at random."""

    def __init__(self, engine: ServerEngine) -> None:
        self._engine, self._pool = engine, engine._intake
        self._before: dict[int, int] = {}
        self._peaks: dict[int, int] = {}
        self.shared = 0

    async def run(self, kills: int) -> None:
        chance, issued = random.Random(0), False
        while True:
            pool = self._pool
            for process in [os.getpid(), *(pool.process_ids if pool else [])]:
                with suppress(OSError):
                    self._look(process)
            if pool is not None:
                self.shared = max(self.shared, sum(file.used_bytes for file in pool._files))
                issued = issued or bool(self.shared)
                if issued and kills and pool.process_ids and chance.random() < 0.2:
                    kills -= 1
                    with suppress(ProcessLookupError):
                        os.kill(chance.choice(pool.process_ids), signal.SIGKILL)
            await asyncio.sleep(0.05)

    def found(self) -> dict[str, Any]:
        own = os.getpid()
        grown = {process: self._peaks[process] - self._before[process] for process in self._peaks}
        intakes = [size for process, size in grown.items() if process != own]
        return {"controller": grown[own], "intake": max(intakes, default=0), "shared": self.shared}

    def _look(self, process: int) -> None:
        if process not in self._before:
            Path(f"/proc/{process}/clear_refs").write_text("5")
            self._before[process] = own_bytes(process)
        self._peaks[process] = max(self._peaks.get(process, 0), own_bytes(process))


def own_bytes(process: int | str) -> int:
    """Anonymous memory of a process: neither files nor what it shares."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return 1024 * int(found.group(1)) if found else 0


def run_rank(told: Connection, endpoint: str, rank: int, ranks: int) -> None:
    """Take this rank's share of the step; tell its size, this process's growth, and the books."""
    client = RolloutClient(endpoint, KEY, ranks=(rank, ranks), data=(rank, ranks))
    before = own_bytes("self")
    batch = client.next_batch(1, MODEL.moe_layer_ids)
    told.send((held(batch), own_bytes("self") - before, dict(batch.metrics)))
    told.recv()
    if rank == 0:
        client._ask("stop")


def held(batch: TrainBatch) -> int:
    """Bytes of the arrays of a rank's rows."""
    rows = [row.record for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows]
    arrays = [
        array
        for record in rows
        for array in (
            *(record.tokens, record.sampled, record.turn_ids, record.rollout_logprobs, record.full_logprobs),
            *(record.versions, record.routes.experts if record.routes is not None else record.tokens[:0]),
        )
    ]
    return sum(array.nbytes for array in arrays)


def measure(processes: int, answers: int, servers: int, ranks: int, kills: int) -> list[Row]:
    """Rows for the step, the books, and the heaviest process of each kind."""
    spawn = get_context("spawn")
    sizes = [64 + 32 * number for number in range(BODIES)]
    bodies = [answer(PROMPT, size, broken=size == sizes[-1], seed=size) for size in sizes]
    with (
        tempfile.TemporaryDirectory() as name,
        answering(bodies, servers, hold=answers, die=min(kills, servers // 8)) as urls,
    ):
        endpoint = f"ipc://{name}/controller"
        config = config_of(Path(name), urls, processes, answers)
        here, there = spawn.Pipe()
        controller = spawn.Process(target=run_controller, args=(there, config, endpoint, kills))
        controller.start()
        pipes = [spawn.Pipe() for _ in range(ranks)]
        clients = [
            spawn.Process(target=run_rank, args=(tell, endpoint, rank, ranks)) for rank, (_, tell) in enumerate(pipes)
        ]
        for client in clients:
            client.start()
        told = [pipe.recv() for pipe, _ in pipes]
        for pipe, _ in pipes:
            pipe.send(None)
        found = here.recv()
        for process in [*clients, controller]:
            process.join()
    return _rows(told, found, bodies, answers)


def _rows(told: Sequence[Any], found: Mapping[str, Any], bodies: Sequence[bytes], answers: int) -> list[Row]:
    share, peak, metrics = max(told, key=lambda rank: rank[1] - rank[0])
    arrived = sum(len(body) for body in bodies) * answers // len(bodies)
    seconds = metrics["time/rollout_s"]
    books = {place: int(metrics[f"ledger/{place}"]) for place in BOOKS}
    if books["issued"] != sum(books[place] for place in BOOKS[1:]):
        raise SystemExit(f"the books do not balance: {books}")
    lost = ("intake_losses", "intake_reissued", "losses", "reissued")
    counts = {name: int(metrics[f"rollout/{name}"]) for name in lost if f"rollout/{name}" in metrics}
    room = max(ROOM_BYTES, *(len(body) for body in bodies))
    memory = [
        ("controller", 0, found["controller"]),
        ("intake", room, found["intake"]),
        ("rank", share, peak),
    ]
    return [
        {"answers": answers, "answers MB": arrived / MB, "seconds": seconds, "MB/s": arrived / MB / seconds},
        {**books},
        {**counts},
        {"shared records MB": found["shared"] / MB, "ranks' shares MB": sum(rank[0] for rank in told) / MB},
        *({"process": name, "holds MB": own / MB, "grew MB": grew / MB} for name, own, grew in memory),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--processes", type=int, default=2, help="intake processes (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=4096, help=f"a multiple of {GROUP} (default: %(default)s)")
    parser.add_argument("--servers", type=int, default=64, help="rollout servers (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="learner ranks (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=4, help="intakes and servers that die (default: %(default)s)")
    options = parser.parse_args(argv)
    rows = measure(options.processes, options.answers, options.servers, options.ranks, options.kills)
    report("A step through the intake", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
