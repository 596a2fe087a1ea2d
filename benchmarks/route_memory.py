"""Peak memory that routes of long sequences need, in the controller and in every rank.

`python -m benchmarks.route_memory --json FILE`. The controller, its store, its service and the clients of the ranks are
the real ones. Answers come from a file as SGLang would send them: 64 sequences of 32,768 tokens of DeepSeek-V3, one
answer at a time. A process's share is the data it must hold: for the controller all sequences of the step, for a rank
its rows and layers.

Shape letters: T tokens, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import command_line
from benchmarks.peak import forget_peak, status_bytes
from benchmarks.table import Row, report
from moe_trm.config.schema import Config
from moe_trm.rollout.client import RolloutClient
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.service import ControllerService, Start
from moe_trm.rollout.sglang.checks import parse_answer
from moe_trm.tasks.reward_input import RewardInput
from moe_trm.types import Prompt, RolloutRecord, SamplingParams

MB, KEY, GROUP = 1e6, "benchmark", 8
MODEL = ServedModel("DeepseekV3ForCausalLM", 129_280, 61, tuple(range(3, 61)), 256, 8)


class Tokens:
    """The part of a tokenizer that sampling needs."""

    vocab_size, stop_token_ids = MODEL.vocab_size, (1,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return f"{len(token_ids)} tokens"


class OneTokenPrompts:
    """A task whose prompts are one token long."""

    tokens, reward_weights = Tokens(), dict[str, float]()

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(f"{step}-{place}", (0,)) for place in range(count)]

    def eval_sets(self) -> Mapping[str, tuple[Prompt, ...]]:
        return {}

    async def reward(self, sample: RewardInput) -> float:
        return 1.0

    async def close(self) -> None: ...


class FileEngine:
    """Answers every request with the bytes of one file."""

    def __init__(self, answer: Path) -> None:
        self._answer = answer

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        body, requested = self._answer.read_bytes(), RequestedFields(routes=True, mask=False)
        return parse_answer(body, prompt, MODEL, requested, sample_id=sample_id, group_id=group_id)

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


def write_answer(path: Path, length: int) -> None:
    """One answer of `length` tokens in all, with legal routes, as SGLang writes it."""
    columns = np.arange((length - 1) * MODEL.num_layers).reshape(length - 1, MODEL.num_layers, 1)
    routes = (columns * 3 + np.arange(MODEL.top_k)) % MODEL.num_experts
    sampled = length - 1
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 1,
        "output_token_logprobs": [[-1.0, 2, None]] * sampled,
        "num_retractions": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": sampled}],
        "routed_experts": base64.b64encode(routes.astype("<i4").tobytes()).decode(),
    }
    path.write_text(json.dumps({"output_ids": [2] * sampled, "prompt_token_ids": [1], "meta_info": meta}))


def run_controller(pipe: Connection, answer: Path, endpoint: str, sequences: int) -> None:
    """Serve one step; send the bytes that this process grew by at most."""
    config = Config.model_validate(
        {
            "model": {"checkpoint": "unused"},
            "rollout": {"prompts_per_step": sequences // GROUP, "group_size": GROUP, "concurrency": 1},
            "replay": {"mode": "R3"},
            "learner": {"minibatches": 1, "micro_batch_rows": 1},
        }
    )
    engine: Any = FileEngine(answer)
    task: Any = OneTokenPrompts()

    async def serve() -> None:
        controller = RolloutController(config, engine, task, SamplingParams())
        await ControllerService(controller, Start(endpoint, KEY, {}, None), "").serve()

    start_bytes = forget_peak()
    asyncio.run(serve())
    pipe.send(status_bytes("VmHWM") - start_bytes)


def run_rank(pipe: Connection, endpoint: str, rank: int, ranks: int, layers: tuple[int, ...]) -> None:
    """Take this rank's share of the step. Send the bytes of its routes and the peak growth of this process."""
    client = RolloutClient(endpoint, KEY, ranks=(rank, ranks), data=(rank, ranks))
    start_bytes = forget_peak()
    batch = client.next_batch(1, layers)
    rows = [row for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows]
    share = sum(row.record.routes.experts.nbytes for row in rows if row.record.routes)
    pipe.send((share, status_bytes("VmHWM") - start_bytes))
    pipe.recv()
    if rank == 0:
        client._ask("stop")


def measure(sequences: int, length: int, ranks: int) -> list[Row]:
    """A row for the controller, and one for the heaviest rank."""
    spawn = get_context("spawn")
    size = (length - 1) * len(MODEL.moe_layer_ids) * MODEL.top_k
    with tempfile.TemporaryDirectory() as folder:
        answer, endpoint = Path(folder) / "answer.json", f"ipc://{folder}/controller"
        write_answer(answer, length)
        arrives = answer.stat().st_size
        controller_pipe, controller_end = spawn.Pipe()
        controller = spawn.Process(target=run_controller, args=(controller_end, answer, endpoint, sequences))
        controller.start()
        pipes = [spawn.Pipe() for _ in range(ranks)]
        processes = [
            spawn.Process(target=run_rank, args=(remote_end, endpoint, rank, ranks, MODEL.moe_layer_ids))
            for rank, (_, remote_end) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        results = [pipe.recv() for pipe, _ in pipes]
        for pipe, _ in pipes:
            pipe.send(None)
        controller_peak = controller_pipe.recv()
        for process in [*processes, controller]:
            process.join()
    share, peak = max(results, key=lambda pair: pair[1] - pair[0])
    sizes = {"sequences": sequences, "tokens": length, "sequence MB": size / MB, "answer MB": arrives / MB}
    return [
        {"process": name, **sizes, "share MB": needed / MB, "peak MB": most / MB, "over MB": (most - needed) / MB}
        for name, needed, most in (("controller", sequences * size, controller_peak), (f"rank of {ranks}", share, peak))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--sequences", type=int, default=64, help=f"a multiple of {GROUP} (default: %(default)s)")
    parser.add_argument("--length", type=int, default=32_768, help="their tokens (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks (default: %(default)s)")
    options = parser.parse_args(argv)
    report("Routes on their way: peak memory", measure(options.sequences, options.length, options.ranks), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
