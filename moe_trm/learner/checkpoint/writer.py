"""Checkpoint writing in the background: host copies are taken at once, a thread of every rank writes the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from moe_trm.learner.checkpoint.folder import STATE_FILE, CheckpointFolder, FileEntry, entry_of, rank_file
from moe_trm.learner.checkpoint.peers import Peers
from moe_trm.learner.checkpoint.pieces import Piece, write_pieces


class Written(msgspec.Struct):
    """Message of one rank to the others: its files, or the reason why it has none."""

    files: dict[str, FileEntry] = {}
    error: str = ""


@dataclass(frozen=True)
class Contents:
    """One rank's part of a checkpoint, all of it in host memory. `state` is there on the first rank only."""

    step: int
    pieces: Sequence[Piece]
    state: bytes | None
    config: Mapping[str, Any] = field(default_factory=dict)


class BackgroundWriter:
    """Writes one checkpoint at a time; every rank has one and starts the same checkpoints. The newest `keep` stay.

    A checkpoint that any rank could not write is removed again. All ranks must see `folder`. `peers` are used by the
    thread alone.
    """

    def __init__(self, folder: CheckpointFolder, peers: Peers, keep: int) -> None:
        self._folder, self._peers, self._keep = folder, peers, keep
        # One thread for all checkpoints: glibc gives a new thread another arena, and each would keep what a checkpoint
        # took.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[str] | None = None

    def start(self, contents: Contents) -> None:
        """Begin to write. The checkpoint before must have been waited for."""
        assert self._writing is None, "wait for the checkpoint before"
        self._writing = self._thread.submit(self._run, contents)

    def wait(self) -> str:
        """Wait until the checkpoint in progress is complete; why it failed, or an empty text."""
        writing, self._writing = self._writing, None
        return "" if writing is None else writing.result()

    def _run(self, contents: Contents) -> str:
        try:
            return self._write_together(contents)
        except RuntimeError as error:  # what the collectives raise when another rank is gone
            return str(error)

    def _write_together(self, contents: Contents) -> str:
        """Write on every rank, then complete the checkpoint on the first; the same outcome everywhere."""
        result = Written()
        try:
            result = Written(self._write(contents))
        except (OSError, SafetensorError) as error:
            result = Written(error=f"rank {self._peers.rank}: {error}")
        everyone = [
            msgspec.json.decode(message, type=Written) for message in self._peers.gather(msgspec.json.encode(result))
        ]
        failure = next((message.error for message in everyone if message.error), "")
        if self._peers.rank == 0:
            try:
                if failure:
                    self._folder.discard(contents.step)
                else:
                    self._complete(contents, everyone)
            except OSError as error:
                failure = f"rank 0: {error}"
        return self._peers.gather(failure.encode())[0].decode()

    def _write(self, contents: Contents) -> dict[str, FileEntry]:
        folder = self._folder.partial(contents.step)
        writers: dict[str, Callable[[Path], object]] = {
            rank_file(self._peers.rank): lambda path: write_pieces(path, contents.pieces)
        }
        if contents.state is not None:
            state = contents.state
            writers[STATE_FILE] = lambda path: path.write_bytes(state)
        for name, write in writers.items():
            write(folder / name)
        return {name: entry_of(folder / name) for name in writers}

    def _complete(self, contents: Contents, everyone: Sequence[Written]) -> None:
        files = {name: entry for result in everyone for name, entry in result.files.items()}
        self._folder.commit(contents.step, files, contents.config)
        self._folder.keep_last(self._keep)
