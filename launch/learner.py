"""One learner rank: its part of the model, the controller on the first rank, and the training loop."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from launch.hosts import Host
from moe_trm.checkpoint.resumption import Checkpoints
from moe_trm.config.choices import Choice, replay_mode
from moe_trm.config.schema import Config
from moe_trm.doctor.dry_run import try_task
from moe_trm.doctor.preflight import check_launch, load_here
from moe_trm.errors import REFUSED, MoeTrmError
from moe_trm.learner.megatron.notices import silence_known_notices
from moe_trm.learner.protocol import Learner
from moe_trm.loop import train
from moe_trm.observe.build import open_sinks
from moe_trm.observe.sinks import Sink
from moe_trm.report.run import CHOICES
from moe_trm.rollout.client import ControllerProcess, RolloutClient
from moe_trm.rollout.credentials import api_key_for
from moe_trm.runtime.gloo import share_gloo_device
from moe_trm.runtime.interruption import Interruption
from moe_trm.step.push import BroadcastPusher, DiskPusher, Pusher
from moe_trm.sync.rounding import rounding_of
from moe_trm.types import ServerState
from routing.errors import ReplayProofError, ReplayRefusedError, RouteError

REFUSAL_S = 5.0
"""Time in which a rank that refuses is ended by torchrun where the first one refused as well."""


def learn(config_path: str, overrides: Sequence[str], *, restarted: bool) -> int:
    """This rank from its checks to its end; its exit status, after it told what is wrong.

    `restarted`: it replaces one that died.
    """
    interruption = Interruption()
    interruption.install()
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="%(levelname)s %(message)s")
    try:
        config, choices = load_here(config_path, overrides)
        restarted = restarted or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        check_launch(config, world_size=int(os.environ.get("WORLD_SIZE", "1")), restarted=restarted)
        if first and not restarted:
            try_task(config)
        run(config, interruption, choices, restarted=restarted)
    except (MoeTrmError, RouteError, ReplayProofError, ReplayRefusedError) as error:
        status = error.exit_status if isinstance(error, MoeTrmError) else REFUSED
        if not (status == REFUSED and told_by_another(interruption)):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return status
    return 0


def told_by_another(interruption: Interruption) -> bool:
    """True when torchrun ends this rank because another one has refused, which then has said why.

    All ranks refuse the same configuration. The first of each machine says so at once; the others wait a little.
    """
    if not dist.is_torchelastic_launched() or os.environ.get("LOCAL_RANK", "0") == "0":
        return False
    deadline = time.monotonic() + REFUSAL_S
    while not interruption.requested and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(interruption.requested)


def run(config: Config, interruption: Interruption, choices: Sequence[Choice] = (), *, restarted: bool = False) -> None:
    """One rank's life: rendezvous, learner, controller, loop.

    `choices`: what `auto` became, to be told; `restarted`: this rank replaces one that died.
    """
    silence_known_notices()
    from moe_trm.learner.build import build_learner  # imports Megatron-Core, which gives its notices

    host, restarts = Host.here(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store, rank, world_size = next(iter(rendezvous("env://")))
    if host.alone:
        # torchrun gives restarted ranks the store of those that died, with their addresses still in it.
        store = PrefixStore(f"attempt-{restarts}", store)
    share_gloo_device()
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=world_size
    )
    torch.manual_seed(config.seed)
    mode, _ = replay_mode(config.learner, config.replay, config.pipeline, config.correction)
    run_dir = Path(config.run_dir) / config.name
    checkpoints = Checkpoints(config, run_dir, interruption, restarted=restarted)
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "config.json").write_text(json.dumps(config.dump(), indent=2) + "\n")
            (run_dir / CHOICES).write_text(json.dumps([asdict(choice) for choice in choices], indent=2) + "\n")
            sinks = stack.enter_context(open_sinks(config, run_dir, first_step=checkpoints.first_step))
            print(f"run {run_dir}: {world_size} learner ranks, replay {mode}", flush=True)
            for choice in choices:
                print(f"  {choice.key}: {choice}", flush=True)
        # It imports for some seconds, and waits for the servers, while the learner is built.
        process = start_controller(config, store, run_dir, host) if rank == 0 else None
        if process is not None:
            stack.callback(process.wait, 0.0)
        learner = build_learner(config)
        rollouts = stack.enter_context(connect(store, (rank, world_size), learner, process, sinks))
        pusher = build_pusher(config, store, rank, learner, rollouts, run_dir, host)
        stack.callback(pusher.close)
        stack.callback(checkpoints.close)
        train(config, learner, rollouts, pusher, sinks, checkpoints, mode=mode, run_dir=run_dir)
    if config.train.export and not checkpoints.interrupted:
        learner.export_checkpoint(str(run_dir / "checkpoints" / "final"))
    dist.destroy_process_group()


def start_controller(config: Config, store: Store, run_dir: Path, host: Host) -> ControllerProcess:
    """Start the controller, on the first rank, and tell the others its address.

    The address goes through the rendezvous store, as bytes, never as pickle.
    """
    key, address = secrets.token_hex(16), None if host.alone else host.address
    process = ControllerProcess(config, key, api_key_for(config.rollout), run_dir / "controller.log", address=address)
    store.set("moe-trm/controller", f"{key} {process.endpoint} {process.public_key}")
    return process


def connect(
    store: Store, ranks: tuple[int, int], learner: Learner, process: ControllerProcess | None, sinks: Sequence[Sink]
) -> RolloutClient:
    """This rank's client of the controller, which `process` is on the first rank."""
    key, endpoint, public_key = store.get("moe-trm/controller").decode().split(" ")
    data = (learner.data_rank, learner.data_size)

    def watch(states: Sequence[ServerState]) -> None:
        for sink in sinks:
            sink.servers(states)

    return RolloutClient(
        endpoint,
        key,
        ranks=ranks,
        data=data,
        process=process,
        public_key=public_key,
        watch=watch if sinks else None,
    )


def build_pusher(
    config: Config, store: Store, rank: int, learner: Learner, rollouts: RolloutClient, run_dir: Path, host: Host
) -> Pusher:
    """The pusher of weights to the engine: through `sync.dir`, or by broadcast from this machine to an engine that
    takes broadcasts. A recording takes none, and would let the ranks wait.

    Without `sync.dir` pushes go through shared memory where there is one. Ranks on several machines share the run's
    folder.
    """
    rounding = rounding_of(config.rollout, config.train, config.seed)
    if config.sync.method == "distributed" and config.rollout.traits.takes_broadcasts:
        return BroadcastPusher(learner, rollouts, rank=rank, address=host.address, rounding=rounding)
    shared = Path("/dev/shm")
    root = Path(config.sync.dir) if config.sync.dir else shared if host.alone and shared.is_dir() else run_dir
    if rank == 0:
        if root == shared:
            remove_abandoned(root, config.name)
        store.set("moe-trm/pushes", str(root / f"moe-trm-{os.getpid()}-{config.name}"))
    return DiskPusher(learner, rollouts, Path(store.get("moe-trm/pushes").decode()), rounding)


def remove_abandoned(root: Path, name: str) -> None:
    """Free what runs of this name on this machine pushed under `root` and could not remove because they were killed."""
    for folder in root.glob(f"moe-trm-*-{name}"):
        owner = folder.name.removeprefix("moe-trm-").removesuffix(f"-{name}")
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
