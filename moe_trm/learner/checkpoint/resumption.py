"""The loop's interface to checkpoints: where to resume, and after every step whether to save, to export or to stop."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moe_trm.config.schema import CheckpointConfig, Config
from moe_trm.errors import CheckpointError
from moe_trm.learner.checkpoint.folder import STATE_FILE, CheckpointFolder, Manifest, read_manifest, verify
from moe_trm.learner.checkpoint.peers import Peers
from moe_trm.learner.checkpoint.pieces import PieceReader
from moe_trm.learner.checkpoint.resumable import Resumable
from moe_trm.learner.checkpoint.writer import BackgroundWriter, Contents
from moe_trm.runtime.interruption import Interruption

log = logging.getLogger(__name__)

RunState = Mapping[str, Any]
"""State of everything but the learner, by part: plain data and bytes."""


class RunPart(NamedTuple):
    """A part of a run, beside the learner, that a checkpoint keeps: its state as plain data, and how it takes one."""

    state: Callable[[], Any]
    restore: Callable[[Any], None]


def capture(parts: Mapping[str, RunPart]) -> RunState:
    """The state of every part. Collective."""
    return {name: part.state() for name, part in parts.items()}


def restore(parts: Mapping[str, RunPart], saved: RunState) -> None:
    """Give every part its saved state. A part without one, or with an empty one, begins anew."""
    for name, part in parts.items():
        if saved.get(name) not in (None, {}):
            part.restore(saved[name])


class Checkpoints:
    """The checkpoints of one run. Every rank makes one, at the same point; all calls but `close` are collective.

    `run_dir` must be seen by all ranks. `restarted`: this rank replaces one that failed. One such rank is enough for
    the run to go on from its newest checkpoint, whatever `checkpoint.resume` says.

    Raises `CheckpointError` where `checkpoint.resume` names no valid checkpoint, all that the run has are damaged, or
    none can be written.
    """

    def __init__(self, config: Config, run_dir: Path, interruption: Interruption, *, restarted: bool = False) -> None:
        self._config, self._interruption = config, interruption
        self._folder = CheckpointFolder(folder_of(config.checkpoint, run_dir))
        self._peers = Peers()
        self._writer = BackgroundWriter(self._folder, Peers(), config.checkpoint.keep)
        self._found = self._find(config.checkpoint.resume, restarted=self._peers.any(restarted))
        self.first_step: int = self._found[1].step if self._found else 0
        """Steps that are done already; 0 when the run begins anew."""
        away = self._found is not None and self._found[0].resolve().parent != self._folder.root.resolve()
        self.branched: Mapping[str, Any] | None = self._found[1].config if self._found and away else None
        """Settings of the checkpoint that it goes on from, where that is another run's."""
        self._saved = self.first_step
        self.interrupted = False
        """The run stopped before its last step because it was asked to."""
        self._prepare()

    def load(self, learner: Resumable) -> RunState | None:
        """Give the learner its state back; the state of the other parts, or None when the run begins anew."""
        if self._found is None:
            return None
        path, manifest = self._found
        saved = msgspec.msgpack.decode((path / STATE_FILE).read_bytes())
        learner.restore(
            PieceReader(path / name for name in sorted(manifest.files) if name != STATE_FILE), saved["learner"]
        )
        if self._peers.rank == 0:
            print(f"going on after step {manifest.step} from {path}", flush=True)
        run: RunState = saved["run"]
        return run

    def begin_steps(self) -> None:
        """From now on a run that is asked to stop finishes its step, and saves it."""
        self._interruption.begin_steps()

    def end_step(
        self, step: int, learner: Resumable, capture: Callable[[], RunState], *, leaving: bool = False
    ) -> bool:
        """Save and export what is due after `step`; whether the run stops here.

        `capture`: the state of the other parts; called on every rank when a checkpoint is due, used on the first.
        `leaving`: every rank knows that the run has to end, asked itself or not.
        """
        settings, last = self._config.checkpoint, step == self._config.train.steps
        stop = self._peers.any(leaving or bool(self._interruption.requested)) and not last
        if stop or settings.saves_after(step, self._config.train.steps):
            self._save(step, learner, capture)
        if settings.export_every and step % settings.export_every == 0:
            self._export(f"hf-{step:06d}", learner)
        self.interrupted = stop
        return stop

    def end_undone(self, step: int, learner: Resumable, capture: Callable[[], RunState]) -> None:
        """The run stops in the middle of a step that has changed nothing yet: save what was reached by `step`, if
        anything was since the last checkpoint.
        """
        if step != self._saved:
            self._save(step, learner, capture)
        self.interrupted = True

    def rescue(self, step: int, learner: Resumable) -> None:
        """Export the weights of a run that stops in `step`, where the run keeps any, for it may not go on from there.

        All updates of the step that came before are in them.
        """
        if not (self._config.checkpoint.every or self._config.train.export):
            return
        path = self._export(f"hf-{step:06d}-stopped", learner)
        if self._peers.rank == 0:
            print(f"the weights as they were when step {step} stopped are in {path}", flush=True)

    def close(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises `CheckpointError` where it is the last that this run makes, cannot be written, and no export of the
        weights follows.
        """
        failure = self._writer.wait()
        self._report(failure)
        steps, exports = self._config.train.steps, self._config.train.export
        if failure and (self.interrupted or (self._saved == steps and not exports)):
            raise CheckpointError(
                "the run has ended, and what it reached could not be saved",
                where=str(self._folder.root),
                got=failure,
                expected=f"a checkpoint of step {self._saved}",
                fix="Make room there; the same command goes on from the checkpoint before.",
            )
        if self.interrupted and self._peers.rank == 0:
            print(f"stopped as asked; the same command goes on from {self._folder.root}", flush=True)

    def _prepare(self) -> None:
        """Make the folder ready; no rank goes on when the first one cannot."""
        failure = ""
        if self._peers.rank == 0:
            try:
                self._folder.begin_after(self.first_step)
            except OSError as error:
                failure = str(error)
        failure = self._peers.gather(failure.encode())[0].decode()
        if failure:
            raise CheckpointError(
                "checkpoints cannot be written",
                where=str(self._folder.root),
                got=failure,
                expected="a folder that this user may write to",
                fix="Set checkpoint.dir to another folder.",
            )

    def _save(self, step: int, learner: Resumable, capture: Callable[[], RunState]) -> None:
        run = capture()
        # The first rank has the books that belong to this step before any rank asks for the next step's samples.
        self._peers.gather(b"")
        self._report(self._writer.wait())
        self._saved = step
        pieces, counters = learner.state()
        state = msgspec.msgpack.encode({"learner": counters, "run": run}) if self._peers.rank == 0 else None
        self._writer.start(Contents(step, pieces, state, self._config.dump()))

    def _export(self, name: str, learner: Resumable) -> Path:
        final = self._folder.root / name
        partial = final.with_name(f"{final.name}.partial")
        learner.export_checkpoint(str(partial))
        if self._peers.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        return final

    def _report(self, failure: str) -> None:
        if failure and self._peers.rank == 0:
            log.warning(
                "a checkpoint could not be written to %s: %s. The run goes on, older checkpoints are intact.",
                self._folder.root,
                failure,
            )

    def _find(self, resume: str, *, restarted: bool) -> tuple[Path, Manifest] | None:
        run_steps = self._own() if resume == "auto" or restarted else []
        if not run_steps and resume not in ("auto", "never"):
            return self._verified(Path(resume))
        for path in run_steps:
            try:
                return self._verified(path)
            except CheckpointError as error:
                if self._peers.rank == 0:
                    log.warning("checkpoint skipped: %s", error)
        if run_steps:
            raise CheckpointError(
                "no checkpoint of this run can be used",
                where=str(self._folder.root),
                got=f"{len(run_steps)} that are damaged or of another format, each named in a warning",
                expected="at least one of this format that matches its checksums",
                fix="Set checkpoint.resume=never to begin anew (what is there is set aside), or a PATH to go on from.",
            )
        return None

    def _own(self) -> list[Path]:
        """This run's checkpoints as the first rank sees them, newest first."""
        seen = self._peers.gather(msgspec.json.encode(self._folder.steps()))[0]
        return [self._folder.path(step) for step in msgspec.json.decode(seen, type=list[int])]

    def _verified(self, path: Path) -> tuple[Path, Manifest]:
        """The checkpoint in `path`, after every rank has compared its share of the files with the manifest."""
        error, manifest = "", None
        try:
            manifest = read_manifest(path)
            verify(path, manifest, sorted(manifest.files)[self._peers.rank :: self._peers.size])
        except CheckpointError as found:
            error = str(found)
        errors = [message.decode() for message in self._peers.gather(error.encode()) if message]
        if errors or manifest is None:
            raise CheckpointError(errors[0])
        return path, manifest


def folder_of(checkpoint: CheckpointConfig, run_dir: Path) -> Path:
    """Folder of a run's checkpoints."""
    return Path(checkpoint.dir) if checkpoint.dir else run_dir / "checkpoints"
