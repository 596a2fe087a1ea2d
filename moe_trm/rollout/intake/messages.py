"""The forms of what the controller and an intake process say to each other (`moe_trm.runtime.child_messages`).

Arrays never travel here: they are in a block of the process's shared file (`moe_trm.runtime.shared_blocks`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from moe_trm.runtime.shared_blocks import Block


class IntakeSettings(msgspec.Struct, frozen=True):
    """What a process begins with.

    `reader` is the import path of a `Reader` (`package.module:Class`), and `settings` the plain data it is made of.
    """

    reader: str
    settings: Any


class Question(msgspec.Struct, frozen=True):
    """One request to the server at `url`; `asked` is plain data that the reader knows."""

    url: str
    asked: Any


class Parsed(msgspec.Struct, frozen=True):
    """The checked answer.

    `body` and the buffers of `block` are the frames of a `RolloutRecord` (`whole`) or of a `SampledTurn`. `retracted`
    and `written`: as in `Reading`.
    """

    body: bytes
    block: Block
    whole: bool
    retracted: bool
    written: tuple[str, str] | None = None
