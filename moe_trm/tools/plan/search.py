"""The best plans for a machine: which GPUs serve, servers, layout of the learner, recomputation, offload, schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product
from math import ceil, inf, log
from typing import Any

from moe_trm.config.rules import refusals
from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.learner.megatron.stages import balanced
from moe_trm.models.hf_config import moe_layers, num_experts
from moe_trm.models.registry import keeps_packs_apart, sized_family_of
from moe_trm.tools.plan.build import Plan, Simulated, Work, build, changed
from moe_trm.tools.plan.candidates import Judged, judge
from moe_trm.tools.plan.cluster import SERVER_SHARE, Cluster, serving
from moe_trm.tools.plan.kept import BYTES, keeps_scores
from moe_trm.tools.plan.memory import activations, layer_work
from moe_trm.tools.plan.modes import Mode
from moe_trm.tools.plan.parameters import Model
from moe_trm.tools.plan.speed import cache_bytes, decode_rate, micro_batches

SHOWN = 3
"""Plans that are shown."""
NEAR = 0.02
"""Share of a step's time that younger samples may cost."""
DEEPEST = 32
"""Pipeline ranks at most."""
WIDEST = 64
"""GPUs of a server at most."""
RUNNING = 512
"""Requests that a server decodes together, at most."""
ALIKE = 0.05
"""Share of training's time within which layouts are taken for equally fast, for what is not modelled."""
JUDGED = 100
"""Layouts of a split, the fastest first, whose memory is counted exactly."""


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        plans: the best ones, the fastest first; each of another split of the GPUs, and one of them colocated.
        why: the reason that there are none, else empty.
    """

    plans: tuple[Plan, ...]
    why: str = ""


def search(config: Config, work: Work, cluster: Cluster, server_nodes: int | None = None) -> Found:
    """Plans that fit, for the workload of `config`; its layout, servers and schedule are replaced.

    So is its learner, where Megatron-Core's has no such layers.

    Args:
        config: of the run.
        work: model and lengths.
        cluster: the machine.
        server_nodes: nodes that serve; None: any number, and also none, with servers on the learner's GPUs.

    Raises:
        ConfigError, CheckpointError: a model that no start accepts.
    """
    model = work.model(config)
    work.check_served(config)
    if sized_family_of(work.hf, work.where).not_in_megatron:
        config = changed(config, "learner", backend="deepspeed")
    if config.learner.backend == "deepspeed" and not keeps_packs_apart(work.hf):
        config = changed(config, "batch", layout="padded")
    config = _with_micro_batches(config, work)
    shortest: list[tuple[float, Config, Cluster]] = []
    lacking: list[str] = []
    for colocate, gpus, split in _splits(cluster, server_nodes):
        shared = changed(config, "rollout", colocate=colocate)
        mode = Mode("sync", 0, "wait") if colocate else Mode("async", 1, "interrupt")
        best_learners = _best(_with_mode(shared, mode), model, work, split, gpus)
        if isinstance(best_learners, str):
            lacking.append(best_learners)
            continue
        simulated = []
        for train_s, best in best_learners:
            serve_gpus, _ = split.split(best.rollout)
            fleet = work.fleet(model, best, split, serving(best.rollout, model, work.hf, split, serve_gpus))
            simulated.append((work.timeline(model, best, mode, fleet, train_s).step_s, best, split))
        shortest.append(min(simulated, key=lambda entry: entry[0]))
    # Where the fastest ones all train on stale samples, the last of those shown shares all GPUs.
    shortest.sort(key=lambda entry: entry[0])
    turns = [entry for entry in shortest[SHOWN - 1 :] if entry[1].rollout.colocate]
    shown = [*shortest[: SHOWN - 1], *turns, *shortest[SHOWN - 1 :]][:SHOWN]
    plans = [_scheduled(build(best, work, split)) for _, best, split in shown]
    plans.sort(key=lambda plan: plan.configured.timeline.step_s)
    reasons = "; ".join(dict.fromkeys((*lacking[:1], *lacking[-1:])))
    return Found(tuple(plans), "" if plans else f"no plan fits: {reasons}. Take more nodes or larger GPUs.")


def chosen_mode(plan: Plan) -> Simulated:
    """The mode with the youngest samples among those within `NEAR` of the fastest."""
    fastest = min(mode.timeline.step_s for mode in plan.modes)
    near = (mode for mode in plan.modes if mode.timeline.step_s <= fastest * (1 + NEAR))
    return min(near, key=lambda simulated: (simulated.mode.staleness, simulated.timeline.step_s))


def _scheduled(plan: Plan) -> Plan:
    return replace(plan, config=_with_mode(plan.config, chosen_mode(plan).mode))


def _with_mode(config: Config, mode: Mode) -> Config:
    config = changed(config, "pipeline", **mode.settings)
    interrupts = mode.partial == "interrupt" and config.sync.method == "distributed"
    return changed(config, "sync", method="disk") if interrupts else config


def _with_micro_batches(config: Config, work: Work) -> Config:
    """`config` with a micro-batch that holds the longest sample, where it says nothing of micro-batches."""
    if config.learner.micro_batch_rows or config.learner.micro_batch_tokens:
        return config
    return changed(config, "learner", micro_batch_tokens=_longest(config, work))


def _longest(config: Config, work: Work) -> int:
    """Tokens of the longest sample, in whole thousands. Prompts may be four times as long as their mean."""
    longest = config.rollout.max_tokens or config.rollout.max_new_tokens + 4 * work.assumptions.lengths.prompt_tokens
    return ceil(longest / 1024) * 1024


def _splits(cluster: Cluster, server_nodes: int | None) -> Iterator[tuple[bool, int | None, Cluster]]:
    """True where both sides share all GPUs, GPUs of the only server of a single node, and the cluster."""
    if server_nodes is None:
        yield True, None, cluster
    if cluster.nodes == 1:
        yield from ((False, gpus, cluster) for gpus in (1, 2, 4) if gpus < cluster.gpus)
        return
    eighths = {max(1, round(cluster.nodes * eighth / 16)) for eighth in (1, 2, 3, 4, 6, 8, 10, 12)}
    for nodes in sorted(eighths) if server_nodes is None else [server_nodes]:
        if nodes < cluster.nodes:
            yield False, None, replace(cluster, server_nodes=nodes)


def _best(
    config: Config, model: Model, work: Work, cluster: Cluster, gpus: int | None
) -> list[tuple[float, Config]] | str:
    """Seconds of training and the configuration whose learner is the fastest that fits, or what does not fit.

    Where both sides share all GPUs there is another one, with the time of sampling in the order.
    """
    served_config = changed(
        config, "rollout", server=config.rollout.server.model_copy(update={"tensor_parallel": gpus or 1})
    )
    serve_gpus, ranks = cluster.split(served_config.rollout)
    if not config.rollout.colocate and with_servers(config, model, work, cluster, serve_gpus, gpus, 0.0) is None:
        return f"{serve_gpus} GPUs hold no server ({2 * model.total() / 1e9:,.0f} GB of weights)"
    room, load, step_tokens = cluster.gpu.memory_gb * 1e9, work.load(config, ranks), work.step_tokens(config)
    bounds = list(_learners(config, model, work, ranks, cluster.gpus, room))
    least = max(room, min((bound for bound, _, _ in bounds), default=0.0))

    @cache
    def sampling(held: float) -> float:
        """Seconds of a step in which sides that share GPUs sample: what the learner leaves is room for requests."""
        served = with_servers(config, model, work, cluster, serve_gpus, gpus, held)
        return inf if served is None else step_tokens / served[0]

    learners = []
    for bound, resident, learner_config in bounds:
        if bound <= room:
            seconds = work.train_s(model, learner_config, cluster, ranks, 1.0)
            taken = seconds + (sampling(4e9 * ceil(resident / 4e9)) if config.rollout.colocate else 0.0)
            learners.append((taken, bound, seconds, learner_config))

    def cost(taken: float, fastest: float, bound: float, candidate: Config) -> tuple[float, ...]:
        """Steps of `ALIKE`; within one, fewer ranks for a sequence, and less memory."""
        sizes = candidate.learner.parallel
        alike = log(taken / fastest) // log(1 + ALIKE) if taken < inf else inf
        return alike, sizes.tensor * sizes.context * sizes.pipeline, bound

    results = []
    for on_all_gpus in (False, True) if config.rollout.colocate else (False,):
        timed = [
            (taken if on_all_gpus else seconds, bound, seconds, learner_config)
            for taken, bound, seconds, learner_config in learners
        ]
        fastest = min((taken for taken, *_ in timed if taken < inf), default=1.0)
        ordered = sorted(
            timed, key=lambda learner_config: cost(learner_config[0], fastest, learner_config[1], learner_config[3])
        )
        for _, _, seconds, candidate in islice(ordered, JUDGED):
            try:
                judged: Judged = judge(candidate, model, work.hf, load, step_tokens, work.where)
            except (ConfigError, CheckpointError):
                continue
            held = judged.resident if config.rollout.colocate else 0.0
            served = with_servers(candidate, model, work, cluster, serve_gpus, gpus, held)
            if judged.total <= room and served is not None and not refusals(served[1]):
                results.append((seconds, served[1]))
                break
    if results:
        return results
    beside = " beside a server" if config.rollout.colocate else ""
    return f"each of {ranks} learner ranks needs more than {least / 1e9:,.0f} GB{beside}"


def _learners(
    config: Config, model: Model, work: Work, ranks: int, node_gpus: int, room: float
) -> Iterator[tuple[float, float, Config]]:
    """The least bytes of a rank, those that stay while servers sample, and a configuration with a layout.

    The bytes are those of even stages: weights, gradients, optimizer, and beside them what the first stage keeps while
    it trains, or a server's share of the weights.
    """
    hf, tokens, load = work.hf, work.step_tokens(config), work.load(config, ranks)
    uncut, divided, experts = (
        sum(part.elements for part in model.parts if part.share == share) for share in ("whole", "tensor", "expert")
    )
    size = BYTES[config.learner.dtype]
    numbers = tuple(range(len(model.layers)))

    @cache
    def working(tensor: int, context: int, recompute: str) -> tuple[float, float]:
        """Bytes that all layers keep, and a layer's at work; a tenth less, as stages differ."""
        parallel = ParallelConfig(tensor=tensor, context=context)
        learner = changed(config, "learner", parallel=parallel, recompute=recompute).learner
        arguments = hf, learner, numbers, load.tokens / context
        return 0.9 * activations(*arguments, 1, load.rows), 0.9 * layer_work(*arguments, load.rows)

    for parallel, zero in layouts(config, hf, ranks, node_gpus):
        for recompute, offload in product(("none", "selective", "full"), (False, True)):
            if zero is not None and recompute == "selective":
                continue
            learner: dict[str, Any] = {"parallel": parallel, "recompute": recompute, "offload_optimizer": offload}
            bound = resident = work.assumptions.other_gb * 1e9
            if zero is not None:
                learner["deepspeed"] = config.learner.deepspeed.model_copy(update={"zero_stage": zero})
            elif not config.learner.lora.rank:
                held = uncut + divided / parallel.tensor + experts / parallel.expert
                state = 0 if offload else (8 if size == 4 else 12)
                bound += (held * (size + 4) + state * parallel.pipeline * (uncut + divided + experts) / ranks) / (
                    parallel.pipeline
                )
                resident = bound
                flight = min(parallel.pipeline, micro_batches(config.learner, config.rollout, tokens, ranks))
                beside = 2 * model.total() / WIDEST + (1 - SERVER_SHARE) * room if config.rollout.colocate else 0.0
                kept, again = working(parallel.tensor, parallel.context, recompute)
                bound += max(beside, kept * flight / parallel.pipeline + again)
            yield bound, resident, changed(config, "learner", **learner)


