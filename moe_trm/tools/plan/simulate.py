"""Training steps in virtual time: servers that decode, a learner that trains, weight pushes between them.

A discrete-event simulation without chance. It keeps the rules of docs/pipeline.md: samples are issued in order and at
most `staleness` versions ahead; batches are trained in order of issue; a push, after every `push_every` steps, drains
its servers or interrupts them, all at once or one after the other; the next push waits until every server has this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf


@dataclass(frozen=True)
class SimulatedServers:
    """The rollout servers.

    Attributes:
        servers: their number.
        slots: requests that one decodes together.
        rate: tokens per second of one of `n` requests that are decoded together.
        push_s: seconds of loading new weights.
        prefill_tokens_s: prefix tokens per second when interrupted samples go on; infinite: no cost.
        in_flight: requests at all servers together, at most.
        sharing: speed of servers and of the learner while both compute, as a share of their speed alone; 1: each has
            hardware of its own.
    """

    servers: int
    slots: int
    rate: Callable[[int], float]
    push_s: float = 0.0
    prefill_tokens_s: float = inf
    in_flight: float = inf
    sharing: float = 1.0


@dataclass(frozen=True)
class SimulatedSchedule:
    """Distance that sampling runs ahead, and the effect of a push.

    Attributes:
        staleness: `pipeline.max_staleness`.
        interrupts: a push interrupts samples (`pipeline.partial`) instead of draining its servers.
        learner_sends: the learner takes part in the push until every server has it (`sync.method=distributed`).
        push_every: `pipeline.push_every`, steps between two pushes.
        rolling: `pipeline.rolling_push`, servers are given weights one after the other.
        in_turn: samples of a step are issued when the learner asks for it (`pipeline.mode=sync`).
        parts: minibatches that train as their samples arrive (`pipeline.stream`).
    """

    staleness: int
    interrupts: bool = False
    learner_sends: bool = False
    push_every: int = 1
    rolling: bool = False
    in_turn: bool = False
    parts: int = 1


@dataclass(frozen=True)
class Timeline:
    """Times of the simulated steps.

    Attributes:
        ends_s: when each step's training ended.
        learner_busy_s, server_busy_s, slot_s: seconds of training; of decoding, summed over servers; of requests.
        fleet: the servers.
        versions: of the weights that sampled each step, ascending.
    """

    ends_s: tuple[float, ...]
    learner_busy_s: float
    server_busy_s: float
    slot_s: float
    fleet: SimulatedServers
    versions: tuple[tuple[int, ...], ...] = ()

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, the first included."""
        return self.ends_s[-1] / len(self.ends_s)

    @property
    def learner_idle(self) -> float:
        """Share of the time in which the learner waits."""
        return 1 - self.learner_busy_s / self.ends_s[-1]

    @property
    def learner_idle_later(self) -> float:
        """The same after the first step, for whose samples everybody has to wait; 0 where there is no other."""
        later, took = len(self.ends_s) - 1, self.ends_s[-1] - self.ends_s[0]
        return 1 - self.learner_busy_s * later / len(self.ends_s) / took if took else 0.0

    @property
    def server_idle(self) -> float:
        """Share of the time in which a server decodes nothing."""
        return 1 - self.server_busy_s / (self.fleet.servers * self.ends_s[-1])

    @property
    def slot_use(self) -> float:
        """Share of the servers' slots that hold a request, in the mean over time."""
        return self.slot_s / (self.fleet.servers * self.fleet.slots * self.ends_s[-1])


def simulate(
    batches: Sequence[Sequence[int]],
    train_s: float,
    fleet: SimulatedServers,
    schedule: SimulatedSchedule,
    older_s: float = 0.0,
) -> Timeline:
    """Train every batch of answer lengths and say when each ended.

    A batch takes `train_s` seconds, and `older_s` more for each version before the learner's that sampled it.
    """
    return _Run(batches, train_s, older_s, fleet, schedule).timeline()


