"""Rows of a prompt source: a JSONL file, a parquet file, or a Hugging Face data set by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_trm.errors import ConfigError

HUB = "hf:"
_FIX = "check task.prompts and task.eval_prompts"


@dataclass(frozen=True)
class Row:
    """One row. `name` tells source and number, as prompt id; `where` the same in words."""

    name: str
    where: str
    fields: Mapping[str, Any]


def read_rows(source: str | Path, bad: list[ConfigError]) -> Iterator[Row]:
    """Every row of `source` that can be read, in order.

    Args:
        source: a file that ends in `.parquet`; any other file, read as JSONL (one object a line, blank lines skipped);
            or `hf:NAME`, `hf:NAME:SPLIT`, `hf:NAME:CONFIGURATION:SPLIT` (split `train` when none is given).
        bad: gets an error for each line that is no JSON object, told by its number.

    Raises:
        ConfigError: no such file or data set, or a reader that is not installed.
    """
    check_source(source)
    text = str(source)
    if text.startswith(HUB):
        return _hub(text)
    path = Path(source)
    return _parquet(path) if path.suffix == ".parquet" else _jsonl(path, bad)


def check_source(source: str | Path) -> None:
    """Raise `ConfigError` for a file that is not there; a data set by name is looked for when it is read."""
    if not str(source).startswith(HUB) and not Path(source).is_file():
        raise ConfigError(
            "prompt file not found",
            where=str(source),
            got="no such file",
            expected="a JSONL or parquet file",
            fix=_FIX,
        )


def _jsonl(path: Path, bad: list[ConfigError]) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                fields = _object(line, where)
            except ConfigError as error:
                bad.append(error)
            else:
                yield Row(f"{path.name}:{number}", where, fields)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            "a line of the prompt file is not valid JSON", where=where, got=str(error), expected="one object a line"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(
            "a line of the prompt file is not an object",
            where=where,
            got=type(data).__name__,
            expected="one object a line",
        )
    return data


def _parquet(path: Path) -> Iterator[Row]:
    _need("pyarrow", path)
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, fields in enumerate(rows, 1):
                yield Row(f"{path.name}:{number}", f"{path}, row {number}", fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            "the parquet file cannot be read", where=str(path), got=str(error), expected="a parquet file"
        ) from error


def _hub(source: str) -> Iterator[Row]:
    _need("datasets", source)
    import datasets

    name, *rest = source.removeprefix(HUB).split(":")
    split = rest[-1] if rest else "train"
    try:
        data = datasets.load_dataset(name, *rest[:-1], split=split)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            "the data set cannot be loaded",
            where=source,
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            expected="hf:NAME[:SPLIT] or hf:NAME:CONFIGURATION:SPLIT of a data set that is cached or can be reached",
            fix=(
                "Without a network (HF_HUB_OFFLINE=1) load it once where there is one, or save it as parquet and name "
                "that file."
            ),
        ) from error
    for number, fields in enumerate(data, 1):
        yield Row(f"{name}:{split}:{number}", f"{source}, row {number}", fields)


def _need(module: str, source: str | Path) -> None:
    if find_spec(module) is None:
        raise ConfigError(
            f"{module} is not installed, and this source needs it",
            where="task.prompts or task.eval_prompts",
            got=str(source),
            expected="a JSONL file, or the reader installed",
            fix="pip install 'moe-trm[data]'",
        )
