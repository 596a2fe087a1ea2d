"""A plan as a page of at most 80 columns, and as data."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from moe_trm.config.schema import Config
from moe_trm.tools.plan.build import Plan, overrides
from moe_trm.tools.plan.candidates import Judged
from moe_trm.tools.plan.cluster import SERVER_SHARE
from moe_trm.tools.plan.figures import Basis
from moe_trm.tools.plan.kept import keeps_scores
from moe_trm.tools.plan.memory import BASES
from moe_trm.tools.plan.search import Found

WIDTH = 80


def page(plan: Plan) -> str:
    """The whole plan for a terminal."""
    parts = (_parameters, _memory, _wire, _serving, _modes, _verdict, _assumptions)
    return "\n\n".join("\n".join(part(plan)) for part in parts)


def proposals(result: Found, base: Config) -> str:
    """The best plans for a terminal: seconds of a step, what binds each, and overrides of `base`."""
    if not result.plans:
        return "\n".join(textwrap.wrap(result.why, WIDTH))
    return "\n\n".join("\n".join(_proposal(rank, plan, base)) for rank, plan in enumerate(result.plans, 1))


def _proposal(rank: int, plan: Plan, base: Config) -> Iterator[str]:
    serving, layout, learner = plan.serving, plan.layout, plan.config.learner
    sizes = plan.layout.parallel
    names = ("tensor", "pipeline", "context", "expert")
    shape = ", ".join(f"{name} {getattr(sizes, name)}" for name in names if getattr(sizes, name) > 1) or "data parallel"
    where = "all GPUs serve and train" if plan.config.rollout.colocate else f"{plan.ranks} GPUs train"
    text = (
        f"{rank}. {_seconds(plan.configured.timeline.step_s)} a step. {where}: {shape}; layers {layout.spread}, "
        f"recompute {learner.recompute}{', optimizer on the host' if learner.offload_optimizer else ''}. "
        f"{serving.servers} server(s) of {serving.gpus} GPU(s)."
    )
    yield from textwrap.wrap(text, WIDTH, subsequent_indent="   ")
    binds = f"binds: {bottleneck(plan)} {_gb(layout.total).strip()} of {_gb(plan.room).strip()} on a learner rank, "
    binds += f"{_gb(serving.bytes_per_gpu).strip()} on a server's GPU"
    if plan.host_bytes:
        binds += f", {_gb(plan.host_bytes * min(plan.ranks, plan.cluster.gpus)).strip()} on a node's host"
    yield from textwrap.wrap(f"{binds}.", WIDTH, initial_indent="   ", subsequent_indent="   ")
    pipeline = plan.config.pipeline
    if (pipeline.mode, base.pipeline.mode) == ("async", "sync"):
        stale = f"asynchronous, unlike the configuration: samples are up to {pipeline.max_staleness} steps old"
        yield from textwrap.wrap(f"{stale}.", WIDTH, initial_indent="   ", subsequent_indent="   ")
    if serving.gpus > plan.cluster.gpus:
        several = (
            "a server over several nodes is started by hand, with SGLang's --nnodes, and named in rollout.urls "
            "(docs/planning.md)"
        )
        yield from textwrap.wrap(several, WIDTH, initial_indent="   ", subsequent_indent="   ")
    yield from (f"     {line}" for line in overrides(plan.config, base))


def as_data(plan: Plan) -> dict[str, Any]:
    """The whole plan for programs. Bytes, seconds and shares; every section says what it rests on."""
    kinds = {
        kind: {"total": total, "active": active, "basis": "given"}
        for kind, (total, active) in plan.model.by_kind.items()
    }
    timelines = [
        {
            **simulated.mode.settings,
            "step_s": simulated.timeline.step_s,
            "learner_idle": simulated.timeline.learner_idle,
            "server_idle": simulated.timeline.server_idle,
            "slot_use": simulated.timeline.slot_use,
            "basis": simulated.basis,
        }
        for simulated in plan.modes
    ]
    return {
        "fits": plan.fits,
        "parameters": {
            "total": plan.model.total(),
            "active": plan.model.active(),
            "prediction_layers": plan.model.prediction_total,
            "adapters": plan.model.adapter_total,
            "vision": plan.model.vision,
            "kinds": kinds,
        },
        "layout": _layout_data(plan.layout),
        "host_bytes": {"value": plan.host_bytes, "basis": "given"},
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
    for kind, (total, active) in model.by_kind.items():
        yield f"  {kind:<14}{_count(total):>10}{_count(active):>12}"
    yield f"  {'all':<14}{_count(model.total()):>10}{_count(model.active()):>12}"
    if model.adapters:
        yield f"  {'adapters':<14}{_count(model.adapter_total):>10}{'':>12}   train in place of these"
    if model.vision:
        yield f"  {'vision tower':<14}{_count(model.vision):>10}{'':>12}   not in `all`"
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
        if plan.config.learner.offload_optimizer:
            yield f"  {'host':<14}{_gb(plan.host_bytes):>10}   given: optimizer, older weights; pinned: up to twice"
            return
        verdict = "fits" if plan.host_bytes <= limit else "OVER pipeline.snapshot_gib"
        yield f"  {'host':<14}{_gb(plan.host_bytes):>10}   given: older weights, {verdict}"


def _wire(plan: Plan) -> Iterator[str]:
    yield "bytes of a step"
    for name, figure in plan.wire.items():
        yield f"  {name:<16}{_gb(figure.value):>10}   {figure.basis}: {figure.note}"
    if "routes, wire" in plan.wire and plan.config.replay.mode != "R3":
        yield "  routes are recorded for the probe alone: probe.every=0 leaves them out"


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
    for simulated in plan.modes:
        line = simulated.timeline
        mark = "  *" if simulated is plan.configured else ""
        yield (
            f"  {simulated.mode.label:<14}{simulated.mode.staleness:>4}{simulated.mode.push:>11}"
            f"{_seconds(line.step_s):>10}{line.learner_idle:>14.0%}{line.server_idle:>14.0%}{mark}"
        )
    yield "  * as configured"
    yield from textwrap.wrap(provisioned(plan), WIDTH, subsequent_indent="  ")


def provisioned(plan: Plan) -> str:
    """The number of servers that keeps the learner busy, in a sentence."""
    provision = plan.provision
    if provision.servers is None:
        return f"servers that keep the learner busy: no number of them does, because {provision.why}."
    words = f"servers that keep the learner busy, by the rule of ECHO-2: {provision.servers}"
    if provision.idle is None:
        return f"{words}; not simulated."
    words += f"; simulated, it then waits {provision.idle:.0%} of the time"
    if provision.idle_below is not None:
        words += f", and {provision.idle_below:.0%} with {provision.servers - 1}"
    return words + ("." if provision.holds else ". Answers of unlike length need more, or pipeline.partial=interrupt.")


def _verdict(plan: Plan) -> Iterator[str]:
    yield from textwrap.wrap(f"bottleneck: {bottleneck(plan)}", WIDTH, subsequent_indent="  ")


def bottleneck(plan: Plan) -> str:
    """The part that binds, in a sentence."""
    if plan.layout.total > plan.room:
        kind = max(plan.layout.memory, key=lambda name: plan.layout.memory[name])
        return f"memory of the learner, most of it {kind}."
    if not plan.serving.fits:
        return "memory of the servers: raise rollout.server.tensor_parallel or lower rollout.server.max_total_tokens."
    line = plan.configured.timeline
    if plan.config.rollout.colocate:
        return f"servers and learner take turns: the learner trains {1 - line.learner_idle:.0%} of the time."
    if line.learner_idle > line.server_idle:
        return f"the servers: the learner waits {line.learner_idle:.0%} of the time."
    return f"the learner: the servers wait {line.server_idle:.0%} of the time."


def assumed(plan: Plan) -> list[tuple[str, str, str]]:
    """Every assumption: the option that replaces it, its value, its meaning."""
    assumptions, gpu = plan.assumptions, plan.cluster.gpu
    efficiency, lengths = assumptions.efficiency, assumptions.lengths
    rows = [
        ("--memory-gb", f"{gpu.memory_gb:g}", "of a GPU, by its data sheet"),
        ("--other-gb", f"{assumptions.other_gb:g}", "of a rank for CUDA, NCCL and the allocator's loss"),
        ("--kept-ids", f"{assumptions.kept_ids:g}", "ids of a sampling mask in the mean"),
        ("--load-gb-s", f"{efficiency.load_gb_s:g}", "of a push into the servers"),
    ]
    if lengths.basis == "assumed":
        rows.append(("--bundle", lengths.source, "lengths of answers"))
        rows.append(("--prompt-tokens", f"{lengths.prompt_tokens:g}", "of a prompt"))
    if efficiency.rollout_tokens_s is None:
        share = f"{efficiency.decode_bandwidth:g} of {gpu.bandwidth_gb_s:g} GB/s"
        rows.append(("--rollout-tokens-s", share, "speed of a server, by a roofline"))
    if efficiency.learner_tokens_s is None:
        rows.append(("--node-gb-s", f"{efficiency.node_gb_s:g}", "of a GPU to other nodes"))
        if plan.config.learner.offload_optimizer:
            rows.append(("--host-gb-s", f"{efficiency.host_gb_s:g}", "of a rank's optimizer on the host"))
        share = f"{efficiency.train_flops:g} of {gpu.tflops:g} TFLOPS (public runs on H100: 0.19 to 0.28 with exchange)"
        rows.append(("--learner-tokens-s", share, "speed of the learner, by operations"))
    return rows


def _assumptions(plan: Plan) -> Sequence[str]:
    lines = ["assumed, and the option that replaces it:"]
    for option, value, meaning in assumed(plan):
        lines += textwrap.wrap(f"  {option:<19}{value}: {meaning}", WIDTH, subsequent_indent=" " * 21)
    scores = "its" if keeps_scores(plan.config.learner) else "no"
    fixed = (
        f"also: attention keeps {scores} scores; experts are chosen evenly; prefixes are computed again ten times as "
        "fast as tokens are decoded; rewards take no time"
    )
    return [*lines, *textwrap.wrap(f"  {fixed}", WIDTH, subsequent_indent="  ")]


def _count(number: int) -> str:
    if number >= 10**7:
        return f"{number / 1e9:,.2f} B"
    return f"{number / 1e6:,.2f} M"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 10**7 or nbytes == 0 else f"{nbytes / 1e6:,.2f} MB"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if math.isfinite(value) else "never"
