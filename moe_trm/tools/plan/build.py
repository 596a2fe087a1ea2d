"""A plan: memory, bytes, seconds of a run, from its configuration and the model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from shlex import quote
from typing import Any

from moe_trm.config.flat import flatten
from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError
from moe_trm.learner.model_rules import check_proved
from moe_trm.models.pictures import picture_tokens
from moe_trm.models.quantisation import quantisation_of
from moe_trm.models.registry import FAMILIES, family_of, find_family, refuse_unsupported, sized_family
from moe_trm.rollout.servers.model_rules import check_served
from moe_trm.tools.plan.candidates import Judged, judge
from moe_trm.tools.plan.cluster import Cluster, Serving, serving
from moe_trm.tools.plan.columns import columns_per_token
from moe_trm.tools.plan.exchange import exchange_seconds
from moe_trm.tools.plan.figures import Basis, Figure, weakest
from moe_trm.tools.plan.lengths import Lengths
from moe_trm.tools.plan.lora import with_adapters
from moe_trm.tools.plan.memory import Load
from moe_trm.tools.plan.modes import MODES, Mode
from moe_trm.tools.plan.parameters import Model, model_of, vision_parameters
from moe_trm.tools.plan.provision import Provision, provision
from moe_trm.tools.plan.simulate import SimulatedServers, Timeline, simulate
from moe_trm.tools.plan.speed import Efficiency, decode_rate, micro_batch_tokens, train_seconds, training_operations
from moe_trm.tools.plan.wire import mask_bytes, route_bytes

STEPS = 8
"""Simulated training steps."""
SIMULATED = 2
"""Servers that are simulated at most; more of them do the same."""


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
        """Older and averaged weights in host memory, for one rank, and an optimizer that is there.

        That has 16 bytes for each number: weight, moments and gradient. Pinned memory may take up to twice as much,
        because torch rounds each tensor of it up to a power of two.
        """
        pipeline = self.config.pipeline
        versions = pipeline.staleness_limit // pipeline.push_every + 1 if pipeline.recovery == "snapshot" else 0
        averages = 2 if pipeline.proximal == "average" else 0
        offloaded = 16 * self.layout.stepped if self.config.learner.offload_optimizer else 0
        return (versions + averages) * self.layout.trained + offloaded

    @property
    def fits(self) -> bool:
        """Learner and servers, each on its GPUs."""
        return self.layout.total <= self.room and self.serving.fits

    @property
    def configured(self) -> Simulated:
        """The pipeline mode of the configuration."""
        mode = Mode.of(self.config.pipeline, self.config.learner.minibatches)
        return next(simulated for simulated in self.modes if simulated.mode == mode)


@dataclass(frozen=True)
class Work:
    """Everything that all configurations of a run share: its model, the lengths of its samples, a kind of GPU.

    `hf` is config.json of the text, `where` its file, and `whole` the file's content, where there is more in it.
    """

    hf: Mapping[str, Any]
    assumptions: Assumptions
    where: str
    whole: Mapping[str, Any] | None = None

    def check_served(self, config: Config) -> None:
        """Refuse a model that the engine does not serve on GPUs. Raises `ConfigError`, `CheckpointError`."""
        whole, rollout, pictures = self.whole or self.hf, config.rollout, config.task.has_pictures
        masks, exact = config.keeps_masks, config.exact
        if pictures:
            picture_tokens(whole, self.where)
        check_served(whole, self.where, rollout, masks=masks, exact=exact, pictures=pictures, cuda=True)

    def model(self, config: Config) -> Model:
        """Raises `ConfigError` or `CheckpointError` for adapters or a model that cannot be, or cannot be counted."""
        refuse_unsupported(self.hf, self.where)
        if config.learner.backend == "megatron":
            family_of(self.hf, self.where)
        elif find_family(self.hf) is None:
            quantisation_of(self.hf, self.where)
            check_proved(self.hf, self.where)
        if sized_family(self.hf) is None:
            raise CheckpointError(
                "the planner does not know the sizes of this architecture",
                where=self.where,
                got=self.hf.get("architectures") or [""],
                expected=f"one of {', '.join(family.architecture for family in FAMILIES.values())}",
                fix="Start it without a plan: replay was proved exact just now, on a tiny model of its classes.",
            )
        model = with_adapters(model_of(self.hf, self.where), self.hf, config.learner.lora, self.where)
        if not config.task.has_pictures:
            return model
        whole = self.whole or self.hf
        picture_tokens(whole, self.where)
        return replace(model, vision=vision_parameters(whole, self.where))

    def step_tokens(self, config: Config) -> float:
        """Tokens of new samples, prompts included."""
        lengths, rollout = self.assumptions.lengths, config.rollout
        return rollout.prompts_per_step * rollout.group_size * (lengths.mean + lengths.prompt_tokens)

    def trained_tokens(self, config: Config) -> float:
        """As `step_tokens`, with those that are used again."""
        return self.step_tokens(config) * (1 + config.pipeline.reuse_groups / config.rollout.prompts_per_step)

    @property
    def context(self) -> float:
        """Tokens of a sample while it is made, in the mean."""
        return self.assumptions.lengths.prompt_tokens + self.assumptions.lengths.mean / 2

    def load(self, config: Config, ranks: int) -> Load:
        """The largest micro-batch of a rank."""
        lengths = self.assumptions.lengths
        tokens = micro_batch_tokens(config.learner, config.rollout, lengths.prompt_tokens)
        longest = config.rollout.max_tokens or int(config.rollout.max_new_tokens + lengths.prompt_tokens)
        return Load(
            tokens,
            int(tokens * lengths.mean / (lengths.mean + lengths.prompt_tokens)),
            ranks,
            config.keeps_masks,
            config.replay.mode != "none",
            self.assumptions.other_gb,
            rows=1 if config.batch.layout == "packed" else max(1, tokens // longest),
            kept_ids=self.assumptions.kept_ids,
        )

    def wire(self, config: Config) -> dict[str, Figure]:
        """Bytes of a step. The controller holds a step more for every version that samples may be behind."""
        lengths, rollout = self.assumptions.lengths, config.rollout
        figures: dict[str, Figure] = {}
        held = 0.0
        if config.replay.mode == "R3" or config.probe.every:
            for name, figure in route_bytes(self.hf).items():
                figures[f"routes, {name}"] = _of_step(figure, self.step_tokens(config), lengths.basis)
            held += figures["routes, wire"].value if figures else 0.0
        if config.keeps_masks and rollout.top_p < 1:
            sampled = rollout.prompts_per_step * rollout.group_size * lengths.mean
            figures["masks, wire"] = _of_step(mask_bytes(self.assumptions.kept_ids)["wire"], sampled, lengths.basis)
            held += figures["masks, wire"].value
        ahead = config.pipeline.staleness_limit + 1
        basis = weakest(*(figure.basis for figure in figures.values()), "measured")
        return {**figures, "controller": Figure(held * ahead, basis, f"{ahead} step(s) of what is on the wire")}

    def train_s(self, model: Model, config: Config, cluster: Cluster, ranks: int, columns: float) -> float:
        """Seconds of one training step: products, stages that wait, exchange. A measured speed has all of it."""
        tokens, efficiency = self.trained_tokens(config), self.assumptions.efficiency
        computing = train_seconds(model, self.hf, config, cluster.gpu, ranks, tokens, self.context, efficiency, columns)
        if efficiency.learner_tokens_s is not None:
            return computing
        return computing + exchange_seconds(
            model, self.hf, config, cluster.gpu, cluster.gpus, ranks, tokens * columns, efficiency
        )

    def fleet(self, model: Model, config: Config, cluster: Cluster, servers: Serving) -> SimulatedServers:
        """The servers of a configuration, with their speed."""
        efficiency, slots = self.assumptions.efficiency, config.rollout.server.max_running_requests
        rate = cache(
            decode_rate(
                model, self.hf, cluster.gpu, servers.gpus, self.context, efficiency, slots, node_gpus=cluster.gpus
            )
        )
        push_s = 2 * model.total() / (efficiency.load_gb_s * 1e9)
        return SimulatedServers(
            servers.servers,
            slots,
            rate,
            push_s,
            slots * rate(slots) * 10,
            float(config.rollout.concurrency),
            efficiency.sharing,
        )

    def timeline(self, model: Model, config: Config, mode: Mode, fleet: SimulatedServers, train_s: float) -> Timeline:
        """Simulated steps of a pipeline mode, with at most `SIMULATED` servers and their share of the samples.

        Stale samples need more passes than the learner's own, whatever the speed was measured with: one for each older
        version.
        """
        share = min(1.0, SIMULATED / fleet.servers)
        samples = config.rollout.prompts_per_step * config.rollout.group_size
        batches = self.assumptions.lengths.batches(STEPS, max(1, round(samples * share)))
        few = replace(fleet, servers=round(fleet.servers * share), in_flight=max(1.0, fleet.in_flight * share))
        operations = training_operations(model, self.hf, config, self.context)
        mode_config = changed(config, "pipeline", **mode.settings)
        own_operations, with_older = (
            training_operations(model, self.hf, mode_config, self.context, n) for n in (0.0, 1.0)
        )
        sends = config.sync.method == "distributed"
        return simulate(
            batches,
            train_s * own_operations / operations,
            few,
            mode.schedule(sends=sends),
            train_s * (with_older - own_operations) / operations,
        )


def build(config: Config, work: Work, cluster: Cluster) -> Plan:
    """The plan of a run.

    Args:
        config: of the run.
        work: model and lengths.
        cluster: the machine.

    Raises:
        ConfigError: a layout that cannot be, with the reason; no GPUs for one side; adapters of matrices that there are
            not.
        CheckpointError: a model that is not supported.
    """
    model, hf, assumptions = work.model(config), work.hf, work.assumptions
    serve_gpus, ranks = cluster.split(config.rollout)
    lengths, efficiency = assumptions.lengths, assumptions.efficiency
    work.check_served(config)
    layout = judge(config, model, hf, work.load(config, ranks), work.step_tokens(config), work.where)
    held = layout.resident if config.rollout.colocate else 0.0
    servers = serving(config.rollout, model, hf, cluster, serve_gpus, held)
    fleet = work.fleet(model, config, cluster, servers)
    basis = weakest(efficiency.rollout_basis, efficiency.learner_basis, lengths.basis)
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    forwarded = [max(1, int(length + lengths.prompt_tokens)) for length in lengths.batches(1, samples)[0]]
    columns = columns_per_token(config.learner, config.batch, forwarded, ranks)
    train_s = work.train_s(model, config, cluster, ranks, columns)
    configured = Mode.of(config.pipeline, config.learner.minibatches)
    alternatives = () if config.rollout.colocate else MODES
    modes = [
        Simulated(mode, work.timeline(model, config, mode, fleet, train_s), basis)
        for mode in dict.fromkeys((*alternatives, configured))
    ]
    full = fleet.slots * fleet.rate(fleet.slots)
    workers = provision(
        samples * lengths.mean,
        full,
        train_s,
        fleet.push_s,
        configured.staleness - configured.push_every + 1,
        lambda number: work.timeline(model, config, configured, replace(fleet, servers=number), train_s),
    )
    return Plan(
        config,
        cluster,
        model,
        assumptions,
        ranks,
        servers,
        layout,
        work.wire(config),
        tuple(modes),
        Figure(columns, weakest(lengths.basis, "given"), f"batch.layout={config.batch.layout}"),
        Figure(full, efficiency.rollout_basis, "one server, all slots in use"),
        Figure(train_s, efficiency.learner_basis, "one training step"),
        Figure(fleet.push_s, "assumed", "--load-gb-s"),
        workers,
    )


def overrides(config: Config, base: Config) -> list[str]:
    """`config` as overrides of `base`."""
    settings, base_settings = flatten(config.dump()), flatten(base.dump())
    return [
        f"{key}={_word(value)}"
        for key, value in settings.items()
        if key not in base_settings or value != base_settings[key]
    ]


def _word(value: object) -> str:
    """A value as a shell and YAML take it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else quote(str(value))


def changed(config: Config, section: str, **values: Any) -> Config:
    """`config` with other values in one section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _of_step(per_token: Figure, tokens: float, lengths: Basis) -> Figure:
    return Figure(per_token.value * tokens, weakest(per_token.basis, lengths), per_token.note)
