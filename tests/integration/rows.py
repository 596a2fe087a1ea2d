"""The rows of a micro-batch."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class Rows(TypedDict):
    """A micro-batch as replayers take it, each `[B, R]`."""

    input_ids: Tensor
    target_ids: Tensor
    valid: Tensor