@dataclass
class _Server:
    """One server. `progress` counts the tokens that each request decoded since the beginning of time.

    A request that starts at progress p and has n tokens ends at progress p + n.
    """

    fleet: SimulatedServers
    now: float = 0.0
    progress: float = 0.0
    loading_until: float = 0.0
    running: list[tuple[float, int, float]] = field(default_factory=list)
    owes_push: bool = False
    version: int = 0
    busy_s: float = 0.0
    slot_s: float = 0.0
    speed: float = 1.0

    @property
    def decodes(self) -> bool:
        return bool(self.running) and not self.is_loading

    @property
    def is_loading(self) -> bool:
        return self.now < self.loading_until

    @property
    def admits(self) -> bool:
        return not self.owes_push and not self.is_loading and len(self.running) < self.fleet.slots

    def next_event(self) -> float:
        if self.is_loading:
            return self.loading_until
        if not self.running:
            return inf
        remaining = max(0.0, self.running[0][0] - self.progress)
        return self.now + remaining / (self.speed * self.fleet.rate(len(self.running)))

    def advance(self, to: float) -> None:
        if self.decodes:
            self.progress += (to - self.now) * self.speed * self.fleet.rate(len(self.running))
            self.busy_s += to - self.now
            self.slot_s += (to - self.now) * len(self.running)
        self.now = to

    def start(self, sample: int, tokens: int) -> None:
        heappush(self.running, (self.progress + tokens, sample, self.progress))

    def finished(self) -> list[int]:
        done = []
        # Times are floats: a request within a billionth of a token of its end has ended.
        while self.running and self.running[0][0] <= self.progress + 1e-9 * max(1.0, self.progress):
            done.append(heappop(self.running)[1])
        return done

    def load(self, version: int) -> None:
        """Load new weights now; what is running goes on after its prefixes were computed again."""
        self.version, self.owes_push = version, False
        prefixes = sum(self.progress - start for _, _, start in self.running)
        self.loading_until = self.now + self.fleet.push_s + prefixes / self.fleet.prefill_tokens_s


