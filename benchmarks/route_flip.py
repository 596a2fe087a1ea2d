"""Difference of two engines on the same tokens, and the part of it that routing causes.

`python -m benchmarks.route_flip [--checkpoint DIR] [--a sglang] [--b megatron] [--versions DIR_A DIR_B] [--json FILE]`

Side A samples answers (servers by decoding; the others score samples of Hugging Face). Side B scores the same tokens
twice: with its own routes and, where it can, with the routes of A, replayed and proved.

Reported are the rate of different expert sets by layer, position and router margin; the log-prob differences with and
without replay; and 95% bootstrap intervals over prompts. The cause is the difference between the sides: engine, dtype,
layout, sequences computed together, or (with --versions) the age of the weights. Router margins always come from the
Hugging Face model in float32 with B's weights.

Shape letters: N scored tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.engines.compare import Comparison, compare
from benchmarks.engines.hf import HFScorer, sample
from benchmarks.engines.megatron import MegatronScorer
from benchmarks.engines.scored import Scorer, Setting
from benchmarks.engines.server import ServerScorer, started
from benchmarks.engines.sglang import SglangScorer
from benchmarks.engines.vllm import VllmScorer
from benchmarks.options import command_line
from benchmarks.short_run import starting_checkpoint
from benchmarks.table import Row, report
from moe_trm.config.schema import TaskConfig
from moe_trm.errors import MoeTrmError
from moe_trm.models.registry import MOE_FAMILIES
from moe_trm.models.tiny.families import make_family
from moe_trm.tasks.build import build_task

SERVED: dict[str, type[ServerScorer]] = {"sglang": SglangScorer, "vllm": VllmScorer}
ENGINES = (*SERVED, "megatron", "hf")
DTYPES = ("float32", "bfloat16", "float16")

KEY = """
overlap_loss: share of A's experts that B does not choose for the same token and layer.
expert_delta: mean over experts of the chance that one side uses it and the other does not.
native_*: B with routes of its own; replayed_*: with A's routes; *_abs_mean: of log-prob differences, nats.
gate_weight_shift: mean change of the weight of an expert that both chose."""
"""Figures of the table in words."""


def measure(
    a: Setting, b: Setting, *, prompts: int, group_size: int, max_new_tokens: int, questions: Path | None = None
) -> Comparison:
    """Sample with `a`, score with both, compare. `questions`: JSONL as of the task `jsonl`; None: sums.

    Raises:
        MoeTrmError: an engine failed; `ReplayProofError`: B did not compute with the routes it was given.
    """
    settings = {"name": "jsonl", "prompts": str(questions)} if questions else {"name": "arithmetic"}
    task = build_task(TaskConfig.model_validate({**settings, "eval_size": 0}), str(a.checkpoint), seed=0)
    prompt_list, stop = task.train_prompts(1, prompts), task.tokens.stop_token_ids
    with ExitStack() as stack:
        if a.engine in SERVED:
            with started(a) as server:
                texts, scores_a = SERVED[a.engine](server, a).sample(prompt_list, group_size, max_new_tokens, stop)
        else:
            texts = sample(replace(a, engine="hf", dtype="float32"), prompt_list, group_size, max_new_tokens)
            scores_a = _scorer(a, stack).score(texts)
        scorer = _scorer(b, stack)
        native = scorer.score(texts)
        replayed = None if b.engine in SERVED else scorer.score(texts, [scored.routes for scored in scores_a])
        local_flips = scorer.local_flips
    margins = HFScorer(replace(b, engine="hf", dtype="float32", together=16)).score(texts)
    return compare(texts, scores_a, native, replayed, margins, local_flips)


def _scorer(setting: Setting, stack: ExitStack) -> Scorer:
    if setting.engine in SERVED:
        return SERVED[setting.engine](stack.enter_context(started(setting)), setting)
    return HFScorer(setting) if setting.engine == "hf" else MegatronScorer(setting)


def table(compared: Comparison) -> list[Row]:
    """Pooled figures with intervals, then strata."""
    rows: list[Row] = [
        {"figure": name, "value": interval.value, "low": interval.low, "high": interval.high}
        for name, interval in compared.pooled.items()
    ]
    rows.append({"figure": "expert_delta", "value": compared.expert_delta})
    if compared.local_flips is not None:
        rows.append({"figure": "local_flip_rate (replayed against own)", "value": compared.local_flips})
    if compared.gate_weight_shift is not None:
        rows.append({"figure": "gate_weight_shift (experts of both)", "value": compared.gate_weight_shift})
    for kind, strata in compared.strata.items():
        rows += [
            {
                kind: name,
                "flip rate": stratum.rate.value,
                "low": stratum.rate.low,
                "high": stratum.rate.high,
                "token-layers": stratum.token_layers,
            }
            for name, stratum in strata.items()
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder (default: the quickstart's)")
    parser.add_argument("--family", choices=MOE_FAMILIES, help="instead: tiny random weights of this family")
    parser.add_argument(
        "--versions", type=Path, nargs=2, metavar=("DIR_A", "DIR_B"), help="two checkpoints of one model: staleness"
    )
    parser.add_argument("--a", choices=ENGINES, default="sglang", help="side A (default: sglang)")
    parser.add_argument("--b", choices=ENGINES, default="megatron", help="side B (default: megatron)")
    parser.add_argument(
        "--dtype",
        nargs=2,
        choices=DTYPES,
        default=("bfloat16", "float32"),
        metavar=("A", "B"),
        help="arithmetic of each side (default: bfloat16 float32)",
    )
    parser.add_argument(
        "--together",
        type=int,
        nargs=2,
        default=(32, 16),
        metavar=("A", "B"),
        help="sequences that each side computes together (default: 32 16)",
    )
    parser.add_argument("--layout", nargs="*", default=(), metavar="SIZE", help="of Megatron, e.g. expert=2 tensor=2")
    parser.add_argument(
        "--questions",
        type=Path,
        help="JSONL with prompt and answer (default: sums, which need the quickstart's tokenizer)",
    )
    parser.add_argument("--prompts", type=int, default=32, help="prompts (default: 32)")
    parser.add_argument("--group-size", type=int, default=4, help="answers to each (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="longest answer (default: 32)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folders = args.versions
            if not folders:
                made = make_family(args.family, Path(scratch) / args.family) if args.family else None
                folders = [made or starting_checkpoint(args.checkpoint, Path(scratch))] * 2
            a, b = (
                Setting(engine, folder, dtype, together, tuple(args.layout) if engine == "megatron" else ())
                for engine, folder, dtype, together in zip(
                    (args.a, args.b), folders, args.dtype, args.together, strict=True
                )
            )
            compared = measure(
                a,
                b,
                prompts=args.prompts,
                group_size=args.group_size,
                max_new_tokens=args.max_new_tokens,
                questions=args.questions,
            )
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    cause = "weights" if args.versions else "engine, arithmetic or layout"
    title = (
        f"A: {a}\nB: {b}\nthey differ in: {cause}; {compared.num_tokens} tokens of {args.prompts} prompts, "
        f"{time.perf_counter() - started:.0f} s"
    )
    report(title, table(compared), args.json)
    print(KEY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
