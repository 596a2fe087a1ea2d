"""Random tasks on automata: an answer is right until a mistake, which may or may not be made good."""

from __future__ import annotations

import numpy as np

from benchmarks.evidence.chain import Array, Chain

STATES, TOKENS = 8, 6


def reasoning(
    seed: int, length: int, *, recovery: float = 0.0, success: float = 0.5, states: int = STATES
) -> tuple[Chain, Array]:
    """A task and the logits of a policy, `[2 * states, TOKENS]`.

    The last token is a mistake: from a right context it leads to a wrong one. There the last token makes it good again.
    The reward is 1 for an answer that ends right.

    Args:
        seed: of the automaton and the policy.
        length: tokens of an answer.
        recovery: mean probability of the last token in a wrong context; 0: a mistake is never made good.
        states: contexts while the answer is right, and as many while it is wrong.
        success: about the probability that no mistake is made at all.
    """
    rng = np.random.default_rng(seed)
    next_SV = rng.integers(0, states, (2 * states, TOKENS))
    next_SV[states:] += states
    next_SV[:states, -1] += states
    if recovery:
        next_SV[states:, -1] -= states
    logits_SV = rng.normal(size=(2 * states, TOKENS))
    mistake = 1 - success ** (1 / length)
    for state in range(2 * states):
        rate = (mistake if state < states else recovery or 1 / TOKENS) * np.exp(0.5 * rng.normal() - 0.125)
        log_mass = np.log(np.exp(logits_SV[state, :-1]).sum())
        logits_SV[state, -1] = log_mass + np.log(rate / (1 - rate))
    reward_S = np.repeat([1.0, 0.0], states)
    return Chain(next_SV, reward_S, first=0, length=length), logits_SV
