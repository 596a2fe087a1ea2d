"""The model of a benchmark of steps: a checkpoint that is there, or a new one of any shape, taught for a moment.

`--hidden 256 --layers 8 --experts 32 --top-k 4` makes one. With random weights a sampling mask would hold nearly the
whole vocabulary, and answers would end where they must. So it makes `--taught` supervised steps of the quickstart's
warm-up first, most of whose answers are short guesses.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.tiny.checkpoint import TinyShape, save
from moe_trm.plan.parameters import model_of
from moe_trm.quickstart.warmup import Warmup, WarmupRecipe

RECIPE = replace(WarmupRecipe(), max_seconds=3600.0)
SAID_EVERY = 20
"""Steps between two lines."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of a benchmark that chooses its model."""
    parser.add_argument("--checkpoint", help="Hugging Face folder, e.g. runs/quickstart-start")
    parser.add_argument("--hidden", type=int, help="in place of a checkpoint: hidden size of a new model")
    parser.add_argument("--layers", type=int, default=8, help="of the new model (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=32, help="of each of its layers (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=4, help="experts of a token there (default: %(default)s)")
    parser.add_argument("--taught", type=int, default=100, help="supervised steps that it makes (default: %(default)s)")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error unless there is one model."""
    if (args.checkpoint is None) == (args.hidden is None):
        parser.error("give either --checkpoint or --hidden")


def checkpoint_of(args: argparse.Namespace, folder: Path) -> str:
    """Folder of the model that was asked for; a new one is made in `folder`."""
    if args.checkpoint is not None:
        return str(args.checkpoint)
    shape = TinyShape(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.hidden // TinyShape.head_dim,
        kv_heads=max(1, args.hidden // TinyShape.head_dim // 2),
        experts=args.experts,
        top_k=args.top_k,
    )
    warmup = Warmup(0, RECIPE, shape=shape)
    for step in range(1, args.taught + 1):
        loss = warmup.supervised_step(direct_share=RECIPE.direct_share)
        if step % SAID_EVERY == 0:
            print(f"step {step} of {args.taught}: loss {loss:.3f}", flush=True)
    save(warmup.model, warmup.tokenizer, folder)
    return str(folder)


def size_of(checkpoint: str) -> str:
    """Its numbers of parameters, in words."""
    model = model_of(read_hf_config(Path(checkpoint)))
    return f"{model.total() / 1e6:.3g} million parameters, {model.active() / 1e6:.3g} million for each token"
