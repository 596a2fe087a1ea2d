"""Layers of every pipeline stage. Imports no torch.

Stages follow each other as the layers do, and go to the pipeline ranks in turn: of P ranks, rank r computes the stages
r, P + r, 2P + r and so on, its model chunks. A stage may hold no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby

from moe_trm.config.pipeline_layout import EMBEDDING, LAYER, LOSS, problems, stages_of, uneven_settings
from moe_trm.config.schema import ParallelConfig
from moe_trm.errors import ConfigError

REPEATED = 2
"""Like stages in a row that a layout string spells out, at most."""


@dataclass(frozen=True)
class Stage:
    """One stage: 0-based decoder layers in a row, possibly none; with the embedding, or with the last norm and the
    loss.
    """

    layers: range
    embedding: bool
    loss: bool


def virtual_stages(parallel: ParallelConfig) -> int | None:
    """Stages of each pipeline rank; None where each has one, as Megatron-Core says it."""
    stages_per_rank = parallel.virtual_pipeline or 1
    if parallel.pipeline_layout is not None:
        stages_per_rank = len(stages_of(parallel.pipeline_layout)) // parallel.pipeline
    return stages_per_rank if stages_per_rank > 1 else None


def stages(parallel: ParallelConfig, num_layers: int) -> tuple[Stage, ...]:
    """The stages of a model of `num_layers` layers, in the order of the model.

    Raises:
        ConfigError: settings that contradict each other, or that do not fit this number of layers.
    """
    for problem in problems(parallel):
        raise ConfigError(
            problem.what,
            where=problem.key,
            got=problem.got,
            expected=problem.expected,
            fix=_advice(parallel, num_layers),
        )
    counts = _counts(parallel, num_layers)
    ends = [*accumulate(counts)]
    last = len(counts) - 1
    return tuple(
        Stage(range(end - count, end), place == 0, place == last)
        for place, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def layers_by_rank(parallel: ParallelConfig, num_layers: int) -> list[tuple[int, ...]]:
    """Layers of each pipeline rank. Raises as `stages` does."""
    all_stages = stages(parallel, num_layers)
    return [
        tuple(layer for stage in all_stages[rank :: parallel.pipeline] for layer in stage.layers)
        for rank in range(parallel.pipeline)
    ]


def megatron_layout(parallel: ParallelConfig, num_layers: int) -> str | None:
    """Megatron's layout string of uneven stages; None where all stages have as many layers.

    Every way to say uneven stages becomes this one: with virtual stages, Megatron-Core 0.16 divides by zero when the
    first and the last of two ranks have sizes of their own.
    """
    if not uneven_settings(parallel):
        return None
    return "|".join(
        EMBEDDING * stage.embedding + LAYER * len(stage.layers) + LOSS * stage.loss
        for stage in stages(parallel, num_layers)
    )


def balanced(num_layers: int, number: int) -> str:
    """A layout string of `number` stages as even as can be.

    >>> balanced(61, 4)
    'Et*15|t*16|t*15|t*15L'
    >>> balanced(46, 4)
    'Et*11|t*12|t*12|t*11L'
    >>> balanced(61, 16)
    'Et*3|(t*4|)*13t*3|t*3L'
    """
    share, more = divmod(num_layers, number)
    # The first stage has the embedding besides, and the last one the loss, which costs more.
    order = sorted(range(number), key=lambda stage: (stage == number - 1, stage == 0, stage))
    counts = [share + (stage in order[:more]) for stage in range(number)]
    first, *middle, last = (LAYER if count == 1 else f"{LAYER}*{count}" for count in counts)
    between = ""
    for stage, alike in groupby(middle):
        times = len([*alike])
        between += f"({stage}|)*{times}" if times > REPEATED else f"{stage}|" * times
    return f"{EMBEDDING}{first}|{between}{last}{LOSS}"


def _counts(parallel: ParallelConfig, num_layers: int) -> list[int]:
    if parallel.pipeline_layout is not None:
        counts = [stage.count(LAYER) for stage in stages_of(parallel.pipeline_layout)]
        if sum(counts) != num_layers:
            raise ConfigError(
                "the stages have another number of layers than the model",
                where="learner.parallel.pipeline_layout",
                got=f"{sum(counts)} layers in {parallel.pipeline_layout!r}",
                expected=f"{num_layers} layers",
                fix=_advice(parallel, num_layers),
            )
        return counts
    if parallel.first_stage_layers is not None or parallel.last_stage_layers is not None:
        return _with_own_ends(parallel, num_layers)
    number = parallel.pipeline * (virtual_stages(parallel) or 1)
    units = num_layers + parallel.account_for_embedding + parallel.account_for_loss
    if units % number:
        counted = "" if units == num_layers else f" ({units} with what is accounted for)"
        raise ConfigError(
            "layers do not divide over the ranks",
            where="learner.parallel.pipeline",
            got=f"{num_layers} layers{counted}, {number} ranks and stages",
            expected=f"a divisor of {units}",
            fix=_advice(parallel, num_layers),
        )
    counts = [units // number] * number
    counts[0] -= parallel.account_for_embedding
    counts[-1] -= parallel.account_for_loss
    return counts


def _with_own_ends(parallel: ParallelConfig, num_layers: int) -> list[int]:
    ranks, stages_per_rank = parallel.pipeline, virtual_stages(parallel) or 1
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    rest, middle = num_layers - (first or 0) - (last or 0), ranks - (first is not None) - (last is not None)
    share = rest // middle if middle else 0
    if share * middle != rest or (middle and share < 1):
        between = f"{middle} ranks between" if middle else "no rank between"
        raise ConfigError(
            "the layers that the first and the last stage leave do not divide over the others",
            where=_given(parallel),
            got=f"{rest} of {num_layers} layers left, {between}",
            expected=f"a positive multiple of {middle}" if middle else "0 layers left",
            fix=_advice(parallel, num_layers),
        )
    by_rank = [share] * ranks
    by_rank[0] = share if first is None else first
    by_rank[-1] = share if last is None else last
    if odd := [count for count in by_rank if count % stages_per_rank]:
        raise ConfigError(
            "the layers of a rank do not divide over its virtual stages",
            where=_given(parallel),
            got=f"{odd[0]} layers, {stages_per_rank} virtual stages",
            expected=f"multiples of {stages_per_rank}",
            fix=_advice(parallel, num_layers),
        )
    return [count // stages_per_rank for _ in range(stages_per_rank) for count in by_rank]


def _given(parallel: ParallelConfig) -> str:
    return f"learner.parallel.{uneven_settings(parallel)[0]}"


def _advice(parallel: ParallelConfig, num_layers: int) -> str:
    number = parallel.pipeline * (parallel.virtual_pipeline or 1)
    alternative = "choose other sizes in learner.parallel"
    if parallel.pipeline == 1 or num_layers < number:
        return f"{alternative.capitalize()}."
    layout = balanced(num_layers, number)
    return f"Set learner.parallel.pipeline_layout='{layout}' and nothing beside it, or {alternative}."
