"""Mismatch by class of token: whether it grows along a conversation or an answer, and which versions or servers
carry it.

Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_trm.corrections.evidence import Evidence
from moe_trm.diagnostics.strata import LENGTH_EDGES
from moe_trm.methods import summable
from moe_trm.methods.limits import LAST_AGE, LAST_SERVER, LAST_TURN
from moe_trm.ratios import clamp_log_ratio


def by_turn(evidence: Evidence) -> summable.Summable:
    """`turns/engine_k3/<turn>`: mean(e^x - 1 - x) over the sampled tokens of each turn, x the engine's log-ratio.

    Turn 0 is the first answer of a conversation, and 7 the last one with a figure of its own: `turns/engine_k3/8_up` is
    of all after it. Where engine and lag are not known apart it is `turns/merged_k3/<turn>`. It is
    `turns/total_k3/<turn>` where the learner made no pass of its own. Empty where turns are not known.
    """
    if evidence.turn_ids is None:
        return {}
    turns = evidence.turn_ids
    masks = {str(turn): turns == turn for turn in range(LAST_TURN + 1)}
    return _k3_of("turns", evidence, masks | {f"{LAST_TURN + 1}_up": turns > LAST_TURN})


def by_place(evidence: Evidence) -> summable.Summable:
    """`places/engine_k3/<from>_<to>`: the same by the number of the sampled token in its row, the first being 1.

    The edges are those of `acceptance`; the name has the ratio that `by_turn` has.
    """
    place_BT, masks, low = evidence.mask.cumsum(1), dict[str, Tensor](), 1
    for high in LENGTH_EDGES:
        masks[f"{low}_{high}"] = (place_BT >= low) & (place_BT <= high)
        low = high + 1
    return _k3_of("places", evidence, masks | {f"{low}_up": place_BT >= low})


def by_age(evidence: Evidence, version: int) -> summable.Summable:
    """`ages/engine_k3/<age>`: the same by the versions that lie between the token's and the step's own, `version`.

    The last age with a figure of its own is 7. Empty where versions are not known.
    """
    if evidence.versions is None:
        return {}
    ages = version - evidence.versions
    masks = {str(age): ages == age for age in range(LAST_AGE + 1)}
    return _k3_of("ages", evidence, masks | {f"{LAST_AGE + 1}_up": ages > LAST_AGE})


def by_server(evidence: Evidence, servers: Sequence[int]) -> summable.Summable:
    """`servers/engine_k3/<place>`: the same by the place of the server among those of the run, of each row.

    The last server with a figure of its own is 15. Rows of no known server, -1, have none.
    """
    servers_B1 = torch.tensor(servers, device=evidence.mask.device)[:, None].expand_as(evidence.mask)
    masks = {str(place): servers_B1 == place for place in range(LAST_SERVER + 1)}
    return _k3_of("servers", evidence, masks | {f"{LAST_SERVER + 1}_up": servers_B1 > LAST_SERVER})


def _k3_of(kind: str, evidence: Evidence, masks: Mapping[str, Tensor]) -> summable.Summable:
    """Mean k3 of the first known ratio in each class of tokens."""
    name = evidence.ratios.known[0]
    x = clamp_log_ratio(evidence.ratios.get(name).detach())
    k3 = (x.expm1() - x).clamp(min=0.0)
    return summable.add(
        summable.mean(f"{kind}/{name}_k3/{number}", k3, evidence.mask & mask) for number, mask in masks.items()
    )
