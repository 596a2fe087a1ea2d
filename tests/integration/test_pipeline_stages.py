"""Our stages against Megatron-Core's own counting of layers, for its own settings and for its layout string."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings

from moe_trm.config.pipeline_layout import stages_of
from moe_trm.config.schema import ParallelConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.megatron.stages import Stage, balanced, megatron_layout, stages, virtual_stages
from tests.unit.learner.pipelines import pipelines

parallel_state = pytest.importorskip("megatron.core.parallel_state")
layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
block = pytest.importorskip("megatron.core.transformer.transformer_block")
layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
config = pytest.importorskip("megatron.core.transformer.transformer_config")


def own_settings(parallel: ParallelConfig, num_layers: int) -> dict[str, Any]:
    """The same pipeline in Megatron's settings, without a translation."""
    return {
        "num_layers": num_layers,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": virtual_stages(parallel),
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "account_for_embedding_in_pipeline_split": parallel.account_for_embedding,
        "account_for_loss_in_pipeline_split": parallel.account_for_loss,
        "pipeline_model_parallel_layout": parallel.pipeline_layout,
    }


def megatrons(settings: dict[str, Any]) -> Any:
    """Megatron's configuration; raises where it refuses the pipeline."""
    return config.TransformerConfig(
        hidden_size=8, num_attention_heads=1, pipeline_dtype="float32", overlap_p2p_comm=True, batch_p2p_comm=False,
        **settings,
    )  # fmt: skip


def counted(of: Any, parallel: ParallelConfig) -> list[range]:
    """Layers of each stage in the order of the model, as Megatron counts them."""
    found = []
    for virtual in range(virtual_stages(parallel) or 1):
        for rank in range(parallel.pipeline):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
                size = virtual_stages(parallel)
                patch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda size=size: size)
                place = None if size is None else virtual
                first = layer.get_transformer_layer_offset(of, place, rank)
                found.append(range(first, first + block.get_num_layers_to_build(of, place, rank)))
    return found


def test_layout_strings_are_read_as_megatron_reads_them() -> None:
    for layout in ("Et*15|t*16|t*15|t*15L", "Ettt|(tt|)*29L", "E,t*3,|,(t|)*2L", "(|tt)*2L", "Et||tL", balanced(61, 7)):
        letters = {"embedding": "E", "decoder": "t", "loss": "L"}
        theirs = layouts.PipelineParallelLayerLayout.parse_str_to_list(layout)
        assert stages_of(layout) == tuple("".join(letters[kind.name] for kind in stage) for stage in theirs)


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
@settings(max_examples=60)
@given(pipelines())
def test_stages_are_those_that_megatron_builds(drawn: tuple[ParallelConfig, int]) -> None:
    parallel, num_layers = drawn
    try:
        found: tuple[Stage, ...] | None = stages(parallel, num_layers)
    except ConfigError:
        found = None
    theirs_of = own_settings(parallel, num_layers)
    try:
        theirs = megatrons(theirs_of)
    except (ValueError, AssertionError):
        assert found is None, "Megatron-Core refuses what we accept"
        return
    if found is None:
        return
    expected = [stage.layers for stage in found]
    # Its counting of two ranks with sizes of their own divides by the number of ranks between.
    ends = parallel.first_stage_layers is not None and parallel.last_stage_layers is not None
    if not (ends and parallel.pipeline == 2 and virtual_stages(parallel)):
        assert same(counted(theirs, parallel), expected)
    layout = megatron_layout(parallel, num_layers)
    if layout is not None:
        names = ("num_layers", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
        ours = megatrons({**{name: theirs_of[name] for name in names}, "pipeline_model_parallel_layout": layout})
        assert same(counted(ours, parallel), expected)


def same(left: list[range], right: list[range]) -> bool:
    """Equal layers; where a stage without layers would begin does not matter."""
    return [list(layers) for layers in left] == [list(layers) for layers in right]


@pytest.mark.skipif(not version("megatron-core").startswith("0.16."), reason="another Megatron-Core may count them")
def test_megatron_cannot_count_two_ranks_with_sizes_of_their_own() -> None:
    """Its own settings would end in a division by zero; the layout string that we hand over does not."""
    parallel = ParallelConfig(pipeline=2, virtual_pipeline=2, first_stage_layers=4, last_stage_layers=2)
    theirs = SimpleNamespace(**{**own_settings(parallel, 6), "pipeline_model_parallel_layout": None})
    with pytest.raises(ZeroDivisionError):
        layer.get_transformer_layer_offset(theirs, 0, 1)
    assert megatron_layout(parallel, 6) == "Ett|t|tt|tL"
