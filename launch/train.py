"""The learner: `torchrun --nproc-per-node N -m launch.train CONFIG [key=value ...]`.

Each rank builds its part of the model; the first rank of the node also starts the rollout controller, which talks to the server
that `python -m launch.rollout CONFIG` started (or to `rollout.url`). `moe-trm train CONFIG` starts both.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.learner.megatron.notices import silence_known_notices
from moe_trm.loop import push_directory, train
from moe_trm.observe.sinks import JsonLines, ProgressLines, Sink
from moe_trm.passes import resolve_mode
from moe_trm.preflight import check_launch
from moe_trm.rollout.client import ControllerProcess, RolloutClient
from moe_trm.rollout.credentials import api_key_for


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.train", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("overrides", nargs="*", help="dotted overrides such as replay.mode=R3")
    args = parser.parse_args(argv)
    try:
        config = load(args.config, args.overrides)
        check_launch(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
        run(config)
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def run(config: Config) -> None:
    """One rank's life: rendezvous, learner, controller, loop."""
    silence_known_notices()
    from moe_trm.learner.build import build_learner  # imports Megatron-Core, which gives its notices

    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=world_size
    )
    torch.manual_seed(config.seed)
    mode, why = resolve_mode(config.replay.mode, minibatches=config.learner.minibatches, max_age=0)
    run_dir = Path(config.run_dir) / config.name
    sinks: list[Sink] = []
    if rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps(config.dump(), indent=2) + "\n")
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        sinks = [JsonLines(run_dir / "metrics.jsonl"), ProgressLines(config.train.steps)]
        print(f"run {run_dir}: {world_size} learner ranks, replay {mode} ({why})", flush=True)
    learner = build_learner(config)
    try:
        with connect(config, store, rank, learner.data_rank, learner.data_size, run_dir) as rollouts:
            train(config, learner, rollouts, sinks, mode=mode, run_dir=run_dir, pad_token_id=0)
        if config.train.export:
            learner.export_checkpoint(str(run_dir / "checkpoints" / "final"))
    finally:
        if rank == 0:
            shutil.rmtree(push_directory(config, run_dir, 0).parent, ignore_errors=True)
    dist.destroy_process_group()


def connect(
    config: Config, store: dist.Store, rank: int, data_rank: int, data_size: int, run_dir: Path
) -> RolloutClient:
    """Start the controller on the first rank and tell the others where it is, through the rendezvous store (bytes, never pickle)."""
    process = None
    if rank == 0:
        key = secrets.token_hex(16)
        process = ControllerProcess(config, key, api_key_for(config), run_dir / "controller.log")
        store.set("moe-trm/controller", f"{key} {process.endpoint}")
    key, endpoint = store.get("moe-trm/controller").decode().split(" ", 1)
    return RolloutClient(endpoint, key, data_rank=data_rank, data_size=data_size, process=process)


if __name__ == "__main__":
    sys.exit(main())
