"""A plan: memory, bytes, seconds of a run, from its configuration and the model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from shlex import quote
from typing import Any

from moe_trm.config.schema import (
    BatchConfig,
    Config,
    ParallelConfig,
    PipelineConfig,
    ProbeConfig,
    ReplayConfig,
    RolloutConfig,
)
from moe_trm.errors import ConfigError
from moe_trm.plan.candidates import Judged, alternatives, judge
from moe_trm.plan.cluster import Cluster, Serving, serving
from moe_trm.plan.columns import columns_per_token
from moe_trm.plan.figures import Basis, Figure, weakest
from moe_trm.plan.lengths import Lengths
from moe_trm.plan.lora import with_adapters
from moe_trm.plan.memory import Load
from moe_trm.plan.modes import MODES, Mode
from moe_trm.plan.parameters import Model, model_of
from moe_trm.plan.provision import Provision, provision
from moe_trm.plan.simulate import SimulatedServers, Timeline, simulate
from moe_trm.plan.speed import Efficiency, decode_rate, micro_batch_tokens, train_seconds, training_operations
from moe_trm.plan.wire import mask_bytes, route_bytes

STEPS = 8
"""Simulated training steps."""


@dataclass(frozen=True)
class Assumptions:
    """Assumed figures that were not measured, each with an option that replaces it.

    Attributes:
        efficiency: of servers and learner.
        lengths: of answers.
        kept_ids: mean ids of a sampling mask.
        other_gb: of a rank, for CUDA, NCCL and the allocator.
    """

    efficiency: Efficiency
    lengths: Lengths
    kept_ids: float
    other_gb: float


@dataclass(frozen=True)
class Simulated:
    """One pipeline, and its simulated steps."""

    mode: Mode
    timeline: Timeline
    basis: Basis


@dataclass(frozen=True)
class Plan:
    """Everything that `moe-trm plan` says."""

    config: Config
    cluster: Cluster
    model: Model
    assumptions: Assumptions
    ranks: int
    serving: Serving
    layout: Judged
    others: tuple[Judged, ...]
    wire: Mapping[str, Figure]
    modes: tuple[Simulated, ...]
    columns: Figure
    decode_tokens_s: Figure
    train_s: Figure
    push_s: Figure
    provision: Provision

    @property
    def room(self) -> float:
        """Bytes of a GPU."""
        return self.cluster.gpu.memory_gb * 1e9

    @property
    def host_bytes(self) -> float:
        """Older and averaged weights in host memory, for one rank (`pipeline.behavior`, `pipeline.proximal`)."""
        pipeline = self.config.pipeline
        versions = pipeline.staleness_limit // pipeline.push_every + 1 if pipeline.recovery == "snapshot" else 0
        averages = 2 if pipeline.proximal == "average" else 0
        return (versions + averages) * self.layout.trained

    @property
    def fits(self) -> bool:
        """Learner and servers, each on its GPUs."""
        return self.layout.total <= self.room and self.serving.fits

    @property
    def configured(self) -> Simulated:
        """The pipeline mode of the configuration."""
        own = Mode.of(self.config.pipeline, self.config.learner.minibatches)
        return next(found for found in self.modes if found.mode == own)


def build(config: Config, hf: Mapping[str, Any], cluster: Cluster, assumptions: Assumptions, where: str) -> Plan:
    """The plan of a run.

    Args:
        config: of the run.
        hf: config.json of its model.
        cluster: the machine.
        assumptions: and what replaces them.
        where: config.json's place, for messages.

    Raises:
        ConfigError: a layout that cannot be, with the reason and one that can; no GPUs for one side; adapters of
            matrices that there are not.
        CheckpointError: a model that is not supported.
    """
    model = with_adapters(model_of(hf, where), hf, config.learner.lora, where)
    serve_gpus, ranks = cluster.split(config.rollout)
    lengths, efficiency = assumptions.lengths, assumptions.efficiency
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    step_tokens = samples * (lengths.mean + lengths.prompt_tokens)
    trained_tokens = step_tokens * (1 + config.pipeline.reuse_groups / config.rollout.prompts_per_step)
    tokens = micro_batch_tokens(config.learner, config.rollout, lengths.prompt_tokens)
    scored = int(tokens * lengths.mean / (lengths.mean + lengths.prompt_tokens))
    keeps = config.keeps_masks
    load = Load(
        tokens,
        scored,
        ranks,
        keeps,
        config.replay.mode != "none",
        assumptions.other_gb,
        rows=_rows(config.batch, config.rollout, tokens, lengths.prompt_tokens),
        kept_ids=assumptions.kept_ids,
    )
    room = cluster.gpu.memory_gb * 1e9
    others = alternatives(config, model, hf, load, step_tokens, room, cluster.gpus)
    layout = _judge_or_advise(config, model, hf, load, step_tokens, others)
    servers = serving(config.rollout, model, hf, cluster, serve_gpus)
    context = lengths.prompt_tokens + lengths.mean / 2
    slots = config.rollout.server.max_running_requests
    rate = cache(decode_rate(model, hf, cluster.gpu, servers.gpus, context, efficiency, slots))
    push_s = 2 * model.total() / (efficiency.load_gb_s * 1e9)
    fleet = SimulatedServers(
        servers.servers, slots, rate, push_s, slots * rate(slots) * 10, float(config.rollout.concurrency)
    )
    fleet = replace(fleet, sharing=efficiency.sharing)
    basis = weakest(efficiency.rollout_basis, efficiency.learner_basis, lengths.basis)
    batches = lengths.batches(STEPS, samples)
    forwarded = [max(1, int(length + lengths.prompt_tokens)) for length in batches[0]]
    columns = columns_per_token(config.learner, config.batch, forwarded, ranks)
    sends = config.sync.method == "distributed"
    own_train = train_seconds(model, hf, config, cluster.gpu, ranks, trained_tokens, context, efficiency, columns)
    operations = training_operations(model, hf, config, context)

    def seconds(mode: Mode) -> tuple[float, float]:
        """Of training a batch of the learner's own weights, and of each older version that sampled it.

        Stale samples need more passes, whatever the speed was measured with.
        """
        own, with_older = (training_operations(model, hf, _with_pipeline(config, mode), context, n) for n in (0.0, 1.0))
        return own_train * own / operations, own_train * (with_older - own) / operations

    def simulated(mode: Mode, fleet: SimulatedServers) -> Timeline:
        train_s, older_s = seconds(mode)
        return simulate(batches, train_s, fleet, mode.schedule(sends=sends), older_s)

    own = Mode.of(config.pipeline, config.learner.minibatches)
    others_too = () if config.rollout.colocate else MODES
    modes = [Simulated(mode, simulated(mode, fleet), basis) for mode in dict.fromkeys((*others_too, own))]
    workers = provision(
        samples * lengths.mean,
        slots * rate(slots),
        own_train,
        push_s,
        own.staleness - own.push_every + 1,
        lambda number: simulated(own, replace(fleet, servers=number)),
    )
    return Plan(
        config,
        cluster,
        model,
        assumptions,
        ranks,
        servers,
        layout,
        tuple(other for other in others if other.parallel != config.learner.parallel),
        _wire(
            hf,
            config.keeps_masks,
            config.probe,
            config.pipeline,
            config.replay,
            config.rollout,
            step_tokens,
            samples * lengths.mean,
            assumptions,
        ),
        tuple(modes),
        Figure(columns, "columns/token", weakest(lengths.basis, "given"), f"batch.layout={config.batch.layout}"),
        Figure(slots * rate(slots), "tokens/s", efficiency.rollout_basis, "one server, all slots in use"),
        Figure(own_train, "s", efficiency.learner_basis, "one training step"),
        Figure(push_s, "s", "assumed", "--load-gb-s"),
        workers,
    )


def _rows(batch: BatchConfig, rollout: RolloutConfig, tokens: int, prompt_tokens: float) -> int:
    """Rows of the largest micro-batch; a pack is one."""
    if batch.layout == "packed":
        return 1
    longest = rollout.max_tokens or int(rollout.max_new_tokens + prompt_tokens)
    return max(1, tokens // longest)


def _judge_or_advise(
    config: Config, model: Model, hf: Mapping[str, Any], load: Load, step_tokens: float, others: list[Judged]
) -> Judged:
    try:
        return judge(config, model, hf, load, step_tokens)
    except ConfigError as error:
        own = config.learner.parallel
        advice = f"These fit: {'; '.join(lines(other, own) for other in others[:3])}." if others else error.fix
        raise ConfigError(error.what, where=error.where, got=error.got, expected=error.expected, fix=advice) from error


def lines(judged: Judged, own: ParallelConfig) -> str:
    """A layout as overrides of a configuration whose layout is `own`."""
    sizes, before, default = (parallel.model_dump() for parallel in (judged.parallel, own, ParallelConfig()))
    changed = {name: size for name, size in sizes.items() if (size, size) != (before[name], default[name])}
    return " ".join(f"learner.parallel.{name}={_word(size)}" for name, size in changed.items()) or "learner.parallel={}"


def _word(value: object) -> str:
    """A value as a shell and YAML take it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else quote(str(value))


