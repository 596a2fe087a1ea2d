"""Checkpoints of one process with a learner of one tensor: complete or absent, verified, the newest valid one used."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError
from moe_trm.learner.checkpoint import folder as folder_module
from moe_trm.learner.checkpoint import resumption
from moe_trm.learner.checkpoint.folder import CheckpointFolder, rank_file, read_manifest
from moe_trm.learner.checkpoint.peers import Peers
from moe_trm.learner.checkpoint.pieces import Piece, PieceReader, whole, write_pieces
from moe_trm.learner.checkpoint.resumption import Checkpoints
from moe_trm.learner.checkpoint.writer import BackgroundWriter, Contents
from moe_trm.runtime.interruption import Interruption

T = TypeVar("T")


class TinyLearner:
    """One tensor that says which step it is at."""

    def __init__(self, value: float = 0.0) -> None:
        self.weight, self.exports = torch.full((3,), value), list[str]()

    def state(self) -> tuple[list[Piece], Mapping[str, int]]:
        return [whole("weight", self.weight)], {"optimizer_steps": int(self.weight[0])}

    def restore(self, reader: PieceReader, counters: Mapping[str, int]) -> None:
        self.weight = reader.read("weight", (3,))
        assert counters == {"optimizer_steps": int(self.weight[0])}

    def export_checkpoint(self, directory: str) -> None:
        Path(directory).mkdir(parents=True)
        self.exports.append(directory)


def settings(**checkpoint: object) -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": "unused"},
            "rollout": {"api_key": "very secret"},
            "train": {"steps": 10},
            "checkpoint": {"every": 2, "keep": 2, **checkpoint},
        }
    )


def open_checkpoints(
    run_dir: Path, interruption: Interruption | None = None, *, restarted: bool = False, **checkpoint: object
) -> Checkpoints:
    return Checkpoints(settings(**checkpoint), run_dir, interruption or Interruption(), restarted=restarted)


def train(checkpoints: Checkpoints, learner: TinyLearner, last: int) -> None:
    for step in range(checkpoints.first_step + 1, last + 1):
        learner.weight = torch.full((3,), float(step))
        books = {"judge": [step], "window": b"\0\1"}
        if checkpoints.end_step(step, learner, books.copy):
            break
    checkpoints.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that did six steps: its checkpoints are those of steps 4 and 6."""
    train(open_checkpoints(tmp_path), TinyLearner(), 6)
    return tmp_path


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_last_few_are_kept_and_the_newest_is_used(run_dir: Path) -> None:
    assert names(run_dir) == ["step-000004", "step-000006"]
    checkpoints, learner = open_checkpoints(run_dir), TinyLearner()
    assert checkpoints.first_step == 6
    assert checkpoints.load(learner) == {"judge": [6], "window": b"\0\1"}
    assert learner.weight.tolist() == [6, 6, 6]


def test_a_run_without_checkpoints_begins_anew(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path)
    assert checkpoints.first_step == 0
    assert checkpoints.load(TinyLearner()) is None


def test_the_last_step_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    train(open_checkpoints(tmp_path, every=7), TinyLearner(), 10)
    assert names(tmp_path) == ["step-000007", "step-000010"]


def test_no_rank_goes_on_before_the_first_has_the_books_of_this_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's request for the next step's samples must not change the controller's state in the checkpoint."""
    happened: list[str] = []
    meet = Peers.gather

    def noted(what: str, value: T) -> T:
        happened.append(what)
        return value

    monkeypatch.setattr(Peers, "gather", lambda self, message: meet(self, noted("met", message)))
    checkpoints, learner = open_checkpoints(tmp_path, every=1), TinyLearner()
    weights = learner.state()
    monkeypatch.setattr(learner, "state", lambda: noted("weights", weights))
    happened.clear()
    checkpoints.end_step(1, learner, lambda: noted("books", dict[str, object]()))
    checkpoints.close()
    assert happened[:3] == ["books", "met", "weights"]


