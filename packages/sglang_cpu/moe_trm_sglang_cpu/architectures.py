"""The files of SGLang that have the code of a checkpoint's model, found by their text: to import all takes long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


def files_of(checkpoint: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Each architecture that the checkpoint's config.json names, and each file of `folder` that has a class of it.

    None for a checkpoint that is no folder, and for an architecture that no file has.
    """
    config = checkpoint / "config.json"
    if not config.is_file():
        return
    for architecture in json.loads(config.read_text()).get("architectures") or ():
        for file in sorted(folder.glob("*.py")):
            if f"class {architecture}(".encode() in file.read_bytes():
                yield file, architecture
