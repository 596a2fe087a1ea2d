"""A Hugging Face folder as a weight push, so that the engine's own checksums prove what it serves."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.sync.disk import finish_push, write_shard
from moe_trm.sync.manifest import TensorEntry, WeightPush
from moe_trm.sync.rounding import Rounding

VERSION = 1


def push_of(weights: Path, dtype: str, scratch: Path) -> WeightPush:
    """The tensors of the folder `weights` in the engine's dtype, written to `scratch`, file by file.

    Raises:
        CheckpointError: a folder without weights, or with damaged ones.
    """
    checkpoint, folder = HfCheckpoint(weights), scratch / f"v{VERSION:06d}"
    names: dict[str, list[str]] = defaultdict(list)
    for name in sorted(checkpoint.names):
        names[checkpoint.file_of(name)].append(name)
    entries: list[TensorEntry] = []
    for number, of_file in enumerate(names.values()):
        tensors = ((name, checkpoint.read(name)) for name in of_file)
        entries += write_shard(folder / f"model-{number:05d}.safetensors", tensors, Rounding(dtype))
    return finish_push(str(folder), tuple(entries), VERSION, str(weights))