def test_no_interval_no_checkpoint(tmp_path: Path) -> None:
    train(open_checkpoints(tmp_path, every=0), TinyLearner(), 10)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        open_checkpoints(tmp_path)


@pytest.mark.parametrize(("first", "stopped"), [(1, "step-000001"), (10, None)])
def test_a_request_to_stop_ends_the_run_with_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int, stopped: str | None
) -> None:
    """In the last step it has ended anyway, and nothing goes on."""
    interruption = Interruption()
    checkpoints = open_checkpoints(tmp_path, interruption, every=0)
    checkpoints.first_step = first - 1
    interruption.requested = "SIGTERM"
    train(checkpoints, TinyLearner(), 10)
    assert checkpoints.interrupted == (stopped is not None)
    assert names(tmp_path) == ([stopped] if stopped else [])
    assert ("goes on from" in capsys.readouterr().out) == checkpoints.interrupted


def test_a_request_to_stop_during_a_checkpoint_leaves_two_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was being written is finished; the next step is made and saved, and nothing after it."""
    interruption, learner = Interruption(), TinyLearner()
    checkpoints, state = open_checkpoints(tmp_path, interruption, every=2), learner.state

    def asked() -> tuple[list[Piece], Mapping[str, int]]:
        interruption.requested = "SIGTERM"
        return state()

    monkeypatch.setattr(learner, "state", asked)
    train(checkpoints, learner, 10)
    assert checkpoints.interrupted
    assert names(tmp_path) == ["step-000002", "step-000003"]
    again = open_checkpoints(tmp_path)
    assert again.first_step == 3
    assert again.load(TinyLearner()) == {"judge": [3], "window": b"\0\1"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_file_of_a_checkpoint_is_verified_by_one_rank(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The ranks share the files, and together they look at all of them."""
    checkpoints, shares = open_checkpoints(run_dir), list[Sequence[str]]()
    monkeypatch.setattr(resumption, "verify", lambda path, manifest, names: shares.append(names))
    monkeypatch.setattr(checkpoints._peers, "size", size)
    path = run_dir / "checkpoints" / "step-000006"
    for rank in range(size):
        monkeypatch.setattr(checkpoints._peers, "rank", rank)
        checkpoints._verified(path)
    checkpoints.close()
    assert sorted(name for share in shares for name in share) == sorted(read_manifest(path).files)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def flip_a_byte(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut_short(path: Path) -> None:
    file = path / "state.msgpack"
    file.write_bytes(file.read_bytes()[:-1])


def lose_a_file(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def edit_the_manifest(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"step": 5}))