def layouts(config: Config, hf: Any, ranks: int, node_gpus: int) -> Iterator[tuple[ParallelConfig, int | None]]:
    """Layouts of Megatron-Core, or stages of ZeRO. Stages are as even as can be where they do not divide the layers."""
    if config.learner.backend == "deepspeed":
        yield from ((ParallelConfig(), stage) for stage in (2, 3))
        return
    powers = [2**power for power in range(10)]
    number = int(hf["num_hidden_layers"])
    # Sharing sequences on GPUs needs the layers of Transformer Engine.
    contexts = (1,) if keeps_scores(config.learner) else (1, 2, 4)
    tensors = [size for size in powers if size <= node_gpus]
    for pipeline in range(1, min(DEEPEST, number) + 1):
        if ranks % pipeline:
            continue
        uneven: dict[str, Any] = {"pipeline_layout": balanced(number, pipeline)} if number % pipeline else {}
        stage = ranks // pipeline
        experts = (
            [size for size in powers if stage % size == 0 and num_experts(hf) % size == 0] if moe_layers(hf) else [1]
        )
        for tensor, context, expert in product(tensors, contexts, experts):
            if stage % (tensor * context) == 0:
                yield (
                    ParallelConfig(tensor=tensor, context=context, expert=expert, pipeline=pipeline, **uneven),
                    None,
                )


