"""A weight push, described: what the learner meant to send, so that the receiver can prove it arrived."""

from __future__ import annotations

import msgspec


class TensorEntry(msgspec.Struct, frozen=True):
    """One Hugging Face tensor of a push.

    `file` is relative to the push folder (empty for the distributed method). `digest` is that of
    `moe_trm.sync.tensors.tensor_digest`, of the bytes in the engine's dtype, made by the owning rank from its memory.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


class Meeting(msgspec.Struct, frozen=True):
    """Meeting point of one sending rank with the engine and the witness (distributed method): a separate TCP store."""

    group: str
    address: str
    port: int


class Share(msgspec.Struct, frozen=True):
    """Tensors that one rank sends in a distributed push, in order, and its meeting point."""

    meeting: Meeting
    entries: tuple[TensorEntry, ...]


class WeightPush(msgspec.Struct, frozen=True):
    """Version `version` of all weights, in Hugging Face names and the engine's dtype.

    `directory` holds config.json, the safetensors shards and their index (disk method).
    """

    version: int
    directory: str
    tensors: tuple[TensorEntry, ...]