def link_a_file(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    file.rename(path / "elsewhere")
    file.symlink_to(path / "elsewhere")


DAMAGE = [flip_a_byte, cut_short, lose_a_file, lose_the_manifest, edit_the_manifest, link_a_file]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    run_dir: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(run_dir / "checkpoints" / "step-000006")
    checkpoints, learner = open_checkpoints(run_dir), TinyLearner()
    assert checkpoints.first_step == 4
    checkpoints.load(learner)
    assert learner.weight.tolist() == [4, 4, 4]
    assert "checkpoint skipped" in caplog.text
    assert names(run_dir) == ["step-000004", "superseded"]
    train(checkpoints, learner, 6)
    assert open_checkpoints(run_dir).first_step == 6


def test_when_all_are_damaged_the_run_does_not_begin_anew_by_itself(run_dir: Path) -> None:
    for path in (run_dir / "checkpoints").iterdir():
        flip_a_byte(path)
    with pytest.raises(CheckpointError, match="2 that are damaged"):
        open_checkpoints(run_dir)
    assert open_checkpoints(run_dir, resume="never").first_step == 0


def test_never_sets_what_is_there_aside(run_dir: Path) -> None:
    checkpoints = open_checkpoints(run_dir, resume="never")
    assert checkpoints.first_step == 0
    assert names(run_dir) == ["superseded"]
    train(checkpoints, TinyLearner(), 2)
    assert names(run_dir) == ["step-000002", "superseded"]


def test_a_path_goes_on_from_there_and_sets_later_ones_aside(run_dir: Path) -> None:
    checkpoints, learner = open_checkpoints(run_dir, resume=str(run_dir / "checkpoints" / "step-000004")), TinyLearner()
    checkpoints.load(learner)
    assert learner.weight.tolist() == [4, 4, 4]
    assert names(run_dir) == ["step-000004", "superseded"]
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        open_checkpoints(run_dir, resume=str(run_dir / "nowhere"))


def test_restarted_ranks_go_on_whatever_the_run_began_with(run_dir: Path) -> None:
    assert open_checkpoints(run_dir, resume="never", restarted=True).first_step == 6


def test_half_a_checkpoint_is_not_one(run_dir: Path) -> None:
    newest = run_dir / "checkpoints" / "step-000006"
    newest.rename(newest.with_name("step-000006.partial"))
    assert open_checkpoints(run_dir).first_step == 4
    assert names(run_dir) == ["step-000004"]


def test_settings_of_another_runs_checkpoint_are_at_hand(run_dir: Path, tmp_path: Path) -> None:
    assert open_checkpoints(run_dir).branched is None
    own = run_dir / "checkpoints" / "step-000004"
    assert open_checkpoints(tmp_path / "other", resume=str(own)).branched == settings().dump()
    assert open_checkpoints(run_dir, resume=str(own)).branched is None


def test_a_full_disk_leaves_the_run_and_older_checkpoints_alone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, learner = open_checkpoints(run_dir), TinyLearner(6)

    def full(path: Path) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moe_trm.learner.checkpoint.writer.entry_of", full)
    train(checkpoints, learner, 10)
    assert names(run_dir) == ["step-000004", "step-000006"]
    assert "No space left on device" in caplog.text
    monkeypatch.undo()
    assert open_checkpoints(run_dir).first_step == 6


@pytest.mark.parametrize(("asked", "exports"), [("SIGTERM", True), ("", False)])
def test_a_run_whose_last_state_could_not_be_saved_does_not_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, asked: str, exports: bool
) -> None:
    """Asked to stop, or with nothing written after it."""

    def full(path: Path) -> object:
        raise OSError(28, "No space left on device")

    config = settings()
    config = config.model_copy(update={"train": config.train.model_copy(update={"export": exports, "steps": 10})})
    interruption = Interruption()
    checkpoints = Checkpoints(config, tmp_path, interruption)
    interruption.requested = asked
    monkeypatch.setattr("moe_trm.learner.checkpoint.writer.entry_of", full)
    with pytest.raises(CheckpointError, match=r"(?s)could not be saved.*No space left"):
        train(checkpoints, TinyLearner(), 10)


def test_a_step_that_was_undone_leaves_what_was_reached_before_it(tmp_path: Path) -> None:
    checkpoints, learner = open_checkpoints(tmp_path, every=3), TinyLearner()
    for step in range(1, 6):
        learner.weight = torch.full((3,), float(step))
        assert not checkpoints.end_step(step, learner, lambda: {"judge": [step]})  # noqa: B023 (called at once)
    checkpoints.end_undone(5, learner, lambda: {"judge": [5]})
    checkpoints.close()
    assert checkpoints.interrupted
    assert names(tmp_path)[-1] == "step-000005"
    resumed = open_checkpoints(tmp_path)
    assert (resumed.first_step, resumed.load(learner)) == (5, {"judge": [5]})
    resumed.end_undone(5, learner, dict[str, object])
    resumed.close()
    assert open_checkpoints(tmp_path).load(learner) == {"judge": [5]}, "nothing new is saved where nothing was reached"


def test_every_rank_stops_where_one_of_them_was_asked_by_its_controller(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, every=0)
    assert checkpoints.end_step(4, TinyLearner(4), dict[str, object], leaving=True)
    checkpoints.close()
    assert names(tmp_path) == ["step-000004"]


