"""Safetensors files with a typed header and a checksum over everything.

A file is written whole or not at all, and refused when it has changed. The header is one JSON object in the metadata of
the file, under `bundle`. Its `checksum` is the blake2b-16 of that object with an empty checksum, followed by every
array's name and bytes in order of name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from moe_trm import __version__
from moe_trm.errors import BundleError

Arrays = Mapping[str, np.ndarray]


class CheckedHeader(msgspec.Struct, kw_only=True):
    """Fields of every header; formats add their own."""

    format: str
    version: int
    checksum: str = ""


H = TypeVar("H", bound=CheckedHeader)


def write_checked(path: Path, header: CheckedHeader, arrays: Arrays) -> None:
    """Write `path` whole or not at all. The header's checksum is filled in."""
    header.checksum = _checksum(msgspec.json.encode(header), arrays)
    # Ranks that hold the same rows write the same file: each its own partial one.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(save(dict(arrays), metadata={"bundle": msgspec.json.encode(header).decode()}))
    os.replace(partial, path)


def read_header(path: Path, kind: type[H], file_format: str, *versions: int) -> H:
    """The header alone, of a file of one of `versions`, the newest first; the checksum is not verified.

    Raises:
        BundleError: a file that is damaged, truncated, of another format or of another version.
    """
    header, _, _ = _open(path, kind, file_format, versions, with_arrays=False)
    return header


def read_checked(path: Path, kind: type[H], file_format: str, *versions: int) -> tuple[H, Arrays]:
    """Header and arrays after checking the checksum.

    Raises `BundleError` as `read_header` does, and where it does not match.
    """
    header, text, arrays = _open(path, kind, file_format, versions, with_arrays=True)
    if _checksum(text, arrays) != header.checksum:
        raise damaged(path, "the checksum does not match")
    return header, arrays


def damaged(path: Path, how: str) -> BundleError:
    """The error that a file is not as it was written."""
    return BundleError(
        "a file of the bundle is damaged or truncated",
        where=str(path),
        got=how,
        expected="the file as written",
        fix="Copy the bundle again or record the run again.",
    )


def _open(
    path: Path, kind: type[H], file_format: str, versions: Sequence[int], *, with_arrays: bool
) -> tuple[H, bytes, Arrays]:
    try:
        with safe_open(path, framework="np") as file:
            text = (file.metadata() or {}).get("bundle", "")
            stamp = msgspec.json.decode(text, type=CheckedHeader)
            if stamp.format != file_format or stamp.version not in versions:
                raise BundleError(
                    "a bundle of another format",
                    where=str(path),
                    got=f"{stamp.format} {stamp.version}",
                    expected=f"{file_format} {' or '.join(map(str, versions))}",
                    fix="Record the run again, or read it with the version of moe-trm that wrote it"
                    f" ({'newer' if stamp.version > versions[0] else 'older'} than this one, {__version__}).",
                )
            header = msgspec.json.decode(text, type=kind)
            return header, text.encode(), {name: file.get_tensor(name) for name in file.keys()} if with_arrays else {}  # noqa: SIM118
    except (SafetensorError, msgspec.DecodeError, OSError) as error:
        raise damaged(path, str(error)) from error


def _checksum(text: bytes, arrays: Arrays) -> str:
    """Checksum of the header as written, so that fields which a later version adds do not look like damage."""
    hasher = hashlib.blake2b(msgspec.json.encode({**msgspec.json.decode(text), "checksum": ""}), digest_size=16)
    for name in sorted(arrays):
        hasher.update(name.encode())
        hasher.update(np.ascontiguousarray(arrays[name]).data)
    return hasher.hexdigest()
