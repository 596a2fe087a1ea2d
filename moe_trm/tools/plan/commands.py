"""`moe-trm plan [CONFIG]`: the best plans for a machine; memory, bytes and seconds of one, before any GPU is taken."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_trm import models
from moe_trm.config.load import load
from moe_trm.config.schema import Config, ModelConfig, RolloutConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.models.hf_config import layer_pattern, read_full_config, reads_images, text_config, with_quantisation_file
from moe_trm.tools.plan.build import Assumptions, Work, build, overrides
from moe_trm.tools.plan.cluster import Cluster
from moe_trm.tools.plan.gpus import GPUS, gpu_of
from moe_trm.tools.plan.lengths import Lengths, log_normal, recorded
from moe_trm.tools.plan.search import search
from moe_trm.tools.plan.speed import Efficiency
from moe_trm.tools.plan.text import as_data, page, proposals

SIGMA = 0.8
CHOSEN = ("batch", "learner", "optimizer", "pipeline", "rollout", "sync")
"""Sections of the configuration that a plan without one writes."""
WORKLOAD = Path(__file__).with_name("workload.yaml")
TEXT_ALONE = "These are counts of the text model alone. The vision encoder is neither trained nor served."
PICTURED = (
    "The vision tower is in the memory of ranks and servers. Its compute, its activations and its part of pushes are\n"
    "counted nowhere. Image tokens are tokens of the prompt: --prompt-tokens."
)
MAMBA = (
    "Activations of Mamba-2 layers are counted as the kernels of mamba-ssm keep them. Without that package\n"
    "transformers' own scan keeps many times as much."
)
PUBLISHED = Path(models.__file__).with_name("published")


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm plan`."""
    parser.add_argument("config", nargs="?", help="YAML configuration (default: the workload of moe_trm/tools/plan)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides such as learner.dtype=...")
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default: 1)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node (default: 8)")
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(GPUS)} (default: h100)")
    parser.add_argument("--server-nodes", type=int, help="nodes that serve (default: searched; of CONFIG itself, 1)")
    parser.add_argument(
        "--hf-config", metavar="FILE", help=f"config.json where the checkpoint is not here, or {', '.join(published())}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    for option, help_text in (
        ("memory-gb", "GB of a GPU, in place of its data sheet"),
        ("bandwidth-gb-s", "GB per second of GPU memory, in place of its data sheet"),
        ("tflops", "dense bfloat16 TFLOPS of a GPU, in place of its data sheet"),
        ("rollout-tokens-s", "measured tokens per second of one full server"),
        ("learner-tokens-s", "measured tokens per second of the whole learner, prompts included"),
    ):
        parser.add_argument(f"--{option}", type=_positive, help=help_text)
    for option, default, help_text in (
        ("decode-bandwidth", Efficiency.decode_bandwidth, "share of bandwidth and products that decoding reaches"),
        ("mfu", Efficiency.train_flops, "share of products that training reaches, exchange and waiting left out"),
        ("load-gb-s", Efficiency.load_gb_s, "GB per second of a weight push"),
        ("node-gb-s", Efficiency.node_gb_s, "GB per second of a GPU to other nodes"),
        ("host-gb-s", Efficiency.host_gb_s, "GB per second of a rank's optimizer on the host"),
        ("other-gb", 4.0, "GB of a rank for CUDA, NCCL and the allocator"),
        ("kept-ids", 3.3, "mean ids of a sampling mask"),
        ("prompt-tokens", 512.0, "mean tokens of a prompt"),
        ("sigma", SIGMA, "standard deviation of the logarithm of answer lengths"),
    ):
        parser.add_argument(f"--{option}", type=_positive, default=default, help=f"{help_text} (default: {default:g})")
    parser.add_argument(
        "--sharing",
        type=_share,
        default=Efficiency.sharing,
        help="speed of servers and learner while both compute on the same cores (default: 1, each has its own)",
    )
    parser.add_argument("--median-tokens", type=_positive, help="of an answer (default: rollout.max_new_tokens / 4)")
    parser.add_argument("--bundle", metavar="FOLDER", help="a recording whose answer lengths are taken")


