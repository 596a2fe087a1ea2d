"""The number of rollout servers that keeps the learner busy, by a rule, and what the simulation says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_trm.tools.plan.simulate import Timeline

BUSY = 0.05
"""Share of the time in which a learner may wait and still counts as busy."""
LARGEST = 64
"""Servers at most that are simulated, for the time it takes."""


@dataclass(frozen=True)
class Provision:
    """The rule's number of servers, and the learner's idle share with it.

    Attributes:
        servers: their number; None where no number is enough.
        why: the reason for None; else empty.
        idle: simulated idle share of the learner with `servers`, after the first step; None where it was not simulated.
        idle_below: the same with one server fewer; None where that is none.
    """

    servers: int | None
    why: str = ""
    idle: float | None = None
    idle_below: float | None = None

    @property
    def holds(self) -> bool:
        """True when the simulation finds the learner busy with that many."""
        return self.idle is not None and self.idle <= BUSY


def provision(
    step_tokens: float,
    server_tokens_s: float,
    train_s: float,
    push_s: float,
    slack: int,
    simulated: Callable[[int], Timeline],
) -> Provision:
    """Fewest servers with which batches are there in time: n with D / (n mu) <= min(T, s T - P).

    D tokens of a step, mu tokens per second of a server, T seconds of training, P of a push. The slack s is the number
    of steps between a push and the first step that needs its weights: eta - (k - 1) with the bound eta on age and a
    push every k steps. The first term says that batches are made as fast as they are trained, the second that the
    first batch of new weights is there when its turn comes. Source: the overlap model of ECHO-2 (arXiv 2602.02192)
    relates training, dissemination and throughput in this way; the form, with drained servers left out, is ours.

    Args:
        step_tokens, server_tokens_s, train_s, push_s, slack: D, mu, T, P, s.
        simulated: steps with a number of servers.
    """
    if slack < 1:
        return Provision(None, "the next batch needs weights that are pushed when the last one is trained")
    time_s = min(train_s, slack * train_s - push_s)
    if time_s <= 0:
        return Provision(None, "a push takes longer than the steps that the bound on age leaves it")
    servers = max(1, math.ceil(step_tokens / (server_tokens_s * time_s) - 1e-9))
    if servers > LARGEST:
        return Provision(servers)
    below = simulated(servers - 1).learner_idle_later if servers > 1 else None
    return Provision(servers, "", simulated(servers).learner_idle_later, below)
