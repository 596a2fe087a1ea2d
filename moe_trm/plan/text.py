"""A plan as a page of at most 80 columns, and as data."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from moe_trm.plan.build import Plan, Simulated, lines
from moe_trm.plan.candidates import Judged
from moe_trm.plan.cluster import SERVER_SHARE
from moe_trm.plan.figures import Basis
from moe_trm.plan.kept import keeps_scores
from moe_trm.plan.memory import BASES

WIDTH = 80
SHOWN = 3
"""Other layouts that are shown."""
NEAR = 0.02
"""Share of a step's time that younger samples may cost."""


def page(plan: Plan) -> str:
    """The whole plan for a terminal."""
    parts = (_parameters, _memory, _others, _wire, _serving, _modes, _verdict, _assumptions)
    return "\n\n".join("\n".join(part(plan)) for part in parts)


def as_data(plan: Plan) -> dict[str, Any]:
    """The whole plan for programs. Bytes, seconds and shares; every section says what it rests on."""
    kinds = {
        kind: {"total": total, "active": active, "basis": "given"}
        for kind, (total, active) in plan.model.by_kind().items()
    }
    timelines = [
        {
            "mode": found.mode.mode,
            "max_staleness": found.mode.staleness,
            "partial": found.mode.partial,
            "push_every": found.mode.push_every,
            "rolling_push": found.mode.rolling,
            "stream": found.mode.parts > 1,
            "step_s": found.timeline.step_s,
            "learner_idle": found.timeline.learner_idle,
            "server_idle": found.timeline.server_idle,
            "slot_use": found.timeline.slot_use,
            "basis": found.basis,
        }
        for found in plan.modes
    ]
    return {
        "fits": plan.fits,
        "parameters": {
            "total": plan.model.total(),
            "active": plan.model.active(),
            "prediction_layers": plan.model.prediction_total,
            "adapters": plan.model.adapter_total,
            "kinds": kinds,
        },
        "layout": _layout_data(plan.layout),
        "host_bytes": {"value": plan.host_bytes, "basis": "given"},
        "other_layouts": [_layout_data(other) for other in plan.others],
        "wire_bytes": {
            name: {"value": figure.value, "basis": figure.basis, "note": figure.note}
            for name, figure in plan.wire.items()
        },
        "servers": {
            "number": plan.serving.servers,
            "gpus": plan.serving.gpus,
            "bytes_per_gpu": plan.serving.bytes_per_gpu,
            "fits": plan.serving.fits,
            "smallest_gpus": plan.serving.smallest_gpus,
            "tokens_per_s": plan.decode_tokens_s.value,
            "basis": plan.decode_tokens_s.basis,
        },
        "learner": {
            "ranks": plan.ranks,
            "train_s": plan.train_s.value,
            "columns_per_token": plan.columns.value,
            "basis": plan.train_s.basis,
        },
        "modes": timelines,
        "provision": {
            "servers": plan.provision.servers,
            "why": plan.provision.why,
            "learner_idle": plan.provision.idle,
            "learner_idle_below": plan.provision.idle_below,
            "basis": plan.modes[0].basis,
        },
        "bottleneck": bottleneck(plan),
        "settings": settings(plan),
        "assumptions": [{"option": option, "value": value, "meaning": text} for option, value, text in assumed(plan)],
    }


def _layout_data(judged: Judged) -> dict[str, Any]:
    return {
        "parallel": judged.parallel.model_dump(),
        "recompute": judged.recompute,
        "stage": judged.stage,
        "bytes": {kind: {"value": value, "basis": BASES[kind]} for kind, value in judged.memory.items()},
        "total_bytes": judged.total,
        "waiting": judged.waiting,
    }


def _parameters(plan: Plan) -> Iterator[str]:
    model = plan.model
    yield f"{'parameters':<16}{'total':>10}{'per token':>12}   given"
    for kind, (total, active) in model.by_kind().items():
        yield f"  {kind:<14}{_count(total):>10}{_count(active):>12}"
    yield f"  {'all':<14}{_count(model.total()):>10}{_count(model.active()):>12}"
    if model.adapters:
        yield f"  {'adapters':<14}{_count(model.adapter_total):>10}{'':>12}   train in place of these"
    if model.prediction:
        yield f"  {'MTP layers':<14}{_count(model.prediction_total):>10}{'':>12}   not trained, not in `all`"


