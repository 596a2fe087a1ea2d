"""Speed of servers and learner while both compute on the cores of one machine.

Each side computes for a share b of its time and waits for the rest of it: for a message, a file, a lock. Only while
both compute do they slow each other down, each to a speed g of what it reaches alone. A queue whose server divides its
rate among who is there has a closed form for two customers that come back: both go on at

    S = 1 / (1 + b1 b2 (1 / g - 1))

of their speed alone. On one core g is 1/2, and S is 1 / (1 + b1 b2). It depends on mean times alone, not on how they
vary.

Two threads of one core, memory and caches are shared, too. So n cores that all compute do the work of fewer, and a core
does not need to be a whole one: `crowded` is its speed while all of them compute, as a share of its speed alone.

Source: mean value analysis of closed networks with a rate that depends on the queue; Reiser and Lavenberg, Journal of
the ACM 27 (1980), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cores:
    """The cores of a machine.

    Attributes:
        number: of processors that threads can run on.
        crowded: speed of one while all compute, as a share of its speed alone, from 1 / number to 1.
    """

    number: int
    crowded: float = 1.0

    def rate(self, threads: float) -> float:
        """Work per second of so many threads in the mean, in cores that have the machine to themselves.

        Straight lines between one thread and as many as there are cores.
        """
        if threads <= 1 or self.number == 1:
            return min(threads, 1.0)
        together = self.number * self.crowded
        return min(together, 1 + (threads - 1) * (together - 1) / (self.number - 1))

    def sharing(self, servers: float, learner: float) -> float:
        """Speed of both sides while both have work, as a share of their speed alone: S.

        A side with at most one core in the mean has one thread, which computes for that share of the time. One with
        more always computes, with so many threads.

        Args:
            servers, learner: cores that each side keeps busy while it has work and the other one has none.
        """
        if not servers or not learner:
            return 1.0
        sides = [max(1.0, cores) for cores in (servers, learner)]
        shared_speed = min(1.0, self.rate(sum(sides)) / sum(map(self.rate, sides)))
        overlap = min(1.0, servers) * min(1.0, learner)
        return 1 / (1 + overlap * (1 / shared_speed - 1))
