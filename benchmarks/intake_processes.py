"""Gigabytes of answers per second through one and through two intake processes, and processor time of each side.

`python -m benchmarks.intake_processes [--tokens N] [--answers N] [--pairs N] [--json FILE]`. Servers answer with the
recorded bytes of one long answer of DeepSeek-V3, sent by the kernel from a file. Real intake processes receive, check
and keep it, and this process opens each record, as the controller does. None, one and two processes take turns, so
that a neighbour slows all alike; the ratio is that of two to one in each pair.

Two processes need two processors, and what the servers and this process use besides takes from the gain: the columns
of processor seconds say how much (`servers`: with the threads of the kernel that carry their bytes). So plain processes
take their turns too (`benchmarks.plain_intake`): they receive and decode the same bytes with nothing of ours, and
without a controller. What two of them gain over one is the machine's limit, and `of the limit` is our ratio over
theirs. `at most` is the ratio if two processes left no processor idle with all this work. `--from-memory` leaves the
network out: each process reads the same bytes again and again, so that the ratio is that of the intake alone.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from benchmarks.answering_servers import MODEL, answer, answering
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.config.engines import DEFAULT
from moe_trm.rollout.intake.messages import Hello
from moe_trm.rollout.intake.pool import IntakePool
from moe_trm.rollout.intake.reading import read
from moe_trm.rollout.servers.backend import Question, Wanted, backend_of
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.runtime import wire
from moe_trm.runtime.shared_blocks import BlockWriter, SharedFile
from moe_trm.types import SamplingParams

PROMPT, OPEN, COUNTS = 512, 6, (1, 2)
NONE = 0
"""Without intake processes: this process receives and reads, as the controller does then."""
INTAKE, PLAIN = "intake", "plain"
"""Kinds of processes."""
SGLANG = backend_of(DEFAULT)
WANTED = Wanted(routes=True, mask=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="of prompt and answer (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=24, help="of each measurement (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each number (default: %(default)s)")
    parser.add_argument("--from-memory", action="store_true", help="without servers and sockets")
    parser.add_argument("--read", type=int, metavar="ANSWERS", help="used by --from-memory for its processes")
    args = parser.parse_args(argv)
    if args.read:
        return read_again_and_again(args.tokens, args.read)
    measured = alone(args) if args.from_memory else asyncio.run(through_servers(args))
    report("Intake processes side by side", rows(measured, args.answers, args.tokens), args.json)
    return 0


Took = tuple[float, float, float, float]
"""Seconds of a measurement, and processor seconds of the intakes, of this process and of the servers."""
Measured = dict[tuple[str, int], list[Took]]
"""By kind and number of processes."""


async def through_servers(args: object) -> Measured:
    """Real intake processes behind real sockets."""
    tokens, answers, pairs = (int(getattr(args, name)) for name in ("tokens", "answers", "pairs"))
    question = Question(tuple(range(PROMPT)), SamplingParams(), WANTED)
    pools = {count: IntakePool(count, Hello(DEFAULT, MODEL, None, 600.0, 1)) for count in COUNTS}
    ways = [(INTAKE, NONE), *((kind, count) for count in COUNTS for kind in (INTAKE, PLAIN))]
    measured: Measured = {way: [] for way in ways}
    body = answer(PROMPT, tokens - PROMPT)
    # One process of servers for each processor: a single one keeps a processor waiting now and then.
    with answering([body], OPEN // 2) as first, answering([body], OPEN // 2) as second:
        urls = [url for both in zip(first, second, strict=True) for url in both]
        servers = [*psutil.Process().children(), *_carriers()]
        for pool in pools.values():
            await pool.start()
        for number in range(pairs + 1):  # the first pair warms up
            for (kind, count), found in measured.items():
                if kind == PLAIN:
                    each = ["benchmarks.plain_intake", str(answers // count), *urls]
                    took = await asyncio.to_thread(_side_by_side, count, each, servers)
                else:
                    took = await _measured(pools.get(count), urls, question, answers, servers)
                if number:
                    found.append(took)
    for pool in pools.values():
        await pool.close()
    return measured


async def _measured(
    pool: IntakePool | None, urls: Sequence[str], question: Question, answers: int, servers: Sequence[psutil.Process]
) -> Took:
    left = iter(range(answers))

    async def lane(url: str) -> None:
        async with EngineHttp(url, None, timeout_s=600.0, max_attempts=1) as http:
            for _ in left:
                if pool is not None:
                    await pool.ask(url, question)
                else:
                    body = await http.request("POST", "/generate", SGLANG.request(question))
                    read(body, question, None, MODEL, None, SGLANG)

    intakes = [psutil.Process(process) for process in pool.process_ids] if pool is not None else []
    before, own, began = (_spent(intakes), _spent(servers)), time.process_time(), time.perf_counter()
    await asyncio.gather(*(lane(url) for url in urls))
    seconds = time.perf_counter() - began
    return seconds, _spent(intakes) - before[0], time.process_time() - own, _spent(servers) - before[1]


def _carriers() -> list[psutil.Process]:
    """Threads of the kernel that carry the servers' bytes."""
    return [process for process in psutil.process_iter(["name"]) if process.info["name"].startswith("ksoftirqd/")]


