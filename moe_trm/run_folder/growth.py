"""The file with the causes of a mismatch that grew: `moe-trm doctor RUN --grown` writes it into the run's folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moe_trm.run_folder.run import Run

GROWTH_FILE = "grown.json"


class GrowthFile(msgspec.Struct):
    """The part that the verdict reads: the two checkpoints, and a sentence for each figure whose cause is shown."""

    steps: tuple[int, int]
    because: dict[str, str]


EVIDENCE = 4.0
"""Standard errors by which the mismatch of fixed texts has to have risen: they are few, and their tails heavy."""
GREATER = 1.5
"""Times that it has to be what it was."""


def fixed_texts_say(run: Run) -> str:
    """A sentence where the mismatch of fixed texts (`probe.bank`) rose with evidence; else empty.

    The texts are the same, so other weights made the rise.
    """
    row = next((row for row in reversed(run.rows) if "bank/native_k3_rise" in row), None)
    if row is None:
        return ""
    rise, error, now = (row.get(f"bank/native_k3_{name}") for name in ("rise", "rise_se", "kl"))
    if rise is None or error is None or now is None or rise <= EVIDENCE * error or now < GREATER * (now - rise):
        return ""
    return (
        f"Up to step {row['step']} the k3 of fixed texts rose from {now - rise:.2g} to {now:.2g} "
        f"({rise / error:.0f} standard errors): it grows because of other weights. "
        "moe-trm doctor RUN --grown STEP STEP splits the rise."
    )


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