def run(args: argparse.Namespace) -> int:
    """0 when the configuration fits its memory, or without one, when some plan does; 1 otherwise."""
    gpu = gpu_of(args.gpu)
    has_file = args.config is not None and "=" not in args.config
    config_words = [] if has_file or args.config is None else [args.config]
    config = load(args.config if has_file else WORKLOAD, [*config_words, *args.overrides])
    full_config, where = _hf_config(config.model, args.hf_config)
    hf = text_config(full_config)
    if args.nodes < 1 or args.gpus < 1 or (args.server_nodes or 1) < 1:
        raise ConfigError(
            "no such machine",
            where="--nodes, --gpus, --server-nodes",
            got=f"{args.nodes}, {args.gpus}, {args.server_nodes}",
            expected="at least 1 of each",
        )
    hardware = {"memory_gb": args.memory_gb, "bandwidth_gb_s": args.bandwidth_gb_s, "tflops": args.tflops}
    gpu = replace(gpu, **{name: value for name, value in hardware.items() if value is not None})
    cluster = Cluster(args.nodes, args.gpus, gpu, args.server_nodes or 1)
    work = Work(hf, _assumptions(args, config.rollout), where, full_config)
    result = search(config, work, cluster, args.server_nodes)
    base = (
        config
        if has_file
        else config.model_copy(update={name: getattr(Config(model=config.model), name) for name in CHOSEN})
    )
    if reads_images(full_config):
        print(f"{PICTURED if config.task.has_pictures else TEXT_ALONE}\n")
    if layer_pattern(hf):
        print(f"{MAMBA}\n")
    print(proposals(result, base))
    plan = build(config, work, cluster) if has_file else next(iter(result.plans), None)
    if plan is not None:
        print(f"\n{'the configuration as it is' if has_file else 'plan 1'}\n\n{page(plan)}")
    if args.json:
        data = {
            **(as_data(plan) if plan else {"fits": False}),
            "why": result.why,
            "proposals": [
                {**as_data(proposal), "settings": overrides(proposal.config, base)} for proposal in result.plans
            ],
        }
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0 if plan is not None and plan.fits else 1


def _assumptions(args: argparse.Namespace, rollout: RolloutConfig) -> Assumptions:
    efficiency = Efficiency(
        args.decode_bandwidth,
        args.mfu,
        args.load_gb_s,
        args.node_gb_s,
        args.host_gb_s,
        args.rollout_tokens_s,
        args.learner_tokens_s,
        args.sharing,
    )
    return Assumptions(efficiency, _lengths(args, rollout), args.kept_ids, args.other_gb)


def _lengths(args: argparse.Namespace, rollout: RolloutConfig) -> Lengths:
    if args.bundle:
        return recorded(args.bundle)
    longest = rollout.max_new_tokens
    return log_normal(args.median_tokens or max(1.0, longest / 4), args.sigma, longest, args.prompt_tokens)


def _hf_config(model: ModelConfig, name: str | None) -> tuple[dict[str, Any], str]:
    if name is None and not Path(model.checkpoint).is_dir():
        raise _not_here(model.checkpoint)
    if name is None:
        return read_full_config(model.checkpoint), f"{model.checkpoint}/config.json"
    file = PUBLISHED / f"{name}.json" if name in published() else Path(name)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(file, str(error)) from error
    if not isinstance(data, dict):
        raise _unreadable(file, type(data).__name__)
    return with_quantisation_file(data, file.parent), str(file)


def published() -> list[str]:
    """Names of models whose config.json is here."""
    return sorted(file.stem for file in PUBLISHED.glob("*.json"))


def _not_here(checkpoint: str) -> CheckpointError:
    release = re.sub(r"[^a-z0-9]+", "_", Path(checkpoint).name.lower())
    file = release if release in published() else f"FILE (or one of {', '.join(published())})"
    return CheckpointError(
        "checkpoint folder not found",
        where=f"model.checkpoint={checkpoint}",
        got="no such folder",
        expected="a folder with config.json, or --hf-config",
        fix=f"A plan needs no weights: --hf-config {file}.",
    )


def _unreadable(file: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "config.json cannot be read",
        where="--hf-config",
        got=got,
        expected="a JSON object",
        fix=f"Check {file}, name one of {', '.join(published())}, or leave --hf-config out to read that of "
        "model.checkpoint.",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return value