def _spent(processes: Sequence[psutil.Process]) -> float:
    """Processor seconds so far."""
    return float(sum(times.user + times.system for times in (process.cpu_times() for process in processes)))


def alone(args: object) -> Measured:
    """Processes that read the same bytes, all at the same time."""
    tokens, answers, pairs = (int(getattr(args, name)) for name in ("tokens", "answers", "pairs"))
    measured: Measured = {(INTAKE, count): [] for count in COUNTS}
    for _ in range(pairs):
        for count in COUNTS:
            read_each = ["benchmarks.intake_processes", "--tokens", str(tokens), "--read", str(answers // count)]
            measured[INTAKE, count].append(_side_by_side(count, read_each))
    return measured


def _side_by_side(count: int, module: Sequence[str], servers: Sequence[psutil.Process] = ()) -> Took:
    """`count` processes that begin together: each says that it is ready, and at its end what it used, and when."""
    processes = [
        subprocess.Popen([sys.executable, "-m", *module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    before = _spent(servers)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [[float(word) for word in process.communicate()[0].split()] for process in processes]
    used, began, ended = zip(*told, strict=True)
    return max(ended) - min(began), sum(used), 0.0, _spent(servers) - before


def read_again_and_again(tokens: int, answers: int) -> int:
    """Read `answers` answers once the parent says so, and keep each as a block.

    Prints the processor seconds, and when it began and ended: its own end as a process takes as long as some answers.
    """
    body, file = answer(PROMPT, tokens - PROMPT), SharedFile()
    writer, question = BlockWriter(file.descriptor), Question(tuple(range(PROMPT)), SamplingParams(), WANTED)
    read(body, question, None, MODEL, None, SGLANG)
    print("ready", flush=True)
    sys.stdin.readline()
    before, began = time.process_time(), time.monotonic()
    for _ in range(answers):
        _, *buffers = wire.encode(read(body, question, None, MODEL, None, SGLANG).value)
        file.open(writer.write(buffers))
    print(time.process_time() - before, began, time.monotonic())
    return 0


def rows(measured: Measured, answers: int, tokens: int) -> list[Row]:
    """One row for each number of processes, and one for the ratio of the pairs with its quartiles, and the limit."""
    size = answers * len(answer(PROMPT, tokens - PROMPT)) / 1e9
    found: list[Row] = []
    for (kind, count), took in measured.items():
        seconds, intake, own, servers = (statistics.median(part) for part in zip(*took, strict=True))
        found.append(
            {
                "processes": count,
                "of": kind,
                "GB/s": size / seconds,
                "answers/s": answers / seconds,
                "intake s/GB": intake / size,
                "controller s/GB": own / size,
                "servers s/GB": servers / size,
            }
        )
    ours, cores = _gains(measured, INTAKE), len(os.sched_getaffinity(0))
    quarter = len(ours) // 4
    found.append(
        {
            "two to one": statistics.median(ours),
            "lower quartile": sorted(ours)[quarter],
            "upper quartile": sorted(ours)[-1 - quarter],
            "at most": statistics.median(
                one[0] * cores / sum(two[1:]) for one, two in zip(*_both(measured, INTAKE), strict=True)
            ),
            "pairs": len(ours),
        }
    )
    if (PLAIN, COUNTS[0]) in measured:
        limits = _gains(measured, PLAIN)
        found[-1] |= {
            "plain two to one": statistics.median(limits),
            "of the limit": statistics.median(own / limit for own, limit in zip(ours, limits, strict=True)),
        }
    return found


def _both(measured: Measured, kind: str) -> tuple[list[Took], list[Took]]:
    """The measurements of one process and of two."""
    one, two = (measured[kind, count] for count in COUNTS)
    return one, two


def _gains(measured: Measured, kind: str) -> list[float]:
    """Two to one in each pair."""
    return [one[0] / two[0] for one, two in zip(*_both(measured, kind), strict=True)]


if __name__ == "__main__":
    sys.exit(main())
