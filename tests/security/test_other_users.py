"""Another user of the machine reads no key, names no folder that is deleted, and changes no weights."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from launch.hosts import Host
from launch.job import learner_environment
from launch.learner import push_folder
from moe_trm.config.schema import Config, RolloutConfig, SyncConfig
from moe_trm.errors import ConfigError
from moe_trm.rollout.access import FILE, Access, await_access, giving
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.sglang.launch import launched
from moe_trm.runtime.private import OWNER, Scratch, _machine, private_folder
from moe_trm.sync.disk import finish_push, write_shard
from moe_trm.sync.distributed import Sender
from moe_trm.sync.rounding import Rounding
from tests.security.conftest import STRANGER, Stranger

HERE = Host(alone=True, address="127.0.0.1")
READ = "print(open(sys.argv[1]).read())"


def push_into(folder: Path, checkpoint: Path) -> None:
    """A whole push, as ranks and controller make it."""
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    shard = write_shard(folder / "v000000" / "rank.safetensors", [("weight", torch.ones(4))], Rounding("float32"))
    finish_push(str(folder / "v000000"), shard, 0, str(checkpoint))


def test_the_access_to_the_controller_is_for_its_user(commons: Path, stranger: Stranger) -> None:
    """In a place where everybody may make files, as an experiment in /tmp is."""
    run_dir = private_folder(commons / "run")
    access = Access(attempt="1", endpoint="ipc:///x", key=secrets.token_hex(16), public_key="", pushes="/p")
    with giving(run_dir, access):
        for opened_by_the_user in (False, True):
            if opened_by_the_user:
                run_dir.chmod(0o755)
            assert stranger(READ, run_dir / FILE) == "PermissionError"
            assert stranger("os.replace(sys.argv[1], sys.argv[1] + '.old')", run_dir / FILE) == "PermissionError"
            assert await_access(run_dir, "1", wait_s=0.0) == access


def test_a_forged_access_is_not_believed(commons: Path, stranger: Stranger) -> None:
    """Where the folder is open to others against all advice: a file of theirs is not read."""
    run_dir, precious = commons / "run", commons / "precious"
    for folder in (run_dir, precious):
        folder.mkdir()
    run_dir.chmod(0o777)
    forged = f'{{"attempt":"1","endpoint":"tcp://x","key":"k","public_key":"","pushes":"{precious}"}}'
    forge = (
        "f = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600); os.write(f, sys.argv[2].encode()); print('made')"
    )
    assert stranger(forge, run_dir / FILE, forged) == "made"
    with pytest.raises(ConfigError, match=f"user {STRANGER}"):
        await_access(run_dir, "1", wait_s=0.0)


def test_a_run_folder_that_others_made_is_refused(commons: Path, stranger: Stranger) -> None:
    assert stranger("os.mkdir(sys.argv[1]); print('made')", commons / "run") == "made"
    with pytest.raises(ConfigError, match="another user"):
        private_folder(commons / "run")


def test_prepared_folders_and_links_lead_a_push_nowhere(commons: Path, stranger: Stranger) -> None:
    keys = commons / "authorized_keys"
    keys.write_text("mine")
    keys.chmod(0o600)
    prepare = """
place, target, owner, machine, pid = sys.argv[1:]
for name in (f"moe-trm-{pid}-run", "moe-trm-run", "moe-trm-12345678"):
    os.makedirs(f"{place}/{name}/v000000")
    os.symlink(target, f"{place}/{name}/v000000/config.json.partial")
    open(f"{place}/{name}/{owner}", "w").write(machine)