def _memory(plan: Plan) -> Iterator[str]:
    layout, backend = plan.layout, plan.config.learner.backend
    where = f", pipeline stage {layout.stage}" if layout.parallel.pipeline > 1 else ""
    yield f"memory of a learner rank of {plan.ranks} ({backend}{where})"
    for kind, value in layout.memory.items():
        yield f"  {kind:<14}{_gb(value):>10}   {BASES[kind]}"
    room = "fits" if layout.total <= plan.room else "DOES NOT FIT"
    yield f"  {'all':<14}{_gb(layout.total):>10}   of {_gb(plan.room).strip()}: {room}"
    if plan.host_bytes:
        limit = plan.config.pipeline.snapshot_gib * 2**30
        verdict = "fits" if plan.host_bytes <= limit else "OVER pipeline.snapshot_gib"
        yield f"  {'host':<14}{_gb(plan.host_bytes):>10}   given: older weights, {verdict}"


def _others(plan: Plan) -> Iterator[str]:
    if plan.config.learner.backend == "deepspeed":
        yield "other layouts: learner.deepspeed.zero_stage=1, 2 or 3"
        return
    yield f"other layouts that fit ({len(plan.others)}); memory assumed"
    yield f"  {'tensor':>6}{'pipeline':>9}{'layers':>8}{'context':>8}{'expert':>7}{'memory':>11}{'waiting':>9}"
    for other in plan.others[:SHOWN]:
        sizes = other.parallel
        waits = f"{other.waiting:.0%}"
        yield (
            f"  {sizes.tensor:>6}{sizes.pipeline:>9}{other.spread:>8}{sizes.context:>8}{sizes.expert:>7}"
            f"{_gb(other.total):>11}{waits:>9}"
        )


def _wire(plan: Plan) -> Iterator[str]:
    yield "bytes of a step"
    for name, figure in plan.wire.items():
        yield f"  {name:<16}{_gb(figure.value):>10}   {figure.basis}: {figure.note}"


def _serving(plan: Plan) -> Iterator[str]:
    serving = plan.serving
    room = SERVER_SHARE * plan.room
    verdict = "fits" if serving.fits else "DOES NOT FIT"
    yield f"{serving.servers} server(s) of {serving.gpus} GPU(s)"
    yield f"  weights, cache{_gb(serving.bytes_per_gpu):>10}   of {_gb(room).strip()} of a GPU: {verdict}"
    smallest = serving.smallest_gpus
    yield f"  {'fewest GPUs':<14}{smallest if smallest else 'none':>10}   of a server that fits"
    yield f"  {'speed':<14}{plan.decode_tokens_s.value:>10,.0f}   tokens/s of one, {plan.decode_tokens_s.basis}"


def _modes(plan: Plan) -> Iterator[str]:
    basis: Basis = plan.modes[0].basis
    yield f"steps, simulated ({basis}); training alone takes {_seconds(plan.train_s.value)}"
    columns = plan.columns
    yield f"  {columns.value:.2f} columns computed for each token, {columns.basis}: {columns.note}"
    yield f"  {'mode':<9}{'staleness':>9}{'partial':>11}{'step':>10}{'learner idle':>14}{'servers idle':>14}"
    for found in plan.modes:
        line = found.timeline
        mark = "  *" if found is plan.configured else ""
        yield (
            f"  {found.mode.label:<14}{found.mode.staleness:>4}{found.mode.push:>11}{_seconds(line.step_s):>10}"
            f"{line.learner_idle:>14.0%}{line.server_idle:>14.0%}{mark}"
        )
    yield "  * as configured"
    yield from textwrap.wrap(provisioned(plan), WIDTH, subsequent_indent="  ")


def provisioned(plan: Plan) -> str:
    """The number of servers that keeps the learner busy, in a sentence."""
    found = plan.provision
    if found.servers is None:
        return f"servers that keep the learner busy: no number of them does, because {found.why}."
    words = f"servers that keep the learner busy, by the rule of ECHO-2: {found.servers}"
    if found.idle is None:
        return f"{words}; not simulated."
    words += f"; simulated, it then waits {found.idle:.0%} of the time"
    if found.idle_below is not None:
        words += f", and {found.idle_below:.0%} with {found.servers - 1}"
    return words + ("." if found.holds else ". Answers of unlike length need more, or pipeline.partial=interrupt.")


def _verdict(plan: Plan) -> Iterator[str]:
    yield from textwrap.wrap(f"bottleneck: {bottleneck(plan)}", WIDTH, subsequent_indent="  ")
    yield "settings to paste:"
    yield from (f"  {line}" for line in settings(plan))


def bottleneck(plan: Plan) -> str:
    """The first change to make, in a sentence."""
    if plan.layout.total > plan.room:
        kind = max(plan.layout.memory, key=lambda name: plan.layout.memory[name])
        return f"memory of the learner, most of it {kind}. {_advice(plan)}"
    if not plan.serving.fits:
        return "memory of the servers: raise rollout.server.tensor_parallel or lower rollout.server.max_total_tokens."
    line = plan.configured.timeline
    if line.learner_idle > line.server_idle:
        return (
            f"the servers: the learner waits {line.learner_idle:.0%} of the time. Give them more GPUs "
            "(SERVER_NODES of launch/slurm.sh, --server-nodes here) or more requests at once."
        )
    return f"the learner: the servers wait {line.server_idle:.0%} of the time. Give it more GPUs."


