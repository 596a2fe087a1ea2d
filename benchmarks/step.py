"""Cost of recording at the rollout engine, and the phases of a training step in seconds.

`python -m benchmarks.step --checkpoint DIR [--run RUN_DIR] [--json FILE]` starts a real server on the checkpoint. It
answers the same prompts with and without capture (log-probs, routes, masks), in turn. With `--run`, the phases of a
finished run are added. `--against trl` measures in its place whole steps of our run beside GRPO steps of TRL, in turn
(`benchmarks.peers.against_trl`); `--python` names an interpreter that has `trl` (`pip install trl==1.16.0`).
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from benchmarks.in_turn import ending_all
from benchmarks.options import command_line
from benchmarks.peers.against_trl import against_trl
from benchmarks.table import Row, report
from moe_trm.config.schema import Config
from moe_trm.rollout.build import sampling_params
from moe_trm.rollout.servers.backend import Wanted
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.answer import parse_answer
from moe_trm.tasks.build import build_task
from moe_trm.types import Prompt, SamplingParams

CAPTURE = {
    "return_logprob": True,
    "return_routed_experts": True,
    "return_sampling_mask": True,
    "sampling_logprobs_mode": "support",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", required=True, help="Hugging Face folder, e.g. runs/quickstart-start")
    parser.add_argument("--run", type=Path, help="a run directory whose phases to add")
    parser.add_argument("--rounds", type=int, help="paired measurements (default: 8, with `--against` 40)")
    parser.add_argument("--against", choices=["trl"], help="compare whole steps with this trainer's")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with `trl` (default: this one)")
    args = parser.parse_args(argv)
    if args.against:
        with ending_all(), tempfile.TemporaryDirectory() as folder:
            found, turns = against_trl(args.checkpoint, Path(folder), args.python, args.rounds or 40)
        report("Seconds of a step, ours and TRL's, from steps in turn", found, args.json, {"turns": turns})
        return 0
    rows = recording(args.checkpoint, args.rounds or 8)
    if args.run:
        rows += phases(args.run)
    report("Recording at the engine (128 samples in flight), and the phases of a step", rows, args.json)
    return 0


def recording(checkpoint: str, rounds: int) -> list[Row]:
    """Tokens per second with and without capture, parsing and validation included; and the median ratio of pairs."""
    config = Config.model_validate(
        {"model": {"checkpoint": checkpoint}, "rollout": {"top_p": 0.95, "server": {"port": 0}}}
    )
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(config, Path(folder) / "rollout.log", secrets.token_hex(8))
        try:
            speeds = asyncio.run(_measure(config, server, rounds))
        finally:
            server.stop()
    paired = [full / bare for full, bare in zip(speeds["captured"], speeds["bare"], strict=True)]
    rows: list[Row] = [
        {"what": f"tokens/s, {name}", "median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in speeds.items()
    ]
    return [
        *rows,
        {"what": "captured / bare", "median": statistics.median(paired), "min": min(paired), "max": max(paired)},
    ]


async def _measure(config: Config, server: Server, rounds: int) -> dict[str, list[float]]:
    task = build_task(config.task, config.model.checkpoint, config.seed)
    model = ServedModel.from_checkpoint(Path(config.model.checkpoint))
    params = sampling_params(config, task.tokens.vocab_size, task.tokens.stop_token_ids)
    speeds: dict[str, list[float]] = {"captured": [], "bare": []}
    async with EngineHttp(server.url, server.api_key, timeout_s=120, max_attempts=1) as http:
        await http.post("/update_weight_version", {"new_version": "0"})
        for step in range(1, rounds + 2):
            prompts = [prompt for prompt in task.train_prompts(step, 16) for _ in range(8)]
            for name in sorted(speeds, reverse=step % 2 == 0):
                speed = await _round(http, prompts, params, model, captured=name == "captured")
                if step > 1:
                    speeds[name].append(speed)
    await task.close()
    return speeds


async def _round(
    http: EngineHttp, prompts: Sequence[Prompt], params: SamplingParams, model: ServedModel, *, captured: bool
) -> float:
    sampling = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
    }

    async def one(number: int, prompt: Prompt) -> int:
        request = {"input_ids": list(prompt.token_ids), "sampling_params": sampling, **(CAPTURE if captured else {})}
        body = await http.request("POST", "/generate", request)
        if captured:
            wanted = Wanted(routes=True, mask=True)
            return parse_answer(body, prompt, model, wanted, sample_id=number, group_id=0).num_sampled
        return len(orjson.loads(body)["output_ids"])

    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))
    return tokens / (time.perf_counter() - started)


def phases(run: Path) -> list[Row]:
    """Median seconds of each phase over the steps of a run, and its share of the step."""
    steps = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    steps = [step for step in steps if "time/step_s" in step]
    whole = statistics.median(step["time/step_s"] for step in steps)
    rows: list[Row] = []
    for phase in ("wait", "score", "probe", "update", "sync", "step"):
        seconds = [step.get(f"time/{phase}_s", 0.0) for step in steps]
        median = statistics.median(seconds)
        rows.append({"phase": phase, "median_s": median, "share": median / whole, "mean_s": statistics.fmean(seconds)})
    return rows


if __name__ == "__main__":
    sys.exit(main())
