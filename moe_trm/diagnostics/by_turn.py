"""Mismatch by turn: whether it grows along a conversation. Shape letters: B sequences, T tokens."""

from __future__ import annotations

from moe_trm.corrections.evidence import Evidence
from moe_trm.methods import summable
from moe_trm.methods.limits import LAST_TURN
from moe_trm.ratios import clamp_log_ratio


def by_turn(evidence: Evidence) -> summable.Summable:
    """`turns/engine_k3/<turn>`: mean(e^x - 1 - x) over the sampled tokens of each turn, x the engine's log-ratio.

    Turn 0 is the first answer of a conversation, and 7 the last one with a figure of its own: `turns/engine_k3/8_up` is
    of all after it. Where engine and lag are not known apart it is `turns/merged_k3/<turn>`. It is
    `turns/total_k3/<turn>` where the learner made no pass of its own. Empty where turns are not known.
    """
    if evidence.turn_ids is None:
        return {}
    name = evidence.ratios.known[0]
    x = clamp_log_ratio(evidence.ratios.get(name).detach())
    k3 = (x.expm1() - x).clamp(min=0.0)
    turns, mask = evidence.turn_ids, evidence.mask
    masks_by_turn = {str(turn): turns == turn for turn in range(LAST_TURN + 1)}
    masks_by_turn[f"{LAST_TURN + 1}_up"] = turns > LAST_TURN
    return summable.add(
        summable.mean(f"turns/{name}_k3/{turn}", k3, mask & turn_mask) for turn, turn_mask in masks_by_turn.items()
    )
