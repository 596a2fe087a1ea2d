"""Speed of a core while all cores compute, as a share of its speed alone.

1 on whole cores, less where two of them are threads of one or share a memory that is too slow. It depends on what they
compute. So every process runs the model of the run, forward and backward, on a few rows.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

SECONDS, PAUSE_S, REPEATS = 1.0, 0.1, 4
ROWS, TOKENS = 8, 48


def crowded(checkpoint: Path) -> float:
    """The share, from 1 / cores to 1: the best of `REPEATS` measurements, which a busy neighbour disturbs least."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        while len({future.result() for future in [pool.submit(process, checkpoint) for _ in range(cores)]}) < cores:
            continue  # until every process has the model
        single_speed, crowded_speed = (
            max(fmean(rates(pool, checkpoint, n)) for _ in range(REPEATS)) for n in (1, cores)
        )
    return min(1.0, max(1 / cores, crowded_speed / single_speed))


def process(checkpoint: Path) -> int:
    """Number of a process that has the model."""
    model_of(checkpoint)
    time.sleep(PAUSE_S)
    return os.getpid()


def rates(pool: ProcessPoolExecutor, checkpoint: Path, processes: int) -> list[float]:
    """Rounds per second of each of `processes` processes that compute at the same time."""
    begin = time.time() + PAUSE_S
    return [future.result() for future in [pool.submit(rounds_per_s, checkpoint, begin) for _ in range(processes)]]


def rounds_per_s(checkpoint: Path, begin: float) -> float:
    """Speed of this process, from `begin` (Unix time) on for `SECONDS`."""
    import torch

    model, ids = model_of(checkpoint), torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 100
    time.sleep(max(0.0, begin - time.time()))
    started, rounds = time.perf_counter(), 0
    while time.perf_counter() < started + SECONDS:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        rounds += 1
    return rounds / (time.perf_counter() - started)


@cache
def model_of(checkpoint: Path) -> Any:
    """The model, once a process, on one thread."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(checkpoint)
