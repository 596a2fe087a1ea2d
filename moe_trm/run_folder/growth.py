"""Why the mismatch of a run grew, as `moe-trm doctor RUN --grown` left it in the run's folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

GROWTH_FILE = "grown.json"


class GrowthFile(msgspec.Struct):
    """What the verdict reads of the file: the two checkpoints, and a sentence for each figure whose cause is shown."""

    steps: tuple[int, int]
    because: dict[str, str]


def grows_because(folder: Path) -> str:
    """A sentence for each figure that grew from a cause with evidence; empty where nobody examined it or none is shown.

    A file that cannot be read is told.
    """
    path = folder / GROWTH_FILE
    if not path.is_file():
        return ""
    try:
        growth = msgspec.json.decode(path.read_bytes(), type=GrowthFile)
    except msgspec.DecodeError as error:
        return f"{GROWTH_FILE} is damaged: {error}."
    between = f"From checkpoint {growth.steps[0]} to {growth.steps[1]}"
    return " ".join(f"{between} the {figure} grows because {cause}" for figure, cause in growth.because.items())
