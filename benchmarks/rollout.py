"""Captured tokens per second of a CPU server: SGLang's own loops against batched attention and experts.

`python -m benchmarks.rollout [--requests N ...] [--pairs N] [--json FILE]` starts two servers on the quickstart's
model. Both record routes, log-probs and sampling masks through the product's own engine. They take turns, so that a
busy machine slows both. One waits while the other works.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar
from unittest import mock

import numpy as np
from safetensors.torch import load_file

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.config.schema import Config
from moe_trm.rollout.sglang.engine import SglangEngine
from moe_trm.rollout.sglang.supervisor import Server, start_server
from moe_trm.sync.disk import finish_push, write_shard
from moe_trm.sync.manifest import WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.types import Prompt, SamplingParams

PLUGINS = "SGLANG_PLUGINS"
"""SGLang's own variable: the plugins that it loads. Without it, all of them."""
ENABLING = "moe_trm_sglang_cpu"
T = TypeVar("T")
KEY = "key-of-the-benchmark"
PROMPT_TOKENS, ANSWER_TOKENS, GROUP_SIZE = 20, 48, 8


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128], help="requests in flight (64 128)")
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each server (default: 7)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for requests in args.requests for row in measure(Path(folder), requests, args.pairs)]
    report("Captured tokens per second, medians of alternating runs", rows, args.json)
    return 0


def measure(folder: Path, requests: int, pairs: int) -> Iterator[Row]:
    """One row: tokens per second of both, and the median of the ratios of neighbouring runs."""
    from moe_trm.models.tiny.checkpoint import make_checkpoint

    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        make_checkpoint(checkpoint)
    config = Config.model_validate(
        {
            "model": {"checkpoint": str(checkpoint)},
            "rollout": {
                "concurrency": requests,
                "server": {"port": 0, "dtype": "float32", "max_running_requests": requests, "startup_timeout_s": 600},
            },
        }
    )
    push = push_of(checkpoint, folder / "push")
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(config, folder, name)) for name in ("loops", "batched")}
        for server in servers.values():
            asyncio.run(with_engine(config, server, lambda engine: engine.load_weights(push)))
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for run in range(pairs + 1):
            for name, server in servers.items():
                rate = tokens_per_second(config, server, requests, run)
                if run:  # the first one warms up
                    rates[name].append(rate)
    ratios = [new / old for old, new in zip(rates["loops"], rates["batched"], strict=True)]
    yield {
        "requests": requests,
        **{f"{name}_tokens_per_s": round(statistics.median(values)) for name, values in rates.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratio_lowest": round(min(ratios), 2),
        "ratio_highest": round(max(ratios), 2),
    }


@contextmanager
def serving(config: Config, folder: Path, name: str) -> Iterator[Server]:
    """A server with or without the batched parts."""
    with mock.patch.dict(os.environ, {PLUGINS: ENABLING if name == "loops" else ""}):
        server = start_server(config, folder / f"{name}.log", KEY)
    try:
        yield server
    finally:
        server.stop()


def tokens_per_second(config: Config, server: Server, requests: int, seed: int) -> float:
    """Sampled tokens per second of one batch of groups, through the product's engine."""
    rng = np.random.default_rng(seed)
    prompts = [
        Prompt(f"p{i}", tuple(rng.integers(4, 99, PROMPT_TOKENS).tolist())) for i in range(requests // GROUP_SIZE)
    ]
    params = SamplingParams(temperature=1.0, top_p=0.95, top_k=64, max_new_tokens=ANSWER_TOKENS)

    async def batch(engine: SglangEngine) -> int:
        records = await asyncio.gather(
            *(
                engine.generate(prompt, params, sample_id=group * GROUP_SIZE + member, group_id=group)
                for group, prompt in enumerate(prompts)
                for member in range(GROUP_SIZE)
            )
        )
        return sum(record.num_sampled for record in records)

    began = time.perf_counter()
    return asyncio.run(with_engine(config, server, batch)) / (time.perf_counter() - began)


async def with_engine(config: Config, server: Server, work: Callable[[SglangEngine], Awaitable[T]]) -> T:
    """The result of `work` with an engine that is attached to `server`."""
    attached = config.model_copy(update={"rollout": config.rollout.model_copy(update={"url": server.url})})
    engine = SglangEngine(attached, server.api_key)
    try:
        return await work(engine)
    finally:
        await engine.close()


def push_of(checkpoint: Path, folder: Path) -> WeightPush:
    """A push of the checkpoint's own weights: a sample needs a weight version."""
    if (folder / "model.safetensors").exists():
        (folder / "model.safetensors").unlink()
    tensors = write_shard(
        folder / "model.safetensors", load_file(checkpoint / "model.safetensors").items(), Rounding("float32")
    )
    return finish_push(str(folder), tensors, 0, str(checkpoint))


if __name__ == "__main__":
    sys.exit(main())
