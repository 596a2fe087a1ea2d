"""Arrays that several processes of one machine read where they are: blocks of an anonymous file (Linux memfd).

The process that makes a `SharedFile` hands its descriptor to the one process that writes blocks into it. Blocks follow
one another and are never written again. The maker opens a block as arrays that lie in the file itself. When the last
of them is gone, the block's memory goes back to the system by itself. A block outlives its writer.

Another process that may read the maker's descriptors (the same user) copies arrays from their `Place`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import cache
from types import TracebackType

import msgspec
import numpy as np

from moe_trm.errors import ControllerError

PAGE = mmap.PAGESIZE
MARK = b"moe-trm\x01"
"""The first bytes of a block whose memory is there."""
_ALIGNMENT = 64
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE of linux/falloc.h

_FAILED = ctypes.c_void_p(-1).value


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start..start + size` of a file."""

    start: int
    size: int


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Whole pages of a file, with the spans of the buffers in them."""

    start: int
    size: int
    buffers: tuple[Span, ...]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of an array in a block: process and descriptor of the file's maker, the block's start, and the span."""

    process: int
    descriptor: int
    block: int
    start: int
    size: int


class BlockWriter:
    """The writing side of one file.

    Args:
        descriptor: of the file; no other process writes to it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._end = descriptor, 0

    def write(self, buffers: Sequence[bytes | memoryview]) -> Block:
        """A new block with these buffers; each is copied once."""
        first, at, spans = self._end, self._end + _ALIGNMENT, []
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            _write(self._descriptor, view, at)
            spans.append(Span(at, len(view)))
            at += -(-len(view) // _ALIGNMENT) * _ALIGNMENT
        _write(self._descriptor, memoryview(MARK), first)
        size = -(-(at - first) // PAGE) * PAGE
        self._end = first + size
        return Block(first, size, tuple(spans))


class SharedFile:
    """The maker's side of one file. It stays open as long as an array of it is held.

    Attributes:
        descriptor: to be handed to the writer.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("moe-trm-records", os.MFD_CLOEXEC)

    def open(self, block: Block) -> list[memoryview]:
        """The block's buffers where they lie, to be read only.

        Its memory is given back with the last of them, so a block is opened once. Raises `ControllerError` for one that
        is not in the file.
        """
        end = block.start + block.size
        inside = all(block.start <= span.start and span.start + span.size <= end for span in block.buffers)
        if block.size <= 0 or block.start % PAGE or not inside or end > -(-self._length // PAGE) * PAGE:
            raise ControllerError("a block is not in its shared file", got=block, expected=f"{self._length} bytes")
        whole = np.asarray(_Mapped(self, block.start, block.size))
        return [whole[span.start - block.start :][: span.size].data for span in block.buffers]

    @property
    def used_bytes(self) -> int:
        """Memory that its blocks take now."""
        return os.fstat(self.descriptor).st_blocks * 512

    @property
    def _length(self) -> int:
        return os.fstat(self.descriptor).st_size

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]
        if "descriptor" in self.__dict__:
            close(self.descriptor)


class _Mapped:
    """A block in this process's memory, for NumPy to read. Its pages are given back with it."""

    def __init__(self, file: SharedFile, start: int, size: int) -> None:
        self.file, self.start, self.size, self._libc = file, start, size, _libc()
        found = self._libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.descriptor, start)
        if found == _FAILED:
            raise OSError(ctypes.get_errno(), "a block of shared memory cannot be mapped")
        self.address: int = found

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.address, True)}

    def __del__(self, hole=_PUNCH_HOLE, page=PAGE) -> None:  # type: ignore[no-untyped-def]
        if "address" in self.__dict__:
            self._libc.munmap(self.address, self.size)
            # The page with the mark goes first: a reader who finds it afterwards has read the block as it was.
            self._libc.fallocate(self.file.descriptor, hole, self.start, page)
            self._libc.fallocate(self.file.descriptor, hole, self.start, self.size)


def place_of(array: np.ndarray) -> Place | None:
    """The place where another process reads this array's bytes; None unless it is in a block, in one piece."""
    owner: object = array.base
    if owner is None:
        return None
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, _Mapped) or not array.flags.c_contiguous or not array.nbytes:
        return None
    start = owner.start + int(array.__array_interface__["data"][0]) - owner.address
    return Place(os.getpid(), owner.file.descriptor, owner.start, start, array.nbytes)


class PlaceReader:
    """Copies of arrays that another process of this machine holds. A context manager: leaving it checks them.

    The maker must hold the arrays meanwhile. Leaving raises `ControllerError` where it did not.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], int] = {}
        self._blocks: set[tuple[int, int]] = set()
        self.num_bytes = 0
        """Copied so far."""

    def read(self, place: Place) -> memoryview:
        """A copy of the bytes at `place`. Raises `ControllerError`."""
        descriptor = self._descriptor(place)
        copy = np.empty(place.size, np.uint8).data
        done = 0
        while done < place.size:
            read = os.preadv(descriptor, [copy[done:]], place.start + done)
            if not read:
                raise _gone(place)
            done += read
        self._blocks.add((descriptor, place.block))
        self.num_bytes += place.size
        return copy.toreadonly()

    def __enter__(self) -> PlaceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for descriptor, start in self._blocks:
                    if os.pread(descriptor, len(MARK), start) != MARK:
                        raise _gone(start)
        finally:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()

    def _descriptor(self, place: Place) -> int:
        key = place.process, place.descriptor
        if key not in self._files:
            path = f"/proc/{place.process}/fd/{place.descriptor}"
            try:
                self._files[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ControllerError(
                    "the controller's shared memory cannot be read",
                    where=path,
                    got=str(error),
                    expected="a controller of the same user, whose /proc this rank sees",
                    fix="Start ranks and controller in one container, or set rollout.intake_processes=0.",
                ) from error
        return self._files[key]


def _gone(place: object) -> ControllerError:
    return ControllerError(
        "records were given back while a rank read them",
        got=place,
        expected="a block that is held until every rank has read it",
    )


def _write(descriptor: int, view: memoryview, at: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], at + done)


@cache
def _libc() -> ctypes.CDLL:
    """The C library: Python's own `mmap` keeps a descriptor open for every mapping, and thousands are open at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    return libc
