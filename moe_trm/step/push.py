"""A learner rank's side of a weight push: by versioned files, or broadcast from the ranks that own the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from moe_trm.learner.protocol import Learner
from moe_trm.rollout.client import RolloutClient
from moe_trm.step.fixed_texts import FixedTexts
from moe_trm.sync.distributed import Sender, announce
from moe_trm.sync.rounding import Rounding


class Pusher(Protocol):
    """Makes the rollout engine serve the learner's weights. Every rank calls it.

    In a synchronous run, no rank returns before the push is proved. Where sampling overlaps training, ranks return when
    the weights are in files and the push before is proved; nothing is sampled with weights that are not.
    """

    def push(self, version: int) -> None:
        """Raises `ControllerError` when this push, or the one before, could not be proved."""


def return_cached_blocks() -> None:
    """Give the device memory that torch keeps for later back to the driver, for an engine on the same GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class DiskPusher:
    """Every rank writes the tensors it owns to one file of `root/vNNNNNN`, rounded; the controller completes and loads
    it.

    `root` is a folder of this run alone that the engine sees too, shared memory where it can be. `texts` are of the
    proof by use. `colocated`: the engine takes memory of this GPU back before it loads.
    """

    def __init__(
        self,
        learner: Learner,
        rollouts: RolloutClient,
        root: Path,
        rounding: Rounding,
        texts: FixedTexts,
        *,
        colocated: bool = False,
    ) -> None:
        self._learner, self._rollouts, self._root, self._rounding = learner, rollouts, root, rounding
        self._texts, self._colocated = texts, colocated

    def push(self, version: int) -> None:
        directory = str(self._root / f"v{version:06d}")
        entries = self._learner.export_shard(directory, self._rounding.at(version))
        texts = self._texts.take(self._learner, due=not self._rollouts.proves_tensors)
        if self._colocated:
            return_cached_blocks()
        self._rollouts.push(version, entries, directory=directory, texts=texts)


class BroadcastPusher:
    """Every rank broadcasts the tensors it owns to the engine, in a group of its own.

    What arrived is proved by a witness beside the controller, or by the digests that the engine's workers take.

    `sender` is this rank's, in a group of its own. `texts` are of the proof by use. `colocated`: as of `DiskPusher`.
    """

    def __init__(
        self,
        learner: Learner,
        rollouts: RolloutClient,
        sender: Sender,
        rounding: Rounding,
        texts: FixedTexts,
        *,
        colocated: bool = False,
    ) -> None:
        self._learner, self._rollouts, self._rounding, self._texts = learner, rollouts, rounding, texts
        self._sender, self._connected, self._colocated = sender, False, colocated

    def push(self, version: int) -> None:
        rounding = self._rounding.at(version)
        entries = announce(self._learner.owned_tensors(), rounding)
        texts = self._texts.take(self._learner, due=not self._rollouts.proves_tensors)
        if self._colocated:
            return_cached_blocks()
        with self._rollouts.pushing(version, entries, meeting=self._sender.meeting, texts=texts):
            if not self._connected:
                self._sender.connect()
                self._connected = True
            self._sender.send(self._learner.owned_tensors(), rounding)
