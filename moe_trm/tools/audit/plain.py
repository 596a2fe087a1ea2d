"""The plain layout of a dump: JSONL, one row a line, or safetensors with the rows one after the other.

docs/healthy.md describes it. A key that is not known is refused, because a mistyped one would leave a question open.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from moe_trm.errors import BundleError, RecordRejected
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.tools.audit.dump import Array, AuditRow

KEYS = {
    "id", "tokens", "prompt_length", "sampled", "rollout_logprobs", "trainer_logprobs", "advantages", "routes",
    "kept_ids", "versions", "temperature",
}  # fmt: skip
ARRAYS = KEYS - {"id"} | {"lengths", "kept_sizes"}


def read_plain(path: Path) -> Iterator[AuditRow | RecordRejected]:
    """The rows of one file; in place of one that does not fit, why.

    Raises:
        BundleError: a file that is no JSONL or safetensors of this layout.
    """
    yield from _lines(path) if path.suffix == ".jsonl" else _arrays(path)


def _lines(path: Path) -> Iterator[AuditRow | RecordRejected]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise _unreadable(path, f"line {number + 1}: {error}") from error
        if not isinstance(values, dict) or not values.keys() <= KEYS or "tokens" not in values:
            keys = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise _unreadable(path, f"line {number + 1} has {keys}")
        try:
            yield _row(str(values.get("id", f"row {number}")), values)
        except RecordRejected as error:
            yield error
        except (ValueError, TypeError, OverflowError) as error:
            yield RecordRejected("types", f"values are no numbers: {error}", where=f"{path}, line {number + 1}")


def _row(name: str, values: Mapping[str, Any]) -> AuditRow:
    tokens = np.asarray(values["tokens"])
    sampled = _sampled(name, len(tokens), values)
    versions, kept = values.get("versions"), values.get("kept_ids")
    if versions is not None and not isinstance(versions, list):
        versions = [versions] * int(sampled.sum())
    temperature = values.get("temperature")
    return AuditRow(
        name,
        tokens.astype(np.int64) if tokens.dtype.kind in "iu" else tokens,
        sampled,
        rollout=_floats(values.get("rollout_logprobs")),
        trainer=_floats(values.get("trainer_logprobs")),
        advantages=_floats(values.get("advantages")),
        routes=None if values.get("routes") is None else np.asarray(values["routes"]),
        mask=None if kept is None else mask_of([np.asarray(ids, np.int32) for ids in kept]),
        versions=None if versions is None else np.array([str(version) for version in versions]),
        temperature=None if temperature is None else float(temperature),
    )


def mask_of(kept: list[Array]) -> SamplingMask:
    """The kept ids of each sampled token, as they were written."""
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in kept], dtype=np.int64)])
    return SamplingMask(np.concatenate([np.zeros(0, np.int32), *kept]), offsets)


def _sampled(name: str, num_tokens: int, values: Mapping[str, Any]) -> Array:
    if (values.get("prompt_length") is None) == (values.get("sampled") is None):
        raise RecordRejected("sampled", "either prompt_length or sampled marks the sampled tokens", where=name)
    if values.get("sampled") is not None:
        return np.asarray(values["sampled"]).astype(bool)
    return np.arange(num_tokens) >= int(values["prompt_length"])


def _floats(values: Any) -> Array | None:
    return None if values is None else np.asarray(values, np.float64)


def _arrays(path: Path) -> Iterator[AuditRow | RecordRejected]:
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, str(error)) from error
    if not arrays.keys() <= ARRAYS or not {"tokens", "lengths"} <= arrays.keys():
        raise _unreadable(path, f"arrays {sorted(arrays)}")
    lengths = arrays["lengths"].astype(np.int64)
    marks = arrays.get("sampled")
    if (marks is None) == ("prompt_length" not in arrays):
        raise _unreadable(path, "not exactly one of prompt_length and sampled")
    ends = np.cumsum(lengths)
    if marks is None:
        starts = np.repeat(ends - lengths + arrays["prompt_length"], lengths)
        marks = np.arange(len(starts)) >= starts
    num_sampled = np.add.reduceat(marks.astype(np.int64), ends - lengths)
    per_row = {name: arrays[name] for name in ("temperature",) if name in arrays}
    of_sampled = ("rollout_logprobs", "trainer_logprobs", "advantages", "versions", "kept_sizes")
    cuts = {"tokens": lengths, "sampled": lengths, "routes": lengths - 1} | dict.fromkeys(of_sampled, num_sampled)
    if "kept_sizes" in arrays and len(arrays["kept_sizes"]) == num_sampled.sum():
        starts = np.cumsum(num_sampled) - num_sampled
        cuts["kept_ids"] = np.add.reduceat(arrays["kept_sizes"].astype(np.int64), starts)
    elif "kept_ids" in arrays:
        raise _unreadable(path, "kept_ids without kept_sizes of every sampled token")
    parts: dict[str, list[Array]] = {}
    for name, sizes in cuts.items():
        source = marks if name == "sampled" else arrays.get(name)
        if source is None:
            continue
        if len(source) != sizes.sum():
            raise _unreadable(path, f"{name} has {len(source)} entries, the rows need {int(sizes.sum())}")
        parts[name] = np.split(source, np.cumsum(sizes)[:-1])
    for number in range(len(lengths)):
        values: dict[str, Any] = {name: part[number] for name, part in parts.items() if name != "kept_sizes"}
        values |= {name: part[number] for name, part in per_row.items()}
        if "kept_ids" in values:
            values["kept_ids"] = np.split(values["kept_ids"], np.cumsum(parts["kept_sizes"][number])[:-1])
        if "versions" in values:
            values["versions"] = values["versions"].tolist()
        yield _row(f"row {number}", values)


def _unreadable(path: Path, got: str) -> BundleError:
    return BundleError(
        "this file does not have the plain layout",
        where=str(path),
        got=got,
        expected=f"`tokens`, and of {', '.join(sorted(KEYS))} what is known",
        fix="docs/healthy.md describes the layout.",
    )
