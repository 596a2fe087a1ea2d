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


class ScoredText(msgspec.Struct, frozen=True):
    """A fixed text of the proof by use, as the learner scores it at the weights of a push.

    `logprobs`: of the tokens after the first, at temperature 1, nats. Empty where the engine computes with rounded or
    noisy weights on purpose, and in the proof of a server that comes back between two pushes that are proved by use.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


class Meeting(msgspec.Struct, frozen=True):
    """Meeting point of one sending rank with the engine and the witness (distributed method): a separate TCP store.

    `bucket_bytes`: size of what the rank broadcasts at once, about (`moe_trm.sync.distributed.in_buckets`).
    """

    group: str
    address: str
    port: int
    bucket_bytes: int


class Share(msgspec.Struct, frozen=True):
    """Tensors that one rank sends in a distributed push, in order, and its meeting point; `texts` as of a push."""

    meeting: Meeting
    entries: tuple[TensorEntry, ...]
    texts: tuple[ScoredText, ...] = ()


class WeightPush(msgspec.Struct, frozen=True):
    """Version `version` of all weights, in Hugging Face names and the engine's dtype.

    `directory` holds config.json, the safetensors shards and their index (disk method). `texts`: with which it is
    proved by use; none where it is not.
    """

    version: int
    directory: str
    tensors: tuple[TensorEntry, ...]
    texts: tuple[ScoredText, ...] = ()
