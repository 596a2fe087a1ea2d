"""`moe-trm export RUN [--step N]`: a checkpoint of a run as a Hugging Face folder, which other programs load."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_trm.errors import RunError
from moe_trm.learner.checkpoint.folder import read_manifest
from moe_trm.learner.hf_form import ChangeLoss
from moe_trm.tools.export.adapter import export_adapter, peft_warning
from moe_trm.tools.export.checkpoint import export_checkpoint
from moe_trm.tools.export.run_folder import open_run, run_around

MOST_LOST = 0.5
"""Share of training's change, by norm: an export that loses more says so."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm export`."""
    parser.add_argument(
        "run_dir", type=Path, help="run directory, usually runs/NAME; or one of its step-NNNNNN folders"
    )
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    parser.add_argument("--out", type=Path, help="folder to write (default: hf-NNNNNN beside the checkpoint)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--published",
        action="store_true",
        help="write the tensors in the form of the checkpoint that the run started from, FP8 or MXFP4 "
        "(default: plain, in the learner's dtype)",
    )
    form.add_argument(
        "--adapter", action="store_true", help="the adapter alone, in peft's files (default: adapter-NNNNNN)"
    )
    parser.add_argument(
        "--model", type=Path, help="where the checkpoint that the run started from lies now, if it was moved"
    )


def run(args: argparse.Namespace) -> int:
    """Write the folder and say where it is and how to load it. Raises `RunError`, `CheckpointError`."""
    is_step = (args.run_dir / "manifest.json").is_file()
    checkpoint = args.run_dir if is_step else open_run(args.run_dir).checkpoint(args.step)
    step = read_manifest(checkpoint).step
    if args.step not in (None, step):
        raise RunError("this is the checkpoint of another step", where=str(checkpoint), got=args.step, expected=step)
    if args.adapter:
        place = args.out or checkpoint.parent / f"adapter-{step:06d}"
        print(f"{export_adapter(checkpoint, place, model=args.model)}: the adapter after step {step}, for peft")
        if warning := peft_warning(checkpoint, args.model):
            print(f"  warning   {warning}")
        return 0
    out = args.out or checkpoint.parent / f"hf-{step:06d}"
    loss = ChangeLoss()
    folder = export_checkpoint(checkpoint, out, model=args.model, published=args.published, loss=loss)
    print(f"{folder}: the weights after step {step}")
    print("".join(f"  {line}\n" for line in rounding_lines(loss)), end="")
    print(f"  load      AutoModelForCausalLM.from_pretrained({str(folder)!r})")
    print(f"  serve     python -m launch.rollout CONFIG model.checkpoint={folder}")
    print(f"  evaluate  moe-trm eval {folder}" + ("" if run_around(folder) else " --config CONFIG"))
    return 0


def rounding_lines(loss: ChangeLoss) -> list[str]:
    """The share of the training that the published form lost; nothing where it rounded no trained weight."""
    if not loss.tensors:
        return []
    lines = [f"rounding  {loss.share:.0%} of what training changed in {loss.tensors} tensors of 8 or 4 bits is lost"]
    if loss.share > MOST_LOST:
        lines.append("          without --published, or with --adapter where adapters were trained, nothing is")
    return lines
