"""Sampling masks <-> bytes: kept ids near their entropy, log-probs exact.

Shape letters: S sampled tokens, M kept ids, V vocabulary, G rows of one size, n kept ids besides the sampled one, U = V
- 1 ids that these can be.

The sampled token is in its own set and both sides know it, so a set of one costs only its size. The other ids are
sorted, renumbered without the sampled one, and written as Elias-Fano codes: `low` bits of each id as they are, the rest
in unary. Size and vocabulary determine the layout of a row, and rows of one size share it. So coding is a few array
operations per size, and no lengths are stored. The order within a set is not stored: rows come back in ascending order
of ids, as in `SamplingMask.ascending`.

Frame: version byte, flags byte, V and S as little-endian uint32, then blocks. Each block is a uint32 length and its
bytes:

- sizes: a byte each; 255 and above also in a table of uint32.
- id bits.
- with flag 1, the log-probs as float32, in separate byte planes. With flag 2, those of sets of one are left out,
  because they are exactly 0.

Blocks other than the id bits begin with 0 (as is) or 1 (deflated). There is no checksum: a frame is always inside
something that has one. Damage that changes structure is refused.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from moe_trm.errors import RecordRejected
from moe_trm.sampling_mask.record import SamplingMask

VERSION = 1
HAS_LOGPROBS, SINGLES_LEFT_OUT = 1, 2
_HEADER, _LENGTH, _ESCAPE = struct.Struct("<BBII"), struct.Struct("<I"), 255


def encode(mask: SamplingMask, sampled_ids: np.ndarray, vocab_size: int) -> bytes:
    """The mask of `S` sampled tokens as bytes; decode gives back `mask.ascending()`.

    Args:
        mask: rows that hold their sampled id, or none (dropped positions).
        sampled_ids: `[S]`, needed again to decode.
        vocab_size: V; ids are below.

    Raises:
        RecordRejected: a mask that `SamplingMask.validate` would refuse.
    """
    mask.validate(sampled_ids, vocab_size, allow_empty=True)
    mask = mask.ascending()
    sizes = np.diff(mask.offsets)
    blocks = [_deflated(_size_bytes(sizes)), _id_bits(mask, sizes, np.asarray(sampled_ids, np.int64), vocab_size)]
    flags = 0
    if mask.logprobs is not None:
        flags, block = _logprob_block(mask.logprobs, sizes)
        blocks.append(block)
    frame = [_HEADER.pack(VERSION, flags, vocab_size, len(sizes))]
    for block in blocks:
        frame += [_LENGTH.pack(len(block)), block]
    return b"".join(frame)


def encoded_lengths(mask: SamplingMask, vocab_size: int) -> tuple[int, int]:
    """Bytes of `encode` without log-probs and with `mask`'s, whose rows are in ascending order of ids.

    Ids are not written: sizes and vocabulary determine the length of theirs.
    """
    sizes = np.diff(mask.offsets)
    ids = sum(length for _, length in _layouts(sizes, vocab_size).values())
    bare = _HEADER.size + _LENGTH.size + len(_deflated(_size_bytes(sizes))) + _LENGTH.size + ids
    if mask.logprobs is None:
        return bare, bare
    return bare, bare + _LENGTH.size + len(_logprob_block(mask.logprobs, sizes)[1])


def decode(data: bytes, sampled_ids: np.ndarray) -> SamplingMask:
    """The mask in `data`, with rows in ascending order of ids.

    Raises `RecordRejected` (`mask_damaged`) where it cannot be one.
    """
    reader = _Reader(data)
    version, flags, vocab_size, num_rows = _HEADER.unpack(reader.take(_HEADER.size))
    if version != VERSION or flags not in (0, HAS_LOGPROBS, HAS_LOGPROBS | SINGLES_LEFT_OUT):
        raise _damaged(f"version {version}, flags {flags}", f"version {VERSION}")
    if num_rows != len(sampled_ids):
        raise _damaged(f"{num_rows} rows", f"{len(sampled_ids)}, one per sampled token")
    sampled = np.asarray(sampled_ids, np.int64)
    if num_rows and not (sampled.min() >= 0 and sampled.max() < vocab_size):
        raise _damaged(f"sampled ids {sampled.min()}..{sampled.max()}", f"ids below {vocab_size}")
    sizes = _sizes(_inflated(reader.block(), limit=5 * num_rows), num_rows, vocab_size)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ids = _ids(reader.block(), sizes, offsets, sampled, vocab_size)
    logprobs = _logprobs(reader, flags, sizes) if flags & HAS_LOGPROBS else None
    reader.finish()
    return SamplingMask(ids.astype(np.int32), offsets, logprobs)


@dataclass(frozen=True)
class _Layout:
    """Code of `n` ascending numbers below `universe`: a bitmap, or `low` bits of each and the rest in unary."""

    n: int
    universe: int
    low: int
    unary_bits: int
    bitmap: bool

    @classmethod
    def of(cls, n: int, universe: int) -> _Layout:
        def unary_bits(low: int) -> int:
            high = (universe - 1) >> low
            return n + high if high else 0

        low = min(range(universe.bit_length() + 1), key=lambda low: n * low + unary_bits(low))
        bitmap = universe <= n * low + unary_bits(low)
        return cls(n, universe, low, unary_bits(low), bitmap)

    @property
    def bits(self) -> int:
        return self.universe if self.bitmap else self.unary_bits + self.n * self.low

    def write(self, values_Gn: np.ndarray) -> np.ndarray:
        """`[G, bits]` bool."""
        rows = len(values_Gn)
        if self.bitmap:
            return _marked(values_Gn, self.universe)
        low = (values_Gn[..., None] >> np.arange(self.low)) & 1
        unary = (
            _marked((values_Gn >> self.low) + np.arange(self.n), self.unary_bits) if self.unary_bits else low[:, :0, 0]
        )
        return np.concatenate([unary.astype(bool), low.reshape(rows, -1).astype(bool)], axis=1)

    def read(self, bits: np.ndarray) -> np.ndarray:
        """`[G, n]` int64, or `RecordRejected` where a row does not hold `n` ascending numbers below `universe`."""
        rows = len(bits)
        if self.bitmap:
            return self._marks(bits)
        low = bits[:, self.unary_bits :].reshape(rows, self.n, self.low).astype(np.int64)
        values: np.ndarray = (low << np.arange(self.low)).sum(axis=-1)
        if self.unary_bits:
            values += (self._marks(bits[:, : self.unary_bits]) - np.arange(self.n)) << self.low
        if (values >= self.universe).any() or (np.diff(values, axis=1) <= 0).any():
            raise _damaged("kept ids out of order or range", f"ascending ids below {self.universe}")
        return values

    def _marks(self, bits: np.ndarray) -> np.ndarray:
        if (bits.sum(axis=1) != self.n).any():
            raise _damaged("a row with another number of kept ids", str(self.n))
        return bits.nonzero()[1].reshape(len(bits), self.n)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, length: int) -> bytes:
        part = self._data[self._at : self._at + length]
        if len(part) != length:
            raise _damaged(f"{len(part)} bytes left", f"{length}")
        self._at += length
        return part

    def block(self) -> bytes:
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        return self.take(int(length))

    def finish(self) -> None:
        if self._at != len(self._data):
            raise _damaged(f"{len(self._data) - self._at} bytes too many", "the end")


def _damaged(got: str, expected: str) -> RecordRejected:
    return RecordRejected(
        "mask_damaged", "an encoded sampling mask is damaged or truncated", got=got, expected=expected
    )


def _marked(places_Gn: np.ndarray, width: int) -> np.ndarray:
    bits = np.zeros((len(places_Gn), width), bool)
    np.put_along_axis(bits, places_Gn, True, axis=1)
    return bits


def _deflated(raw: bytes) -> bytes:
    packed = zlib.compress(raw, 9)
    return b"\1" + packed if len(packed) < len(raw) else b"\0" + raw


def _inflated(block: bytes, limit: int) -> bytes:
    kind, body = block[:1], block[1:]
    if kind == b"\0":
        return body
    if kind != b"\1":
        raise _damaged(f"block kind {kind!r}", "0 or 1")
    inflater = zlib.decompressobj()
    try:
        raw: bytes = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise _damaged(str(error), "deflated bytes") from error
    if not inflater.eof or inflater.unused_data:
        raise _damaged("a deflated block without its end", f"at most {limit} bytes")
    return raw


def _logprob_block(logprobs: np.ndarray, sizes: np.ndarray) -> tuple[int, bytes]:
    """Flags and block of the log-probs."""
    values, flags = logprobs.astype("<f4"), HAS_LOGPROBS
    of_single = np.repeat(sizes == 1, sizes)
    if not values[of_single].view("<u4").any():
        values, flags = values[~of_single], flags | SINGLES_LEFT_OUT
    return flags, _deflated(np.ascontiguousarray(values.view(np.uint8).reshape(-1, 4).T).tobytes())


def _size_bytes(sizes: np.ndarray) -> bytes:
    small: bytes = np.minimum(sizes, _ESCAPE).astype(np.uint8).tobytes()
    return small + bytes(sizes[sizes >= _ESCAPE].astype("<u4").tobytes())


def _sizes(raw: bytes, num_rows: int, vocab_size: int) -> np.ndarray:
    if len(raw) < num_rows:
        raise _damaged(f"{len(raw)} sizes", f"{num_rows}")
    sizes = np.frombuffer(raw[:num_rows], np.uint8).astype(np.int64)
    large = sizes == _ESCAPE
    if len(raw) != num_rows + 4 * int(large.sum()):
        raise _damaged(f"{len(raw)} bytes of sizes", f"{num_rows + 4 * int(large.sum())}")
    sizes[large] = np.frombuffer(raw[num_rows:], "<u4")
    if num_rows and (sizes.max() > vocab_size or (sizes[large] < _ESCAPE).any()):
        raise _damaged(f"a set of {sizes.max()} ids", f"at most {vocab_size}")
    return sizes


def _id_bits(mask: SamplingMask, sizes: np.ndarray, sampled_S: np.ndarray, vocab_size: int) -> bytes:
    ids, universe = mask.ids.astype(np.int64), vocab_size - 1
    parts = []
    for size in np.unique(sizes[sizes > 1]).tolist():
        rows = np.flatnonzero(sizes == size)
        kept = ids[mask.offsets[rows][:, None] + np.arange(size)]
        unsampled = kept[kept != sampled_S[rows, None]].reshape(len(rows), size - 1)
        renumbered = unsampled - (unsampled > sampled_S[rows, None])
        parts.append(np.packbits(_Layout.of(size - 1, universe).write(renumbered)).tobytes())
    return b"".join(parts)


def _layouts(sizes: np.ndarray, vocab_size: int) -> dict[int, tuple[_Layout, int]]:
    """The layout of the rows of each size, ascending, and the bytes of all of them together."""
    distinct, counts = np.unique(sizes[sizes > 1], return_counts=True)
    layouts = {size: _Layout.of(size - 1, vocab_size - 1) for size in distinct.tolist()}
    return {
        size: (layout, -(-count * layout.bits // 8))
        for (size, layout), count in zip(layouts.items(), counts.tolist(), strict=True)
    }


def _ids(block: bytes, sizes: np.ndarray, offsets: np.ndarray, sampled_S: np.ndarray, vocab_size: int) -> np.ndarray:
    reader = _Reader(block)
    layouts = _layouts(sizes, vocab_size)
    total = sum(length for _, length in layouts.values())
    if total != len(block):
        raise _damaged(f"{len(block)} bytes of ids", f"{total}")
    ids = np.empty(offsets[-1], np.int64)
    single = sizes == 1
    ids[offsets[:-1][single]] = sampled_S[single]
    for size, (layout, length) in layouts.items():
        rows = np.flatnonzero(sizes == size)
        packed = np.frombuffer(reader.take(length), np.uint8)
        unsampled = layout.read(np.unpackbits(packed, count=len(rows) * layout.bits).reshape(len(rows), layout.bits))
        sampled = sampled_S[rows, None]
        kept = np.sort(np.concatenate([unsampled + (unsampled >= sampled), sampled], axis=1), axis=1)
        ids[offsets[rows][:, None] + np.arange(size)] = kept
    return ids


def _logprobs(reader: _Reader, flags: int, sizes: np.ndarray) -> np.ndarray:
    stored = np.repeat(sizes != 1, sizes) if flags & SINGLES_LEFT_OUT else np.ones(int(sizes.sum()), bool)
    count = int(stored.sum())
    raw = _inflated(reader.block(), limit=4 * count)
    if len(raw) != 4 * count:
        raise _damaged(f"{len(raw)} bytes of log-probs", f"{4 * count}")
    logprobs = np.zeros(len(stored), np.float32)
    logprobs[stored] = np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(4, count).T).view("<f4")[:, 0]
    return logprobs
