"""Expert routes without a harness: record, codec, layout, replay with proof, flips. Usable without `moe_trm`."""

from routing.codec import decode, encode
from routing.columns import Columns
from routing.errors import MisalignedError, ReplayProofError, ReplayRefusedError, RouteError
from routing.flip_bound import FlipBoundError
from routing.flips import Flips, flips
from routing.layout import Layout
from routing.packed_layout import PackedLayout
from routing.record import RouteRecord, expert_dtype, sample_origin, token_digest
from routing.rows import Rows

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
