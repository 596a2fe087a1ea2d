"""Speed of a core while all cores compute, as a share of its speed alone.

1 on whole cores; about 0.6 where two of them are threads of one. Measured on small products and Python, which is what
both sides of a run on CPUs do.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import fmean

SECONDS, PAUSE_S = 0.4, 0.05
REPEATS = 5
SIZE = 48
"""Of the products: below what a library shares among threads."""


def crowded() -> float:
    """The share, from 1 / cores to 1: the best of `REPEATS` measurements, which a busy neighbour disturbs least."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        while len({found.result() for found in [pool.submit(process, 0.2) for _ in range(cores)]}) < cores:
            continue  # until all processes are there
        alone = max(fmean(rates(pool, 1)) for _ in range(REPEATS))
        together = max(fmean(rates(pool, cores)) for _ in range(REPEATS))
    return min(1.0, max(1 / cores, together / alone))


def process(pause_s: float) -> int:
    """Number of a process that waits for so long."""
    time.sleep(pause_s)
    return os.getpid()


def rates(pool: ProcessPoolExecutor, processes: int) -> list[float]:
    """Rounds per second of each of so many processes that compute at the same time."""
    begin = time.time() + PAUSE_S
    return [found.result() for found in [pool.submit(rounds_per_s, begin) for _ in range(processes)]]


def rounds_per_s(begin: float) -> float:
    """Speed of this process, from `begin` (Unix time) on for `SECONDS`."""
    import numpy as np

    matrix = np.random.default_rng(0).random((SIZE, SIZE), np.float32)
    time.sleep(max(0.0, begin - time.time()))
    started, rounds = time.perf_counter(), 0
    while time.perf_counter() < started + SECONDS:
        product, seen = matrix, dict[int, float]()
        for number in range(100):
            product = matrix @ product / SIZE
            seen[number] = float(product[0, 0]) + len(seen)
        rounds += 1
    return rounds / (time.perf_counter() - started)
