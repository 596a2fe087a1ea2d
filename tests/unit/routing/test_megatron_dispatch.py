"""The expert sets of a dispatcher that holds the columns of its own experts, for the tokens of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from routing.errors import ReplayProofError
from routing.hosts.megatron_dispatch import Dispatched

N, E, K, RANKS = 5, 8, 2, 2


class Router(nn.Module):
    def forward(self, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        return routing_map.float(), routing_map


def sets(seed: int) -> tuple[Tensor, Tensor]:
    """Ids `[N, K]` and their map `[N, E]`."""
    ids = torch.rand(N, E, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :K]
    return ids, torch.zeros(N, E, dtype=torch.bool).scatter_(1, ids, value=True)


def seen(rank: int) -> tuple[Dispatched, Any, Tensor]:
    """Rank `rank` of two has half of the experts; the tokens of both are gathered."""
    maps = [sets(seed)[1] for seed in range(RANKS)]
    own = [*range(rank * E // RANKS, (rank + 1) * E // RANKS)]
    dispatcher = SimpleNamespace(
        tp_ep_group=SimpleNamespace(rank=lambda: rank, size=lambda: RANKS),
        local_map=torch.cat(maps)[:, own],
        local_expert_indices=own,
    )
    moe = SimpleNamespace(
        config=SimpleNamespace(moe_token_dispatcher_type="allgather"), router=Router(), token_dispatcher=dispatcher
    )
    dispatched = Dispatched(moe)
    moe.router(maps[rank])
    return dispatched, dispatcher, sets(rank)[0]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_token_matches_where_router_and_dispatcher_have_its_set(rank: int) -> None:
    dispatched, dispatcher, experts = seen(rank)
    dispatcher.local_map[rank * N + 3, 0] ^= True  # changed behind the router
    experts[1] = (experts[1] + 1) % E  # another set was due
    assert dispatched.matches(experts).tolist() == [True, False, True, False, True]
    with pytest.raises(ReplayProofError, match="does not describe this rank's tokens"):
        dispatched.matches(experts)  # one forward, one answer


def test_another_ranks_tokens_are_not_this_ones() -> None:
    dispatched, dispatcher, experts = seen(1)
    dispatcher.local_map[:N] = ~dispatcher.local_map[:N]
    assert dispatched.matches(experts).all()
