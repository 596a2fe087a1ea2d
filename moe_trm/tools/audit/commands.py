"""`moe-trm audit DUMP --checkpoint FOLDER`: what sets rollout, trainer and checkpoint of anybody's run apart."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch

from moe_trm.config.engines import DEFAULT, SERVER_BACKENDS
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.servers.backend import backend_of
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.use_proof import BOUNDS
from moe_trm.tools.audit.audit_answer import AuditAnswer
from moe_trm.tools.audit.dump import AuditDump
from moe_trm.tools.audit.examine import AuditOptions, examine_dump
from moe_trm.tools.audit.frameworks import read_dump
from moe_trm.tools.audit.page import render
from moe_trm.tools.audit.reference import ReferenceModel
from moe_trm.tools.audit.served import ask_server, judge_server, texts_of
from moe_trm.tools.doctor.commands import tell


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm audit`."""
    parser.add_argument(
        "dump",
        type=Path,
        nargs="+",
        help="files or folders: a bundle, dumps of slime, miles or verl, or the plain layout of docs/healthy.md",
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="HF_FOLDER", help="the weights that sampled the dump"
    )
    parser.add_argument(
        "--learner-scores", type=Path, metavar="FILE", help="the trainer's log-probs in the plain layout"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="of sampling, where the dump does not have it")
    parser.add_argument("--top-p", type=float, metavar="P", help="of sampling, where the dump has no kept ids")
    parser.add_argument(
        "--engine", metavar="URL", help="an idle server with these weights: fixed texts are decoded and prefilled there"
    )
    parser.add_argument("--engine-kind", choices=tuple(SERVER_BACKENDS), default=DEFAULT, help="of the server")
    parser.add_argument("--engine-dtype", choices=tuple(BOUNDS), default="bfloat16", help="of the server")
    parser.add_argument("--share", type=float, default=0.03, help="share of the rows in which a fault has to be found")
    parser.add_argument("--power", type=float, default=0.99, help="chance with which the sample has a row of it")
    parser.add_argument(
        "--rows", type=int, metavar="N", help="rows to score, in place of what --share and --power need"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of the model (default: cuda where there is one)")
    parser.add_argument("--page", type=Path, default=Path("audit.html"), metavar="FILE", help="default: audit.html")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer and figure here")


def run(args: argparse.Namespace) -> int:
    """0 when no fault was found, 1 otherwise."""
    started = time.perf_counter()
    dump = read_dump(args.dump, args.learner_scores)
    options = AuditOptions(
        temperature=args.temperature,
        top_p=args.top_p,
        share=args.share,
        power=args.power,
        rows=args.rows,
        seed=args.seed,
    )
    source = ", ".join(path.name for path in args.dump)
    model = ReferenceModel(args.checkpoint, args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    audit = examine_dump(dump, source, model, options, tell)
    if args.engine:
        audit.answers.extend(asyncio.run(_server(args, dump, model)))
    args.page.write_text(render(audit), encoding="utf-8")
    failed = sum(answer.status == "fail" for answer in audit.answers)
    print(
        f"\n{failed} fault{'s' * (failed != 1)}, {time.perf_counter() - started:.0f} s; page: {args.page}", flush=True
    )
    if args.json:
        document = {"healthy": audit.healthy, **asdict(audit)}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if audit.healthy else 1


async def _server(args: argparse.Namespace, dump: AuditDump, model: ReferenceModel) -> list[AuditAnswer]:
    """Answers about the server, told at once. Raises `EngineError` where it does not answer."""
    async with EngineHttp(args.engine, os.environ.get(API_KEY_VARIABLE), timeout_s=120, max_attempts=2) as http:
        asked = await ask_server(backend_of(args.engine_kind), http, texts_of(dump.rows))
    answers = judge_server(asked, model, BOUNDS[args.engine_dtype])
    for answer in answers:
        tell(answer.check)
    return answers
