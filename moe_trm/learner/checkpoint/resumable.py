"""The part of a learner that checkpoints need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from moe_trm.learner.checkpoint.pieces import Piece, PieceReader


class Resumable(Protocol):
    """State that can be saved on one layout and restored on another."""

    def state(self) -> tuple[list[Piece], Mapping[str, int]]:
        """Host copies of this rank's part of the training state, and the counters that all ranks share.

        The state is weights, optimizer, random state and saved snapshots. Pieces are parts of global tensors, so
        another layout can read them. Training may continue at once.
        """

    def restore(self, reader: PieceReader, counters: Mapping[str, int]) -> None:
        """Load a state that any layout saved.

        Raises `CheckpointError` for a missing tensor, or one of another shape.
        """

    def export_checkpoint(self, directory: str) -> None:
        """Write a complete Hugging Face checkpoint: every rank its shard, then index, config and tokenizer."""