os.symlink(os.path.dirname(target), f"{place}/moe-trm-link")
print("made")
"""
    assert stranger(prepare, commons, keys, OWNER, _machine(), os.getpid()) == "made"
    before = {path.name for path in commons.iterdir()}
    folder = push_folder(SyncConfig(dir=str(commons)), RolloutConfig(), commons, HERE)
    assert folder is not None
    push_into(folder.path, commons / "checkpoint")
    assert keys.read_text() == "mine"
    # While it is there nobody else sees the weights, or puts others in their place.
    assert stranger("print(os.listdir(sys.argv[1]))", folder.path) == "PermissionError"
    assert stranger("os.rename(sys.argv[1], sys.argv[1] + 'x')", folder.path) == "PermissionError"
    assert stranger("open(sys.argv[1] + '/v000000/rank.safetensors', 'w')", folder.path) == "PermissionError"
    folder.remove()
    # What is not ours stays, and so does everything that a link of theirs leads to.
    assert {path.name for path in commons.iterdir()} == before | {"checkpoint"}


def test_a_folder_that_was_swapped_is_not_what_is_deleted(commons: Path, stranger: Stranger) -> None:
    """In a folder without the sticky bit others may move ours away. What they put there instead stays."""
    place, precious = commons / "open", commons / "precious"
    for folder in (place, precious):
        folder.mkdir(mode=0o700)
    (precious / "data").write_text("mine")
    place.chmod(0o777)
    scratch = Scratch(place)
    (scratch.path / "weights").write_text("x")
    swap = "os.rename(sys.argv[1], sys.argv[1] + 'x'); os.symlink(sys.argv[2], sys.argv[1]); print('swapped')"
    assert stranger(swap, scratch.path, precious) == "swapped"
    scratch.remove()
    assert (precious / "data").read_text() == "mine"


def test_the_key_of_a_server_is_in_no_file_that_others_read(commons: Path, stranger: Stranger) -> None:
    (commons / "config.json").write_text("{}")
    config = Config.model_validate({"model": {"checkpoint": str(commons)}, "rollout": {"server": {"device": "cpu"}}})
    with Scratch(commons) as folder, launched(Served.of(config), 1, "the key", folder) as launch:
        assert "the key" not in " ".join([*launch.command, *launch.environment.values()])
        file = launch.command[launch.command.index("--config") + 1]
        assert "the key" in Path(file).read_text()
        assert stranger(READ, file) == "PermissionError"
        # SGLang's sockets and files without a name of their own.
        assert launch.environment["TMPDIR"] == str(folder)


RANKS = """
import sys
from launch.ranks import launch
launch(2, ["-c", sys.argv[1]], 0)
"""
RANK = """
import sys, time
import torch.distributed as dist
from launch.hosts import Host
from launch.learner import meet
store, rank, size = meet(Host.here(), sys.argv[sys.argv.index("--store") + 1])
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
dist.barrier()
if rank == 0:
    print(sys.argv[sys.argv.index("--store") + 1], flush=True)
time.sleep(600)
"""


def test_ranks_and_torchrun_meet_where_nobody_else_listens_or_writes(commons: Path, stranger: Stranger) -> None:
    """torchrun unpickles what it reads in its store: by its own port everybody could run code as the run's user."""
    environment = learner_environment(None) | {"TMPDIR": str(commons)}
    command = [sys.executable, "-c", RANKS, RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as ranks:
        try:
            assert ranks.stdout is not None
            store = Path(ranks.stdout.readline().strip())
            tree = [psutil.Process(ranks.pid), *psutil.Process(ranks.pid).children(recursive=True)]
            opened = [each for process in tree for each in process.net_connections("inet") if each.status == "LISTEN"]
            assert {each.laddr.ip for each in opened} <= {"127.0.0.1"}
            assert not psutil.Process(ranks.pid).net_connections("inet"), "torchrun has a store of its own"
            for file in (store, store.with_name("torchrun")):
                assert file.exists()
                assert stranger("open(sys.argv[1], 'r+')", file) == "PermissionError"
            assert [path.name for path in commons.iterdir()] == [store.parent.name]
        finally:
            for process in reversed(tree):
                process.kill()


def test_the_store_of_a_broadcast_is_not_on_the_network() -> None:
    sender = Sender("group")
    [door] = [
        each
        for each in psutil.Process().net_connections("tcp")
        if each.status == "LISTEN" and each.laddr.port == sender.meeting.port
    ]
    assert door.laddr.ip == "127.0.0.1"
