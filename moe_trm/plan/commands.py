"""`moe-trm plan CONFIG`: memory, bytes and seconds of a run before any GPU is taken."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_trm.config.load import load
from moe_trm.config.schema import ModelConfig, RolloutConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.models.hf_config import read_hf_config
from moe_trm.plan.build import Assumptions, build
from moe_trm.plan.cluster import Cluster
from moe_trm.plan.gpus import GPUS, gpu_of
from moe_trm.plan.lengths import Lengths, log_normal, recorded
from moe_trm.plan.speed import Efficiency
from moe_trm.plan.text import as_data, page

SIGMA = 0.8


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm plan`."""
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides such as learner.dtype=...")
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default: 1)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node (default: 8)")
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(GPUS)} (default: h100)")
    parser.add_argument("--server-nodes", type=int, default=1, help="nodes that serve, as of launch/slurm.sh")
    parser.add_argument("--hf-config", type=Path, metavar="FILE", help="config.json, where the checkpoint is not here")
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
        ("mfu", Efficiency.train_flops, "share of products that training reaches"),
        ("load-gb-s", Efficiency.load_gb_s, "GB per second of a weight push"),
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
    """0 when learner and servers fit their memory, 1 otherwise."""
    gpu = gpu_of(args.gpu)
    config = load(args.config, args.overrides)
    hf, where = _hf_config(config.model, args.hf_config)
    if args.nodes < 1 or args.gpus < 1 or args.server_nodes < 1:
        raise ConfigError(
            "no such machine",
            where="--nodes, --gpus, --server-nodes",
            got=f"{args.nodes}, {args.gpus}, {args.server_nodes}",
            expected="at least 1 of each",
        )
    own = {"memory_gb": args.memory_gb, "bandwidth_gb_s": args.bandwidth_gb_s, "tflops": args.tflops}
    gpu = replace(gpu, **{name: value for name, value in own.items() if value is not None})
    cluster = Cluster(args.nodes, args.gpus, gpu, args.server_nodes)
    plan = build(config, hf, cluster, _assumptions(args, config.rollout), where)
    print(page(plan))
    if args.json:
        args.json.write_text(json.dumps(as_data(plan), indent=2) + "\n", encoding="utf-8")
    return 0 if plan.fits else 1


def _assumptions(args: argparse.Namespace, rollout: RolloutConfig) -> Assumptions:
    efficiency = Efficiency(
        args.decode_bandwidth, args.mfu, args.load_gb_s, args.rollout_tokens_s, args.learner_tokens_s, args.sharing
    )
    return Assumptions(efficiency, _lengths(args, rollout), args.kept_ids, args.other_gb)


def _lengths(args: argparse.Namespace, rollout: RolloutConfig) -> Lengths:
    if args.bundle:
        return recorded(args.bundle)
    longest = rollout.max_new_tokens
    return log_normal(args.median_tokens or max(1.0, longest / 4), args.sigma, longest, args.prompt_tokens)


def _hf_config(model: ModelConfig, file: Path | None) -> tuple[dict[str, Any], str]:
    if file is None:
        return read_hf_config(model.checkpoint), f"{model.checkpoint}/config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(file, str(error)) from error
    if not isinstance(data, dict):
        raise _unreadable(file, type(data).__name__)
    return data, str(file)


def _unreadable(file: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "config.json cannot be read",
        where="--hf-config",
        got=got,
        expected="a JSON object",
        fix=f"Check {file}, or leave --hf-config out to read that of model.checkpoint.",
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
