"""One number for a row of a sample. Most samples are one row; an agent's session may be several."""

from __future__ import annotations

ROW_STEP = 1 << 40
"""Distance of the numbers of two rows of one sample. Such a number is exact as a float64, too."""
UNNAMED = 1 << 62
"""Keys from here on are made from a row's tokens, where the caller gave no sample ids."""


def row_id(sample_id: int, row: int) -> int:
    """The number of a row, unique within a run; the sample's own for its first row."""
    return sample_id + row * ROW_STEP


def row_of(number: int) -> tuple[int, int]:
    """The sample and the row of a `row_id`; a negative number names no sample."""
    return (number % ROW_STEP, number // ROW_STEP) if number >= 0 else (number, 0)


def row_name(number: int) -> str:
    """A row in words."""
    sample, row = row_of(number)
    return f"sample {sample}, row {row}" if row else f"sample {sample}"


def name_of(key: int) -> str:
    """A sample in words."""
    return row_name(key) if key < UNNAMED else f"row {key & 0xFFFF} of a micro-batch"
