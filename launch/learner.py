"""One learner rank: its part of the model, the controller on the first rank, and the training loop."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from launch.hosts import Host, push_place
from launch.start.dry_run import try_task
from launch.start.places import check_ranks
from launch.start.preflight import check_launch, load_here
from moe_trm.config.choices import Choice, replay_mode
from moe_trm.config.schema import CheckpointConfig, Config, RolloutConfig, SyncConfig
from moe_trm.errors import REFUSED, CheckpointError, MoeTrmError
from moe_trm.learner.checkpoint.peers import Peers
from moe_trm.learner.checkpoint.resumption import Checkpoints
from moe_trm.learner.megatron.notices import silence_known_notices
from moe_trm.learner.protocol import Learner
from moe_trm.loop import train
from moe_trm.observe.build import open_sinks
from moe_trm.observe.sinks import Sink
from moe_trm.rollout.access import Access, await_access, giving
from moe_trm.rollout.client import ControllerProcess, RolloutClient
from moe_trm.rollout.credentials import api_key_for
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.run_folder.history import ALL_DONE, begin, is_done, only_trainer
from moe_trm.run_folder.run import CHOICES
from moe_trm.run_folder.run_end import LEARNER_LOCK, record_failure
from moe_trm.runtime.gloo import INTERFACE as GLOO_INTERFACE
from moe_trm.runtime.interruption import Interruption, Stopped
from moe_trm.runtime.private import Scratch, write_private
from moe_trm.step.fixed_texts import FixedTexts
from moe_trm.step.push import BroadcastPusher, DiskPusher, Pusher
from moe_trm.sync.distributed import Sender
from moe_trm.sync.rounding import rounding_of
from moe_trm.types import ServerState
from routing.errors import ReplayProofError, ReplayRefusedError, RouteError

REFUSAL_S = 5.0
"""Time in which a rank that refuses is ended by torchrun where the first one refused as well."""


def learn(config_path: str, overrides: Sequence[str], *, store: str | None = None, restarted: bool) -> int:
    """This rank from its checks to its end; its exit status, after it told what is wrong.

    `store`: the file in which the ranks meet, in place of torchrun's store; `restarted`: it replaces one that died.
    """
    interruption = Interruption()
    interruption.install()
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="%(levelname)s %(message)s")
    try:
        config, choices = load_here(config_path, overrides)
        if is_done(Path(config.run_dir) / config.name, config.dump()):
            if first:
                print(f"run {config.run_dir}/{config.name}: {ALL_DONE}", flush=True)
            return 0
        restarted = restarted or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = [lambda: check_ranks(config.rollout, ranks_here)]
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        check_launch(config, world_size=world_size, restarted=restarted, server=gpus)
        if first and not restarted:
            try_task(config)
        with alone_in_its_folders(config.checkpoint, Path(config.run_dir) / config.name, first=first):
            run(config, interruption, choices, file=store, restarted=restarted)
    except (MoeTrmError, RouteError, ReplayProofError, ReplayRefusedError) as error:
        status = error.exit_status if isinstance(error, MoeTrmError) else REFUSED
        if not (status == REFUSED and stopped_by_another_rank(interruption)):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return status
    return 0


@contextmanager
def alone_in_its_folders(checkpoint: CheckpointConfig, run_dir: Path, *, first: bool) -> Iterator[None]:
    """Inside the `with` no other run writes into the folders of this one, which its first rank holds.

    An error of the others is written down there. The first rank's sinks do that for its own.
    """
    with ExitStack() as held:
        for folder in (run_dir, *([Path(checkpoint.dir)] if checkpoint.dir else [])) if first else ():
            held.enter_context(only_trainer(folder / LEARNER_LOCK))
        try:
            yield
        except BaseException as error:
            if not first and not isinstance(error, Stopped):
                record_failure(run_dir, error, rank=int(os.environ["RANK"]))
            raise


def stopped_by_another_rank(interruption: Interruption) -> bool:
    """True when torchrun ends this rank because another one has refused, which then has said why.

    All ranks refuse the same configuration. The first of each machine says so at once; the others wait a little.
    """
    if not dist.is_torchelastic_launched() or os.environ.get("LOCAL_RANK", "0") == "0":
        return False
    deadline = time.monotonic() + REFUSAL_S
    while not interruption.requested and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(interruption.requested)


def run(
    config: Config,
    interruption: Interruption,
    choices: Sequence[Choice] = (),
    *,
    file: str | None = None,
    restarted: bool = False,
) -> None:
    """One rank's life: rendezvous, learner, controller, loop.

    `choices`: what `auto` became, to be told; `file`, `restarted`: see `learn`.
    """
    silence_known_notices()
    from moe_trm.learner.build import build_learner  # imports Megatron-Core, which gives its notices

    host = Host.here()
    store, rank, world_size = meet(host, file)
    host = host.seen_by_others(store)
    if GLOO_INTERFACE not in os.environ:  # by itself gloo takes the address of the hostname, which others may not reach
        os.environ[GLOO_INTERFACE] = host.interface
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=world_size
    )
    torch.manual_seed(config.seed)
    mode, _ = replay_mode(config.learner, config.replay, config.pipeline, config.correction)
    run_dir = Path(config.run_dir) / config.name
    checkpoints = Checkpoints(config, run_dir, interruption, restarted=restarted)
    with ExitStack() as watched, ExitStack() as stack:
        sinks: list[Sink] = []
        process: ControllerProcess | None = None
        attempt = secrets.token_hex(16)
        if rank == 0:
            first_step = checkpoints.first_step
            changes = begin(run_dir, config.dump(), first_step=first_step, branched=checkpoints.branched)
            made = json.dumps([asdict(choice) for choice in choices], indent=2)
            write_private(run_dir / CHOICES, f"{made}\n".encode())
            sinks = watched.enter_context(open_sinks(config, run_dir, first_step=first_step))
            print(f"run {run_dir}: {world_size} learner rank{'s' * (world_size > 1)}, replay {mode}", flush=True)
            for choice in choices:
                print(f"  {choice.key}: {choice}", flush=True)
            for change in changes:
                print(f"  changed after step {first_step}: {change}", flush=True)
            pushes = push_folder(config.sync, config.rollout, run_dir, host)
            if pushes is not None:
                stack.callback(pushes.remove)
            # It imports for some seconds, and waits for the servers, while the learner is built.
            key, address = api_key_for(config.rollout), None if host.alone else host.address
            process = ControllerProcess(config, key, run_dir / "controller.log", address=address)
            stack.callback(process.wait, 0.0)
            stack.enter_context(giving(run_dir, process.access(attempt, pushes)))
        attempt = Peers().gather(attempt.encode())[0].decode()
        learner = build_learner(config)
        access = await_access(run_dir, attempt)
        client = connect(
            access, (rank, world_size), learner, process, sinks, interruption=interruption, streams=config.parts > 1
        )
        rollouts = stack.enter_context(client)
        # Servers may take longer to load than a collective of the ranks may: so every rank waits here.
        rollouts.begin()
        pusher = build_pusher(config, rank, learner, rollouts, access, host)
        stack.callback(checkpoints.close)
        with ExitStack() as proved:
            if config.exact:
                from launch.start import bisect
                from moe_trm.rollout.servers.backend import Served

                served = partial(bisect.served_states, Served.of(config))
                proved.enter_context(bisect.naming_the_cause(learner, served))
            train(config, learner, rollouts, pusher, sinks, checkpoints, mode=mode, run_dir=run_dir)
        stack.close()
        if config.train.export and not checkpoints.interrupted:
            export(learner, run_dir / "checkpoints" / "final")
    dist.destroy_process_group()


def export(learner: Learner, folder: Path) -> None:
    """The final weights as a Hugging Face folder. Raises `CheckpointError` where it cannot be written."""
    try:
        learner.export_checkpoint(str(folder))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the final weights cannot be written",
            where=str(folder),
            got=str(error),
            expected="room for a Hugging Face checkpoint of the model",
            fix="Make room there. After a checkpoint of the last step the same command only exports, and "
            "`moe-trm export` makes the same folder elsewhere.",
        ) from error


def meet(host: Host, file: str | None) -> tuple[Store, int, int]:
    """The store of the ranks, this rank and their number, as torchrun says: in `file`, or in torchrun's own store."""
    if file is not None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return FileStore(file, world_size), rank, world_size
    store, rank, world_size = next(iter(rendezvous("env://")))
    if host.alone:
        # torchrun gives restarted ranks the store of those that died, with their addresses still in it.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store, rank, world_size


