"""Expert routes without a harness: record, codec, layout, replay with proof, flips. Usable without `moe_trm`."""

from routing.errors import MisalignedError, ReplayProofError, ReplayRefusedError, RouteError
from routing.judge.flip_bound import FlipBoundError
from routing.judge.flips import Flips, flips
from routing.layout.columns import Columns
from routing.layout.packed import PackedLayout
from routing.layout.padded import Layout
from routing.layout.rows import Rows
from routing.record.codec import decode, encode
from routing.record.record import RouteRecord, expert_dtype, sample_origin, token_digest

API_VERSION = 2
"""Version of the public interface in docs/library.md. It rises when something that callers rely on changes."""
__all__ = [
    "API_VERSION",
    "Columns",
    "FlipBoundError",
    "Flips",
    "Layout",
    "MisalignedError",
    "PackedLayout",
    "ReplayProofError",
    "ReplayRefusedError",
    "RouteError",
    "RouteRecord",
    "Rows",
    "decode",
    "encode",
    "expert_dtype",
    "flips",
    "sample_origin",
    "token_digest",
]
