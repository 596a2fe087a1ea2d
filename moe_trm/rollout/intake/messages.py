"""Messages between the controller and an intake process, over pipes: length-prefixed msgpack, never pickle.

Arrays never travel here: they are in a block of the process's shared file (`moe_trm.runtime.shared_blocks`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from moe_trm.rollout.servers.question import Question
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.runtime.frames import frame
from moe_trm.runtime.shared_blocks import Block


class Hello(msgspec.Struct, tag=True, frozen=True):
    """To the process, once.

    `answers` names the engine's `AnswerFormat`. `timeout_s` and `max_attempts`
    are those of a request; `tokenizer` is a checkpoint's folder, empty for none.
    """

    answers: str
    model: ServedModel
    api_key: str | None
    timeout_s: float
    max_attempts: int
    tokenizer: str = ""


class Whole(msgspec.Struct, frozen=True):
    """The parts that make a whole sample of an answer: the process gives its record then."""

    sample_id: int
    group_id: int
    prompt_id: str
    keep_changed: bool


class Ask(msgspec.Struct, tag=True, frozen=True):
    """To the process: ask the server at `url`. `number` is positive and never used again.

    `whole`: the answer is a sample, if no push cuts it.
    """

    number: int
    url: str
    question: Question
    whole: Whole | None = None


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """To the process: nobody waits for this answer any more."""

    number: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """To the process: say that it is there."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """From the process, once: it can be asked."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """From the process: it is there. `turns`: how often its event loop came round since the start."""

    turns: int


class Parsed(msgspec.Struct, tag=True, frozen=True):
    """From the process: the checked answer.

    `body` and the buffers of `block` are the frames of a `RolloutRecord` (`whole`) or of a `SampledTurn`. `retracted`:
    as in `SampledTurn`. `written`: as in `Reading`.
    """

    number: int
    body: bytes
    block: Block
    whole: bool
    retracted: bool
    written: tuple[str, str] | None = None


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """From the process: the parts of a `RecordRejected`."""

    number: int
    reason: str
    what: str
    where: str
    got: str | None
    expected: str | None
    fix: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """From the process: there is no answer. The parts of the error of `kind`, and its HTTP status, if any."""

    number: int
    kind: Literal["slow", "lost", "failed", "refused", "error"]
    what: str
    where: str
    got: str | None
    expected: str | None
    fix: str
    status: int = 0


ToProcess = Hello | Ask | Cancel | Ping
FromProcess = Ready | Pong | Parsed | Rejected | Failed


def pack(message: ToProcess | FromProcess) -> bytes:
    """One frame."""
    return frame(message)