def connect(
    access: Access,
    ranks: tuple[int, int],
    learner: Learner,
    process: ControllerProcess | None,
    sinks: Sequence[Sink],
    *,
    interruption: Interruption,
    streams: bool,
) -> RolloutClient:
    """This rank's client of the controller, which `process` is on the first rank."""

    def watch(states: Sequence[ServerState]) -> None:
        for sink in sinks:
            sink.servers(states)

    return RolloutClient(
        access.endpoint,
        access.key,
        ranks=ranks,
        data=(learner.data_rank, learner.data_size),
        process=process,
        public_key=access.public_key,
        watch=watch if sinks else None,
        asked=lambda: interruption.requested,
        streams=streams,
    )


def push_folder(sync: SyncConfig, rollout: RolloutConfig, run_dir: Path, host: Host) -> Scratch | None:
    """The folder of the weight pushes, which the first rank makes and removes; None where they are broadcast.

    A recording takes no broadcasts, and would let the ranks wait.
    """
    if sync.method == "distributed" and rollout.traits.broadcast_receivers:
        return None
    return Scratch(push_place(sync, run_dir, on_one_host=host.alone))


def build_pusher(
    config: Config, rank: int, learner: Learner, rollouts: RolloutClient, access: Access, host: Host
) -> Pusher:
    """The pusher of weights to the engine: through files, or by broadcast from this machine."""
    rounding = rounding_of(config.rollout, config.train, config.seed)
    # The texts that prove pushes by use, where the engine scores tokens.
    rollout = config.rollout
    differs = rollout.quantization is not None or rounding.fake is not None or bool(rounding.noises)
    model = ServedModel.from_checkpoint(Path(config.model.checkpoint), pictures=config.task.has_pictures)
    interval = config.sync.prove_every if rollout.traits.scores_tokens else 0
    texts = FixedTexts(model.vocab_size, interval, scored=not differs, reserved=model.reserved)
    if not access.pushes:
        receivers = rollout.traits.broadcast_receivers - 1 + rollout.server.tensor_parallel
        sender = Sender(f"moe-trm-rank-{rank}", host.address, receivers)
        return BroadcastPusher(learner, rollouts, sender, rounding, texts, colocated=rollout.colocate)
    return DiskPusher(learner, rollouts, Path(access.pushes), rounding, texts, colocated=rollout.colocate)
