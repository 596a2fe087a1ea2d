"""Expert sets in a Megatron-Core token dispatcher, read just before the experts compute.

Shape letters: N local tokens in router order, G ranks of the dispatcher's group, K experts per token, E experts, H
local experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from routing.errors import ReplayProofError
from routing.replay.proof import same_set


class Dispatched:
    """The expert sets of one MoE layer as its dispatcher holds them.

    The all-to-all dispatcher keeps the whole map `[N, E]`. The all-gather dispatcher keeps, for the tokens of all G
    ranks, only the columns of this rank's experts, `[G * N, H]`. With one rank that is the whole map too. With more,
    the router's map is compared in full and the dispatcher's columns must equal it, so nothing in between has changed
    it.
    """

    def __init__(self, moe: Any) -> None:
        self._moe = moe
        self._gathers = moe.config.moe_token_dispatcher_type == "allgather"
        self._routed: Tensor | None = None
        self._hook = moe.router.register_forward_hook(self._see) if self._gathers else None

    def remove(self) -> None:
        """Unhook."""
        if self._hook is not None:
            self._hook.remove()

    def matches(self, experts: Tensor) -> Tensor:
        """`[N]` bool: the dispatcher sends each local token to exactly its ids in `experts` `[N, K]`."""
        dispatcher = self._moe.token_dispatcher
        if not self._gathers:
            # It sends tokens by the whole map alone.
            return same_set(self._checked(dispatcher.routing_map, len(experts)), experts)
        routed, self._routed = self._checked(self._routed, len(experts)), None
        start = dispatcher.tp_ep_group.rank() * len(experts) if dispatcher.tp_ep_group.size() > 1 else 0
        local = dispatcher.local_map[start : start + len(experts)]
        first, last = dispatcher.local_expert_indices[0], dispatcher.local_expert_indices[-1]
        unchanged: Tensor = (local == routed[:, first : last + 1]).all(1)
        return same_set(routed, experts) & unchanged

    def _see(self, _router: Any, _args: Any, output: tuple[Tensor, Tensor]) -> None:
        self._routed = output[1]

    @staticmethod
    def _checked(routing_map: Tensor | None, num_local: int) -> Tensor:
        if routing_map is None or routing_map.shape[0] != num_local:
            raise ReplayProofError(
                "the dispatcher's routing map does not describe this rank's tokens: "
                f"{None if routing_map is None else tuple(routing_map.shape)}, expected {num_local} rows"
            )
        return routing_map