def _advice(plan: Plan) -> str:
    if plan.others:
        return "The settings below fit."
    if plan.config.learner.recompute != "full":
        return "No other layout fits either: try learner.recompute=full."
    return "No other layout fits either: take more nodes or a smaller learner.micro_batch_tokens."


def settings(plan: Plan) -> list[str]:
    """Overrides of the best layout that fits and of the fastest pipeline mode."""
    layout = plan.layout if plan.layout.total <= plan.room or not plan.others else plan.others[0]
    found = lines(layout, plan.config.learner.parallel).split()
    if plan.serving.smallest_gpus and not plan.serving.fits:
        found.append(f"rollout.server.tensor_parallel={plan.serving.smallest_gpus}")
    return [*found, *_mode_settings(plan, chosen_mode(plan))]


def chosen_mode(plan: Plan) -> Simulated:
    """The mode with the youngest samples among those within `NEAR` of the fastest."""
    fastest = min(mode.timeline.step_s for mode in plan.modes)
    near = (mode for mode in plan.modes if mode.timeline.step_s <= fastest * (1 + NEAR))
    return min(near, key=lambda found: (found.mode.staleness, found.timeline.step_s))


def _mode_settings(plan: Plan, fastest: Simulated) -> list[str]:
    mode = fastest.mode
    found = [f"pipeline.mode={mode.mode}", f"pipeline.max_staleness={mode.staleness}"]
    found.append(f"pipeline.partial={mode.partial}")
    own = plan.config.pipeline
    if (mode.push_every, own.push_every) != (1, 1):
        found.append(f"pipeline.push_every={mode.push_every}")
    if mode.rolling or own.rolling_push:
        found.append(f"pipeline.rolling_push={str(mode.rolling).lower()}")
    if mode.parts > 1 or own.stream:
        found.append(f"pipeline.stream={str(mode.parts > 1).lower()}")
    if mode.partial == "interrupt" and plan.config.sync.method == "distributed":
        found.append("sync.method=disk")
    return found


def assumed(plan: Plan) -> list[tuple[str, str, str]]:
    """Every assumption: the option that replaces it, its value, its meaning."""
    assumptions, gpu = plan.assumptions, plan.cluster.gpu
    efficiency, lengths = assumptions.efficiency, assumptions.lengths
    found = [
        ("--memory-gb", f"{gpu.memory_gb:g}", "of a GPU, by its data sheet"),
        ("--other-gb", f"{assumptions.other_gb:g}", "of a rank for CUDA, NCCL and the allocator's loss"),
        ("--kept-ids", f"{assumptions.kept_ids:g}", "ids of a sampling mask in the mean"),
        ("--load-gb-s", f"{efficiency.load_gb_s:g}", "of a push into the servers"),
    ]
    if lengths.basis == "assumed":
        found.append(("--bundle", lengths.source, "lengths of answers"))
        found.append(("--prompt-tokens", f"{lengths.prompt_tokens:g}", "of a prompt"))
    if efficiency.rollout_tokens_s is None:
        share = f"{efficiency.decode_bandwidth:g} of {gpu.bandwidth_gb_s:g} GB/s"
        found.append(("--rollout-tokens-s", share, "speed of a server, by a roofline"))
    if efficiency.learner_tokens_s is None:
        share = f"{efficiency.train_flops:g} of {gpu.tflops:g} TFLOPS"
        found.append(("--learner-tokens-s", share, "speed of the learner, by operations"))
    return found


def _assumptions(plan: Plan) -> Sequence[str]:
    found = ["assumed, and the option that replaces it:"]
    for option, value, meaning in assumed(plan):
        found += textwrap.wrap(f"  {option:<19}{value}: {meaning}", WIDTH, subsequent_indent=" " * 21)
    scores = "its" if keeps_scores(plan.config.learner) else "no"
    fixed = (
        f"also: attention keeps {scores} scores; experts are chosen evenly; prefixes are computed again ten times as "
        "fast as tokens are decoded; rewards take no time"
    )
    return [*found, *textwrap.wrap(f"  {fixed}", WIDTH, subsequent_indent="  ")]


def _count(number: int) -> str:
    if number >= 10**7:
        return f"{number / 1e9:,.2f} B"
    return f"{number / 1e6:,.2f} M"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 10**7 or nbytes == 0 else f"{nbytes / 1e6:,.2f} MB"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if math.isfinite(value) else "never"
