"""Folders and files of one user: who may touch them, and what becomes of those whose process was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_trm.errors import ConfigError, RunError
from moe_trm.observe.sinks import JsonLines
from moe_trm.rollout.access import Access, await_access, giving
from moe_trm.runtime import private
from moe_trm.runtime.lock import held_alone
from moe_trm.runtime.private import (
    OWNER,
    Scratch,
    append_private,
    private_folder,
    read_private,
    remove_abandoned,
    write_private,
)

MAKES_ONE = """
import os, sys
from pathlib import Path
from moe_trm.runtime.private import Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.path / "v000000").mkdir()
(scratch.path / "v000000" / "weights").write_text("many")
for path in sys.argv[2:]:
    scratch.adopt(Path(path))
print(scratch.path, flush=True)
sys.stdin.read()
"""


def owner_of_one(folder: Path, *adopted: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a `Scratch` in `folder`, and the path of that."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE, str(folder), *map(str, adopted)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_nobody_else_reads_it_and_it_goes_with_its_block(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))
    with Scratch(tmp_path / "new") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
        assert os.umask(before) == before
    assert not list((tmp_path / "new").iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_lives_is_not(tmp_path: Path) -> None:
    stray, kept = tmp_path / "stray", tmp_path / "kept"
    for path in (stray, kept):
        path.write_text("x")
    killed, left = owner_of_one(tmp_path, stray)
    living, used = owner_of_one(tmp_path, kept)
    killed.kill()
    killed.communicate()
    assert left.exists()
    with Scratch(tmp_path):
        assert not left.exists()
        assert not stray.exists()
        assert (used / "v000000" / "weights").exists()
        assert kept.exists()
    living.communicate("")


def test_another_pid_namespace_is_no_reason_to_remove_what_lives(tmp_path: Path) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a pid namespace")
    living, used = owner_of_one(tmp_path)
    sweep = "import pathlib, sys; from moe_trm.runtime.private import remove_abandoned as sweep; "
    sweep += "sweep(pathlib.Path(sys.argv[1]))"
    subprocess.run([*apart, sys.executable, "-c", sweep, str(tmp_path)], check=True)
    assert (used / "v000000" / "weights").exists()
    living.kill()
    living.communicate()
    subprocess.run([*apart, sys.executable, "-c", sweep, str(tmp_path)], check=True)
    assert not used.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Neither one of the right name, nor one in a folder that is removed, nor one in place of the owner's file."""
    precious, place = tmp_path / "precious", tmp_path / "place"
    (precious / "inner").mkdir(parents=True)
    (precious / OWNER).write_text(private._machine() + "\n")
    place.mkdir()
    (place / "moe-trm-link").symlink_to(precious)
    (place / "moe-trm-owner").mkdir(mode=0o700)
    (place / "moe-trm-owner" / OWNER).symlink_to(precious / OWNER)
    scratch = Scratch(place)
    (scratch.path / "link").symlink_to(precious)
    (scratch.path / "inner").mkdir()
    (scratch.path / "inner" / "link").symlink_to(precious)
    scratch.adopt(place / "moe-trm-link")
    scratch.remove()
    assert not scratch.path.exists()
    assert sorted(path.name for path in precious.iterdir()) == [OWNER, "inner"]
    assert sorted(path.name for path in place.iterdir()) == ["moe-trm-link", "moe-trm-owner"]


def test_a_folder_that_took_its_place_is_not_emptied(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    (scratch.path / "weights").write_text("x")
    scratch.path.rename(tmp_path / "aside")
    scratch.path.mkdir()
    (scratch.path / "precious").write_text("x")
    scratch.remove()
    assert (scratch.path / "precious").exists()
    assert not list((tmp_path / "aside").iterdir())


def test_what_another_machine_or_nobody_owns_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moe-trm-data").mkdir(mode=0o700)
    monkeypatch.setattr(private, "_BOOT_ID", tmp_path / "boot")
    (tmp_path / "boot").write_text("there")
    killed, left = owner_of_one(tmp_path)
    killed.kill()
    killed.communicate()
    remove_abandoned(tmp_path)
    assert left.exists()
    assert (tmp_path / "moe-trm-data").exists()


def test_a_folder_that_cannot_be_made_is_a_clear_refusal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        Scratch(tmp_path / "file" / "below")


def test_a_run_folder_is_for_its_user_and_stays_open_to_readers_who_were_let_in(tmp_path: Path) -> None:
    assert private_folder(tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o775)
    assert private_folder(tmp_path / "open").stat().st_mode & 0o777 == 0o755
    (tmp_path / "open" / "file").touch()
    assert private_folder(tmp_path / "open").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_others_could_fill_is_refused(tmp_path: Path) -> None:
    """A link that somebody planted there would lead a write elsewhere."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").symlink_to(tmp_path / "precious")
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"(?s)mode 777, with \.lock.*chmod -R go-w"):
        private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o777, "a second try is refused too"
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="mode 770"):
        private_folder(folder)


@pytest.mark.parametrize("link", ["symbolic", "dangling", "hard"])
def test_what_is_written_into_a_run_folder_follows_no_link(tmp_path: Path, link: str) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "run"
    folder.mkdir()
    if link != "dangling":
        precious.write_text("mine")
    for name in (".lock", "metrics.jsonl", "servers.jsonl", "report.html", "choices.json"):
        if link == "hard":
            (folder / name).hardlink_to(precious)
        else:
            (folder / name).symlink_to(precious)
    with pytest.raises(RunError, match="is not its own"), held_alone(folder / ".lock", "works here"):
        pass
    with pytest.raises(RunError, match="is not its own"):
        JsonLines(folder / "metrics.jsonl")
    with pytest.raises(RunError, match="is not its own"):
        append_private(folder / "servers.jsonl")
    write_private(folder / "report.html", b"new")
    assert not (folder / "report.html").is_symlink()
    assert precious.exists() == (link != "dangling")
    assert link == "dangling" or precious.read_text() == "mine"


def test_a_file_of_another_user_is_not_appended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with append_private(tmp_path / "log") as log:
        log.write(b"first")
    with append_private(tmp_path / "log") as log:
        assert log.tell() == 5
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    monkeypatch.setattr(Path, "stat", lambda path: os.stat_result((0o40700, 0, 0, 1, uid + 1, 0, 0, 0, 0, 0)))
    with pytest.raises(RunError, match=f"a file of user {uid}"):
        append_private(tmp_path / "log")


def test_a_private_file_is_refused_once_others_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_private(path, b"old")
    write_private(path, b"new")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_private(path) == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    path.chmod(0o640)
    with pytest.raises(PermissionError):
        read_private(path)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        read_private(path)


def test_a_rank_waits_for_the_file_of_its_own_attempt(tmp_path: Path) -> None:
    def of(attempt: str) -> Access:
        return Access(attempt=attempt, endpoint="ipc:///x", key="secret", public_key="", pushes="/p")

    with pytest.raises(ConfigError, match="share"):
        await_access(tmp_path, "second", wait_s=0.0)
    with giving(tmp_path, of("first")), pytest.raises(ConfigError, match="another attempt"):
        await_access(tmp_path, "second", wait_s=0.0)
    with giving(tmp_path, of("first")), giving(tmp_path, of("second")):
        assert await_access(tmp_path, "second", wait_s=0.0) == of("second")
    assert not list(tmp_path.iterdir())
