"""The live panel on a terminal: the step's phase, its metrics, and the verdict."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moe_trm.observe.server_log import waiting_for
from moe_trm.observe.sinks import Sink
from moe_trm.types import ServerState

WHOLE = ("step", "eval")
"""Phases that are no part of a step."""
RECENT = 40
BLOCKS = "▁▂▃▄▅▆▇█"
# Label, metric (the first that is known) and format, three to a line.
FIGURES: Sequence[tuple[str, tuple[str, ...], str]] = (
    ("reward", ("reward/mean",), "{:.3f}"),
    ("evaluation", ("eval/accuracy", "eval/reward"), "{:.3f}"),
    ("length", ("response/length_mean",), "{:.1f}"),
    ("engine k3", ("engine/k3_kl",), "{:.1e}"),
    ("engine and lag k3", ("merged/k3_kl",), "{:.1e}"),
    ("staleness k3", ("staleness/k3_kl",), "{:.1e}"),
    ("total k3", ("total/k3_kl",), "{:.1e}"),
    ("flips, engines", ("routing/native_flip_rate",), "{:.2%}"),
    ("flips, live router", ("routing/local_flip_rate",), "{:.2%}"),
    ("replayed", ("replay/applied_fraction",), "{:.0%}"),
    ("kept", ("correction/kept_fraction",), "{:.1%}"),
    ("rejected", ("ledger/rejected",), "{:.0f}"),
    ("grad norm", ("optimizer/grad_norm",), "{:.2f}"),
    ("tokens/s", ("rollout/tokens_per_s",), "{:.0f}"),
    ("servers", ("rollout/servers",), "{:.0f}"),
    ("version", ("weights/version",), "{:.0f}"),
    ("age, oldest", ("rollout/age_max",), "{:.0f}"),
)


class LivePanel(Sink):
    """Redrawn twice a second from the first phase on; the last picture stays.

    What a step did not measure keeps its last value.
    """

    def __init__(self, name: str, steps: int, console: Console | None = None) -> None:
        self._name, self._steps = name, steps
        self._live = Live(self, console=console, refresh_per_second=2, transient=False)
        self._step = 0
        self._phase, self._entered = "starting", time.monotonic()
        self._parts: list[str] = []
        self._known: dict[str, float | str] = {}
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._ends: deque[float] = deque(maxlen=11)
        self._servers: Sequence[ServerState] = ()
        self._updated_s = 0.0
        self._error = ""

    def enter(self, phase: str) -> None:
        self._live.start()
        self._phase, self._entered = phase, time.monotonic()
        if phase not in (*WHOLE, *self._parts):
            self._parts.append(phase)

    def servers(self, states: Sequence[ServerState]) -> None:
        self._live.start()
        self._servers, self._updated_s = states, time.monotonic()

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._live.start()
        self._step = step
        self._ends.append(time.monotonic())
        if "verdict" in metrics:
            self._known.pop("verdict/config", None)
        self._known.update(metrics)
        if "reward/mean" in metrics:
            self._rewards.append(float(metrics["reward/mean"]))
        self._phase, self._entered = "between steps", time.monotonic()
        self._live.refresh()

    def failed(self, error: BaseException) -> None:
        self._live.start()
        self._error = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        self._phase = "ended"
        self._live.stop()

    def __rich__(self) -> Box:
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(f"step {self._step}/{self._steps}", ProgressBar(self._steps, self._step), self._remaining())
        trouble = [Text(self._error, style="bold red")] if self._error else []
        body = Group(
            *trouble, head, self._phases(), *self._lost_servers(), Text(), self._figures(), Text(), self._verdict()
        )
        return Box(body, title=self._name, title_align="left", border_style="dim")

    def _remaining(self) -> str:
        if len(self._ends) < 2 or self._step >= self._steps:
            return ""
        step_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f"{clock(step_s * (self._steps - self._step))} left"

    def _phases(self) -> Table:
        """The phase of this moment, and the last step's phases as bars of one length scale."""
        table = Table.grid(padding=(0, 1))
        elapsed = "" if self._phase == "ended" else f" {time.monotonic() - self._entered:.0f} s"
        table.add_row("now", Text(f"{self._phase}{elapsed}", style="bold"), "")
        spent = {name: float(self._known[key]) for name in self._parts if (key := f"time/{name}_s") in self._known}
        longest = max(spent.values(), default=0.0)
        for name, seconds in spent.items():
            bar = Text("█" * max(1, round(24 * seconds / longest)) if longest else "", style="blue")
            table.add_row(Text(name, style="dim"), bar, f"{seconds:.2f} s")
        return table

    def _lost_servers(self) -> list[Text]:
        """One line for each server that was out of service, or awaited, at the last look."""
        since = time.monotonic() - self._updated_s
        lost = [(state, state.lost_s + since) for state in self._servers if state.lost_s is not None]
        num_serving = len(self._servers) - len(lost)
        return [
            Text(
                f"rollout server {state.url} is out of service for {clock(seconds)}, {num_serving} of "
                f"{len(self._servers)} in service: {state.why}",
                style="bold red",
            )
            for state, seconds in lost
        ] + [Text(waiting_for(state)) for state in self._servers if state.awaited_s is not None]

    def _figures(self) -> Table:
        table = Table.grid(padding=(0, 2))
        cells = []
        for label, metrics, form in FIGURES:
            value = next((self._known[name] for name in metrics if name in self._known), None)
            cells += [Text(label, style="dim"), Text("–" if value is None else form.format(value))]
        for start in range(0, len(cells), 6):
            table.add_row(*cells[start : start + 6])
        if len(self._rewards) > 1:
            table.add_row(Text("rewards", style="dim"), Text(sparkline(self._rewards), style="blue"))
        return table

    def _verdict(self) -> Text:
        setting = str(self._known.get("verdict/config", ""))
        usual = "yellow" if setting else "green"
        style = "bold red" if self._known.get("verdict/case") in ("stalled", "jump", "labels", "routes") else usual
        text = Text(str(self._known.get("verdict", "No step has been judged yet.")), style=style)
        return text.append(f" Try {setting}.") if setting else text


def sparkline(values: Sequence[float]) -> str:
    """One block per value, from the lowest to the highest."""
    low, high = min(values), max(values)
    return "".join(BLOCKS[round((value - low) / (high - low) * 7) if high > low else 0] for value in values)


def clock(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `2 h 05 min`."""
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s} s"
    if total_s < 3600:
        return f"{total_s // 60} min {total_s % 60:02} s"
    return f"{total_s // 3600} h {total_s % 3600 // 60:02} min"
