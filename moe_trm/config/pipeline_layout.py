"""Stages of a pipeline as `learner.parallel` names them, and why such settings cannot hold of any model.

Layout strings are Megatron-Core's (`--pipeline-model-parallel-layout`,
`megatron/core/transformer/pipeline_parallel_layer_layout.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import ParallelConfig

EMBEDDING, LAYER, LOSS, PREDICTION = "E", "t", "L", "m"
SIZES = ("first_stage_layers", "last_stage_layers")
COUNTED = ("account_for_embedding", "account_for_loss")
LAYOUT = "pipeline_layout"
UNEVEN = (*SIZES, *COUNTED, LAYOUT)
"""Settings by which stages get unlike numbers of layers."""

_KEY = f"learner.parallel.{LAYOUT}"
_REPEATS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


def stages_of(layout: str) -> tuple[str, ...]:
    """Letters of each stage in the order of the model, as Megatron-Core's `parse_str_to_list` reads a layout.

    >>> stages_of("Et*2|(t|)*2tL")
    ('Ett', 't', 't', 'tL')
    """
    written_out = layout.replace(",", "")
    for repeat in _REPEATS:
        written_out = repeat.sub(lambda match: match[1] * int(match[2]), written_out)
    return tuple(written_out.split("|"))


def uneven_settings(parallel: ParallelConfig) -> list[str]:
    """Those of `UNEVEN` that are set."""
    return [name for name in UNEVEN if getattr(parallel, name) != ParallelConfig.model_fields[name].default]


def problems(parallel: ParallelConfig) -> Iterator[Problem]:
    """Contradictions between the settings of the stages, whatever the model."""
    names = uneven_settings(parallel)
    if names and parallel.pipeline == 1:
        yield Problem(
            f"learner.parallel.{names[0]}",
            "layers are shared between stages, and there is one",
            got="learner.parallel.pipeline=1",
            expected="learner.parallel.pipeline of at least 2",
        )
        return
    kinds = [[name for name in kind if name in names] for kind in (SIZES, COUNTED, (LAYOUT,))]
    if sum(map(bool, kinds)) > 1:
        yield Problem(
            f"learner.parallel.{names[-1]}",
            "the layers of a stage are said in two ways",
            got=", ".join(names),
            expected="first_stage_layers and last_stage_layers, or account_for_embedding and account_for_loss, "
            "or pipeline_layout",
        )
    elif parallel.pipeline_layout is not None:
        yield from _of_layout(parallel, parallel.pipeline_layout)


def _of_layout(parallel: ParallelConfig, layout: str) -> Iterator[Problem]:
    stages = stages_of(layout)
    letters = "".join(stages)
    if unknown := sorted(set(letters) - {EMBEDDING, LAYER, LOSS, PREDICTION}):
        yield Problem(
            _KEY,
            "Megatron-Core does not know this letter",
            got=f"{' '.join(map(repr, unknown))} in {layout!r}",
            expected="E (embedding), t (layer), L (loss), | (end of a stage), and *n after a letter or (...)",
        )
    elif PREDICTION in letters:
        yield Problem(
            _KEY,
            "layers that predict several tokens at once are not trained: their routers have no recorded routes",
            got=f"m in {layout!r}",
            expected="no m",
        )
    else:
        yield from _of_ends(stages, layout)
        yield from _of_ranks(parallel, stages, layout)


def _of_ends(stages: tuple[str, ...], layout: str) -> Iterator[Problem]:
    letters = "".join(stages)
    if letters.count(EMBEDDING) != 1 or not stages[0].startswith(EMBEDDING):
        yield Problem(
            _KEY,
            "Megatron-Core computes the embedding in the first stage, before all layers",
            got=repr(layout),
            expected="one E, the first letter",
        )
    if letters.count(LOSS) != 1 or not stages[-1].endswith(LOSS):
        yield Problem(
            _KEY,
            "Megatron-Core computes the loss in the last stage, after all layers",
            got=repr(layout),
            expected="one L, the last letter",
        )


def _of_ranks(parallel: ParallelConfig, stages: tuple[str, ...], layout: str) -> Iterator[Problem]:
    ranks, virtual = parallel.pipeline, parallel.virtual_pipeline
    if len(stages) % ranks or (virtual is not None and len(stages) != ranks * virtual):
        multiple = f"a multiple of {ranks}" if virtual is None else f"{ranks * virtual}"
        yield Problem(
            _KEY,
            "stages do not divide over the pipeline ranks",
            got=f"{len(stages)} stages in {layout!r}, pipeline={ranks}, virtual_pipeline={virtual or 'none'}",
            expected=f"{multiple} stages",
        )
        return
    for rank in range(ranks):
        if not "".join(stages[rank::ranks]):
            yield Problem(
                _KEY,
                "a pipeline rank has nothing to compute",
                got=f"rank {rank} of {ranks} in {layout!r}",
                expected="a layer, the embedding or the loss on every rank",
            )
