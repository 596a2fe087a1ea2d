"""Expert routes as a thing of their own: record, codec, layout, replay with proof, flips. Usable without `moe_trm`."""

from routing.errors import ReplayProofError, RouteError
from routing.record import RouteRecord, expert_dtype, token_digest

__all__ = ["ReplayProofError", "RouteError", "RouteRecord", "expert_dtype", "token_digest"]