def with_servers(
    config: Config, model: Model, work: Work, cluster: Cluster, gpus: int, only: int | None, held: float
) -> tuple[float, Config] | None:
    """Tokens a second and `config` with the fastest servers on `gpus` GPUs that hold `held` bytes already.

    None where none fits.
    """
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    lengths, longest = work.assumptions.lengths, _longest(config, work)
    room = SERVER_SHARE * cluster.gpu.memory_gb * 1e9 - held
    best: tuple[float, dict[str, int]] | None = None
    for size in [only] if only else [2**power for power in range(WIDEST.bit_length()) if gpus % 2**power == 0]:
        tokens = (room - 2 * (model.total() / size + model.vision)) / cache_bytes(work.hf, size)
        if tokens < 2 * longest:
            continue
        servers = gpus // size
        slots = min(ceil(samples / servers), int(tokens / (lengths.prompt_tokens + lengths.mean)), RUNNING)
        rate = decode_rate(
            model, work.hf, cluster.gpu, size, work.context, work.assumptions.efficiency, slots, cluster.gpus
        )
        speed = servers * slots * rate(slots)
        if best is None or speed > 1.02 * best[0]:
            needed = ceil(max(2 * longest, 1.25 * slots * (lengths.prompt_tokens + lengths.mean)) / 1024) * 1024
            best = (
                speed,
                {
                    "tensor_parallel": size,
                    "max_total_tokens": min(needed, int(tokens / 1024) * 1024),
                    "max_running_requests": slots,
                },
            )
    if best is None:
        return None
    server_settings = best[1]
    server = config.rollout.server.model_copy(update=server_settings)
    concurrency = gpus // server_settings["tensor_parallel"] * server_settings["max_running_requests"]
    return best[0], changed(config, "rollout", server=server, concurrency=concurrency)
