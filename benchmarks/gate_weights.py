"""Recorded expert ids, or ids with their gate weights: how much of the engine mismatch each takes away.

`python -m benchmarks.gate_weights [--checkpoint DIR | --family NAME] [--dtype A] [--prompts N] [--json FILE]`

A real SGLang server prefills texts and writes the gate weights of each token to a file, by its own debugging flag.
Hugging Face in float32 scores the same texts three times: with its own routes, with the server's ids and its own gate
weights over them (R3), and with the server's ids and weights. The weights are put in behind the proof of the ids.
k3 has 95% bootstrap intervals over prompts.

Shape letters: T tokens of a text, K experts per token.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.engines.hf import HFScorer, sample
from benchmarks.engines.scored import Scored, Setting, Text
from benchmarks.engines.server import started
from benchmarks.engines.sglang import SglangScorer
from benchmarks.options import command_line
from benchmarks.short_run import starting_checkpoint
from benchmarks.table import Row, report
from moe_trm.errors import EngineError, MoeTrmError
from moe_trm.models.registry import MOE_FAMILIES
from moe_trm.models.tiny.families import make_family
from moe_trm.rollout.sglang.hidden_states import FLAG
from moe_trm.step.probe.pooled import intervals, k3
from moe_trm.types import Prompt
from routing.hf import moe_blocks

FLOAT32_BYTES = 4
Weights = Mapping[int, tuple[Tensor, Tensor]]
"""Layer -> ids `[T, K]` and weights `[T, K]` of one text."""


def served(setting: Setting, texts: Sequence[Text], folder: Path) -> tuple[list[Scored], list[Weights]]:
    """The log-probs and routes of a server for each text, and the gate weights that it wrote."""
    with started(setting, extra_args=(FLAG, str(folder))) as server:
        scored = SglangScorer(server, setting).score(texts)
    passes = {}
    for path in folder.rglob("Pass*.pt"):
        dumped = torch.load(path, map_location="cpu", weights_only=True)
        passes[tuple(dumped["model.forward_batch_info.input_ids"].tolist())] = dumped
    return scored, [_weights(passes, text) for text in texts]


def _weights(passes: Mapping[tuple[int, ...], Any], text: Text) -> Weights:
    if (dumped := passes.get(tuple(text.tokens.tolist()))) is None:
        raise EngineError("the rollout server wrote no gate weights of a text", got=f"{len(passes)} passes")
    return {
        int(name.split(".")[2]): (value[1].long(), value[0].float())
        for name, value in dumped.items()
        if name.endswith(".mlp.topk")
    }


@contextmanager
def with_gate_weights(model: nn.Module, weights: Weights) -> Iterator[None]:
    """In here the experts of `model` are given these weights for their ids, which must be the same sets.

    SGLang multiplies the sum over experts by the scaling factor; here it is part of the weights.
    """

    def give(layer: int, _experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, ids, live_weights = args
        recorded_ids, recorded_weights = (part[: len(ids)] for part in weights[layer])
        recorded_weights = recorded_weights * getattr(model.config, "routed_scaling_factor", 1.0)
        same = ids[:, :, None] == recorded_ids[:, None, :]
        if not bool(same.any(2).all()):
            raise MoeTrmError(
                "the gate weights of a token belong to other experts than its own", where=f"layer {layer}"
            )
        return (hidden, ids, (same * recorded_weights[:, None, :]).sum(2).to(live_weights.dtype)), kwargs

    with ExitStack() as hooks:
        for layer, block in moe_blocks(model).items():
            hooks.callback(block.experts.register_forward_pre_hook(partial(give, layer), with_kwargs=True).remove)
        yield


def measured(checkpoint: Path, dtype: Any, prompts: Sequence[Prompt], group_size: int, folder: Path) -> list[Row]:
    """k3 of each arm, and what its record needs per token."""
    reference = Setting("hf", checkpoint, "float32", 1)
    texts = sample(reference, prompts, group_size, 32)
    engine, weights = served(Setting("sglang", checkpoint, dtype, 1), texts, folder)
    scorer = HFScorer(reference)
    routes = [scored.routes for scored in engine]
    with_weights = []
    for text, route, recorded in zip(texts, routes, weights, strict=True):
        with with_gate_weights(scorer.model, recorded):
            with_weights += scorer.score([text], [route])
    arms = {"live": scorer.score(texts), "ids": scorer.score(texts, routes), "ids and weights": with_weights}
    group = np.concatenate([np.full(text.rows.sum(), text.prompt) for text in texts])
    entries = routes[0].experts[0].size
    width = routes[0].experts.itemsize
    bytes_of = {"live": 0, "ids": entries * width, "ids and weights": entries * (width + FLOAT32_BYTES)}
    rows: list[Row] = []
    for arm, scores in arms.items():
        differences = [
            (scored.logprobs - reference.logprobs)[text.rows]
            for scored, reference, text in zip(scores, engine, texts, strict=True)
        ]
        columns = {"k3": k3(np.concatenate(differences)), "one": np.ones(len(group))}
        estimate = intervals(columns, {"k3": ("k3", "one", 1.0)}, group)["k3"]
        row: Row = {
            "arm": arm,
            "tokens": len(group),
            "k3, nats": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
        }
        rows.append(row | {"bytes per token": bytes_of[arm]})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder (default: the quickstart's)")
    parser.add_argument("--family", choices=MOE_FAMILIES, help="instead: tiny random weights of this family")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="of the server")
    parser.add_argument("--prompts", type=int, default=32, help="(default: 32)")
    parser.add_argument("--group-size", type=int, default=4, help="answers to each (default: 4)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            made = make_family(args.family, Path(scratch) / args.family) if args.family else None
            checkpoint = made or starting_checkpoint(args.checkpoint, Path(scratch))
            rng = np.random.default_rng(0)
            prompts = [Prompt(str(n), tuple(rng.integers(4, 99, 16).tolist())) for n in range(args.prompts)]
            rows = measured(checkpoint, args.dtype, prompts, args.group_size, Path(scratch) / "passes")
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    report(f"Recorded gate weights, {checkpoint.name}, {args.dtype} server", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