class Threads(Peers):
    """One of two ranks that are threads of this process."""

    def __init__(self, rank: int, meet: threading.Barrier, told: list[bytes]) -> None:
        self.rank, self.size, self._meet, self._told = rank, 2, meet, told

    def gather(self, message: bytes) -> list[bytes]:
        self._told[self.rank] = message
        self._meet.wait(60)
        everyone = [*self._told]
        self._meet.wait(60)
        return everyone


@pytest.mark.parametrize("full", [None, 0, 1])
def test_a_checkpoint_that_any_rank_could_not_write_is_removed_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int | None
) -> None:
    def write(path: Path, pieces: Sequence[Piece]) -> None:
        if full is not None and path.name == rank_file(full):
            raise OSError(28, "No space left on device")
        write_pieces(path, pieces)

    monkeypatch.setattr("moe_trm.learner.checkpoint.writer.write_pieces", write)
    meet, told, folder = threading.Barrier(2), [b"", b""], CheckpointFolder(tmp_path)
    folder.begin_after(0)
    ranks = [BackgroundWriter(folder, Threads(rank, meet, told), keep=2) for rank in range(2)]
    for rank, writer in enumerate(ranks):
        writer.start(Contents(2, [whole(f"weight{rank}", torch.ones(3))], None if rank else b"books"))
    said = [writer.wait() for writer in ranks]
    if full is None:
        assert said == ["", ""]
        assert set(read_manifest(folder.path(2)).files) == {rank_file(0), rank_file(1), "state.msgpack"}
    else:
        assert said[0] == said[1]
        assert f"rank {full}" in said[0]
        assert folder.steps() == []
        assert not any(tmp_path.iterdir())


def test_exports_appear_whole(tmp_path: Path) -> None:
    learner = TinyLearner()
    train(open_checkpoints(tmp_path, every=0, export_every=5), learner, 10)
    assert names(tmp_path) == ["hf-000005", "hf-000010"]
    assert [Path(directory).name for directory in learner.exports] == ["hf-000005.partial", "hf-000010.partial"]


@pytest.mark.parametrize("every", [0, 2])
def test_the_weights_of_a_run_that_stops_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int
) -> None:
    learner = TinyLearner()
    open_checkpoints(tmp_path, every=every).rescue(3, learner)
    assert names(tmp_path) == ["hf-000003-stopped"]
    assert "step 3 stopped are in" in capsys.readouterr().out
    nothing = TinyLearner()
    config = settings(every=0).model_copy(update={"train": settings().train.model_copy(update={"export": False})})
    Checkpoints(config, tmp_path / "kept", Interruption()).rescue(3, nothing)
    assert nothing.exports == []


def test_no_secret_is_in_a_checkpoint(run_dir: Path) -> None:
    files = [path for path in (run_dir / "checkpoints").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"manifest.json", "rank-00000.safetensors", "state.msgpack"}
    for path in files:
        assert b"very secret" not in path.read_bytes()


@pytest.mark.parametrize("name", ["../escape.safetensors", "/etc/passwd", "rank-00000.safetensors/..", "rank-1.pt", ""])
def test_a_manifest_cannot_name_files_elsewhere(run_dir: Path, name: str) -> None:
    """Even with a right checksum: the names that a checkpoint may have are fixed."""
    folder = CheckpointFolder(run_dir / "checkpoints")
    manifest = read_manifest(folder.path(6))
    shutil.copytree(folder.path(6), folder.partial(8), dirs_exist_ok=True)
    folder.commit(8, {**manifest.files, name: manifest.files["state.msgpack"]}, {})
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(folder.path(8))
    assert open_checkpoints(run_dir).first_step == 6


def test_another_format_says_so(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "FORMAT_VERSION", folder_module.FORMAT_VERSION + 1)
    with pytest.raises(CheckpointError, match="another format"):
        read_manifest(run_dir / "checkpoints" / "step-000006")


def test_a_huge_manifest_is_not_read(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "step-000006"
    os.truncate(path / "manifest.json", 1 << 30)
    with pytest.raises(CheckpointError, match="more than"):
        read_manifest(path)
