"""A disk without room, where weights are pushed or exported to: said in the user's terms, never as a traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from launch.learner import export
from moe_trm.errors import CheckpointError, SyncError
from moe_trm.sync.disk import finish_push, write_buckets, write_shard
from moe_trm.sync.rounding import Rounding
from tests.unit.doubles import StandInLearner

TENSORS = [(f"tensor.{number}", torch.ones(64)) for number in range(3)]
FULL = Path("/dev/full")


@pytest.mark.parametrize("lot_bytes", [1, 1 << 20])
def test_a_push_that_finds_no_room_says_where(tmp_path: Path, lot_bytes: int) -> None:
    """By its own thread or another."""
    (tmp_path / "rank.safetensors").symlink_to(FULL)
    with pytest.raises(SyncError, match=r"cannot be written(.|\n)*No space left(.|\n)*sync\.dir") as told:
        write_buckets(tmp_path, "rank", TENSORS, Rounding("float32"), lot_bytes=lot_bytes)
    assert str(tmp_path) in str(told.value)
    assert told.value.may_pass
    with pytest.raises(SyncError, match="No space left"):
        write_shard(tmp_path / "rank.safetensors", TENSORS, Rounding("float32"))


def test_a_push_that_cannot_be_completed_says_where(tmp_path: Path) -> None:
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "v000001"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    entries = write_shard(folder / "rank.safetensors", TENSORS, Rounding("float32"))
    (folder / "push.json.partial").symlink_to(FULL)
    with pytest.raises(SyncError, match="No space left"):
        finish_push(str(folder), entries, 1, str(checkpoint))


def test_final_weights_that_find_no_room_are_told(tmp_path: Path) -> None:
    class Learner(StandInLearner):
        def export_checkpoint(self, directory: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="final weights cannot be written") as told:
        export(Learner(), tmp_path / "final")
    assert str(tmp_path / "final") in str(told.value)
    assert "No space left" in str(told.value)