class _Run:
    def __init__(
        self,
        batches: Sequence[Sequence[int]],
        train_s: float,
        older_s: float,
        fleet: SimulatedServers,
        schedule: SimulatedSchedule,
    ) -> None:
        self._batches, self._schedule = batches, schedule
        self._train_s, self._older_s = train_s / schedule.parts, older_s / schedule.parts
        self._samples = [(step, tokens) for step, batch in enumerate(batches) for tokens in batch]
        self._part_of = [place * schedule.parts // len(batch) for batch in batches for place in range(len(batch))]
        self._left = [[0] * schedule.parts for _ in batches]
        for (step, _), part in zip(self._samples, self._part_of, strict=True):
            self._left[step][part] += 1
        self._part = 0
        self._servers = [_Server(fleet) for _ in range(fleet.servers)]
        self._fleet, self._now, self._issued, self._flying = fleet, 0.0, 0, 0
        self._version, self._newest, self._pushing = 0, 0, False
        self._turns: list[_Server] = []
        self._used: list[list[set[int]]] = [[set() for _ in range(schedule.parts)] for _ in batches]
        self._trained = 0
        self._training_until: float | None = None
        self._speed, self._busy_s = 1.0, 0.0
        self._ends: list[float] = []

    def timeline(self) -> Timeline:
        self._settle()
        while len(self._ends) < len(self._batches):
            self._advance(self._next_event())
            self._settle()
        return Timeline(
            tuple(self._ends),
            self._busy_s,
            sum(server.busy_s for server in self._servers),
            sum(server.slot_s for server in self._servers),
            self._fleet,
            tuple(tuple(sorted(set().union(*parts))) for parts in self._used),
        )

    def _next_event(self) -> float:
        at = min(server.next_event() for server in self._servers)
        # A step that has ended waits for the push before its own, which is a server's event.
        if self._computes and self._training_until is not None:
            at = min(at, self._training_until)
        assert at < inf, "nothing will ever happen again"
        return at

    @property
    def _computes(self) -> bool:
        """The learner trains; a step that has ended and waits for the push before its own does not."""
        return self._training_until is not None and len(self._ends) == self._trained

    def _advance(self, to: float) -> None:
        if self._computes:
            self._busy_s += to - self._now
        self._now = to
        for server in self._servers:
            server.advance(to)
            for sample in server.finished():
                self._left[self._samples[sample][0]][self._part_of[sample]] -= 1
                self._flying -= 1

    def _settle(self) -> None:
        """Everything that happens at this instant, in the order of cause and effect."""
        self._end_training()
        self._push()
        # Samples that waited for a push are asked for before a learner that waited for it hands over the next weights.
        self._issue()
        self._end_training()
        self._push()
        sends = self._pushing and self._schedule.learner_sends
        ready = self._trained < len(self._batches) and not self._left[self._trained][self._part]
        if self._training_until is None and ready and not sends:
            self._training_until = self._now + self._work_s() / self._speed
        self._issue()
        self._share()

    def _work_s(self) -> float:
        """Seconds of training the part that is there, on a machine of the learner's own."""
        older = self._used[self._trained][self._part] - {self._trained}
        return self._train_s + self._older_s * len(older)

    def _sampled_by(self, server: _Server, sample: int) -> None:
        step, part = self._samples[sample][0], self._part_of[sample]
        self._used[step][part].add(server.version)

    def _share(self) -> None:
        """Slow both sides down while both compute; what is left of the training takes longer by as much."""
        both_compute = self._computes and any(server.decodes for server in self._servers)
        speed = self._fleet.sharing if both_compute else 1.0
        if speed == self._speed:
            return
        if self._computes and self._training_until is not None:
            self._training_until = self._now + (self._training_until - self._now) * self._speed / speed
        for server in self._servers:
            server.speed = speed
        self._speed = speed

    def _end_training(self) -> None:
        if self._training_until is None or self._now < self._training_until:
            return
        if self._part < self._schedule.parts - 1:
            self._part, self._training_until = self._part + 1, None
            return
        if len(self._ends) == self._trained:
            self._ends.append(self._now)
        pushes = len(self._ends) % self._schedule.push_every == 0
        # The weights can be handed over only when the push before is done everywhere.
        if pushes and self._pushing:
            return
        self._trained, self._part, self._training_until = len(self._ends), 0, None
        if pushes:
            self._pushing, self._newest, self._turns = True, self._trained, [*self._servers]
            self._call_servers()

    def _call_servers(self) -> None:
        """Servers that have to take the new weights now: all that wait for their turn, or the first of them."""
        called = self._turns[:1] if self._schedule.rolling else self._turns
        for server in called:
            server.owes_push = True
        self._turns = self._turns[len(called) :]

    def _push(self) -> None:
        if not self._pushing:
            return
        for server in self._servers:
            if server.owes_push and (self._schedule.interrupts or not server.running):
                server.load(self._newest)
                for _, sample, _ in server.running:
                    self._sampled_by(server, sample)
        if any(server.owes_push or server.is_loading for server in self._servers):
            return
        if self._turns:
            self._call_servers()
            self._push()
            return
        self._pushing, self._version = False, self._newest

    def _issue(self) -> None:
        while self._issued < len(self._samples) and self._flying < self._fleet.in_flight:
            step, tokens = self._samples[self._issued]
            free = [server for server in self._servers if server.admits]
            early = self._schedule.in_turn and step > self._trained
            if early or step > self._version + self._schedule.staleness or not free:
                return
            least_loaded = min(free, key=lambda server: len(server.running))
            least_loaded.start(self._issued, tokens)
            self._sampled_by(least_loaded, self._issued)
            self._issued += 1
            self._flying += 1