def _with_pipeline(config: Config, mode: Mode) -> Config:
    update = {
        "mode": mode.mode,
        "max_staleness": mode.staleness,
        "partial": mode.partial,
        "push_every": mode.push_every,
        "rolling_push": mode.rolling,
        "stream": mode.parts > 1,
    }
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update=update)})


def _wire(
    hf: Mapping[str, Any],
    keeps_masks: bool,
    probe: ProbeConfig,
    pipeline: PipelineConfig,
    replay: ReplayConfig,
    rollout: RolloutConfig,
    step_tokens: float,
    sampled: float,
    assumptions: Assumptions,
) -> dict[str, Figure]:
    """Bytes of a step. The controller holds a step more for every version that samples may be behind."""
    found: dict[str, Figure] = {}
    held = 0.0
    if replay.mode == "R3" or probe.every:
        for name, figure in route_bytes(hf).items():
            found[f"routes, {name}"] = _of_step(figure, step_tokens, assumptions.lengths.basis)
        held += found["routes, wire"].value if found else 0.0
    if keeps_masks and rollout.top_p < 1:
        found["masks, wire"] = _of_step(mask_bytes(assumptions.kept_ids)["wire"], sampled, assumptions.lengths.basis)
        held += found["masks, wire"].value
    ahead = pipeline.staleness_limit + 1
    basis = weakest(*(figure.basis for figure in found.values()), "measured")
    return {**found, "controller": Figure(held * ahead, "B", basis, f"{ahead} step(s) of what is on the wire")}


def _of_step(per_token: Figure, tokens: float, lengths: Basis) -> Figure:
    return Figure(per_token.value * tokens, "B", weakest(per_token.basis, lengths), per_token.note)
