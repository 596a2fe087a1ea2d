"""Layers of the stages of a pipeline: each layer once, in order; and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.config import rules
from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.megatron.stages import Stage, balanced, layers_by_rank, megatron_layout, stages, virtual_stages
from tests.unit.learner.pipelines import pipelines

DEEPSEEK_V3, GLM_4_5_AIR = 61, 46


def accepted(parallel: ParallelConfig, num_layers: int) -> tuple[Stage, ...] | None:
    """The stages, None where they are refused."""
    try:
        return stages(parallel, num_layers)
    except ConfigError:
        return None


def counts(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each pipeline rank."""
    return [len(layers) for layers in layers_by_rank(parallel, num_layers)]


@pytest.mark.parametrize(
    ("settings", "num_layers", "expected"),
    [
        ({"pipeline": 1}, 3, [3]),
        ({"pipeline": 2}, 46, [23, 23]),
        ({"pipeline": 2, "account_for_embedding": True}, DEEPSEEK_V3, [30, 31]),
        ({"pipeline": 2, "account_for_loss": True}, DEEPSEEK_V3, [31, 30]),
        ({"pipeline": 2, "first_stage_layers": 31}, DEEPSEEK_V3, [31, 30]),
        ({"pipeline": 4, "first_stage_layers": 16}, DEEPSEEK_V3, [16, 15, 15, 15]),
        ({"pipeline": 4, "first_stage_layers": 15, "last_stage_layers": 14}, DEEPSEEK_V3, [15, 16, 16, 14]),
        ({"pipeline": 4, "pipeline_layout": "Et*15|t*16|t*15|t*15L"}, DEEPSEEK_V3, [15, 16, 15, 15]),
        ({"pipeline": 4, "pipeline_layout": "Et*20|t*21|t*20|L"}, DEEPSEEK_V3, [20, 21, 20, 0]),
        (
            {"pipeline": 4, "account_for_embedding": True, "account_for_loss": True},
            GLM_4_5_AIR,
            [11, 12, 12, 11],
        ),
        ({"pipeline": 4, "virtual_pipeline": 2, "pipeline_layout": "Et*5|(t*6|)*6t*5L"}, GLM_4_5_AIR, [11, 12, 12, 11]),
        ({"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 4, "last_stage_layers": 2}, 6, [4, 2]),
    ],
)
def test_published_depths_over_ranks(settings: dict[str, Any], num_layers: int, expected: list[int]) -> None:
    assert counts(ParallelConfig(**settings), num_layers) == expected


def test_virtual_stages_take_turns_and_may_be_empty() -> None:
    layout = ParallelConfig(pipeline=2, pipeline_layout="Ett|t||tL")
    assert virtual_stages(layout) == 2
    assert layers_by_rank(layout, 4) == [(0, 1), (2, 3)]
    found = stages(layout, 4)
    assert [len(stage.layers) for stage in found] == [2, 1, 0, 1]
    assert [stage.embedding for stage in found] == [True, False, False, False]
    assert [stage.loss for stage in found] == [False, False, False, True]
    assert virtual_stages(ParallelConfig(pipeline=2, virtual_pipeline=1)) is None


@given(pipelines())
def test_an_accepted_layout_has_each_layer_once_stage_by_stage(drawn: tuple[ParallelConfig, int]) -> None:
    parallel, num_layers = drawn
    found = accepted(parallel, num_layers)
    if found is None:
        return
    assert [layer for stage in found for layer in stage.layers] == list(range(num_layers))
    assert len(found) == parallel.pipeline * (virtual_stages(parallel) or 1)
    assert [stage.embedding for stage in found] == [place == 0 for place in range(len(found))]
    assert [stage.loss for stage in found] == [place == len(found) - 1 for place in range(len(found))]
    by_rank = layers_by_rank(parallel, num_layers)
    assert sorted(layer for layers in by_rank for layer in layers) == list(range(num_layers))
    layout = megatron_layout(parallel, num_layers)
    if layout is not None:
        same = ParallelConfig(pipeline=parallel.pipeline, pipeline_layout=layout)
        assert stages(same, num_layers) == found


@given(st.integers(1, 80), st.integers(2, 16))
def test_advice_is_accepted_and_as_even_as_can_be(num_layers: int, number: int) -> None:
    if num_layers < number:
        return
    found = counts(ParallelConfig(pipeline=number, pipeline_layout=balanced(num_layers, number)), num_layers)
    assert max(found) - min(found) <= 1
    assert found[-1] == min(found)


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ({"first_stage_layers": 3}, "first_stage_layers", "there is one"),
        ({"pipeline": 2, "pipeline_layout": "Ett|txL"}, "pipeline_layout", "does not know this letter"),
        ({"pipeline": 2, "pipeline_layout": "Ett| tL"}, "pipeline_layout", "does not know this letter"),
        ({"pipeline": 2, "pipeline_layout": "E(t|(t)*2)*2L"}, "pipeline_layout", "does not know this letter"),
        ({"pipeline": 2, "pipeline_layout": "Ett|ttmL"}, "pipeline_layout", "predict several tokens"),
        ({"pipeline": 2, "pipeline_layout": "tEt|ttL"}, "pipeline_layout", "embedding in the first stage"),
        ({"pipeline": 2, "pipeline_layout": "|Ett||ttL"}, "pipeline_layout", "embedding in the first stage"),
        ({"pipeline": 2, "pipeline_layout": "Ett|tt"}, "pipeline_layout", "loss in the last stage"),
        ({"pipeline": 2, "pipeline_layout": "EtL|tttL"}, "pipeline_layout", "loss in the last stage"),
        ({"pipeline": 2, "pipeline_layout": "Et|t|ttL"}, "pipeline_layout", "do not divide over the pipeline ranks"),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Ett|ttL"},
            "pipeline_layout",
            "do not divide over the pipeline ranks",
        ),
        ({"pipeline": 3, "pipeline_layout": "Ett||ttL"}, "pipeline_layout", "nothing to compute"),
        (
            {"pipeline": 2, "pipeline_layout": "Ett|ttL", "first_stage_layers": 2},
            "pipeline_layout",
            "in two ways",
        ),
        (
            {"pipeline": 2, "first_stage_layers": 3, "account_for_loss": True},
            "account_for_loss",
            "in two ways",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_rules_and_learner(
    settings: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        stages(ParallelConfig(**settings), 4)
    assert caught.value.where == f"learner.parallel.{key}"
    run = Config.model_validate({"model": {"checkpoint": "m"}, "learner": {"parallel": settings}})
    assert any(p.key == f"learner.parallel.{key}" and reason in p.what for p in rules.refusals(run))


@pytest.mark.parametrize(
    ("settings", "num_layers", "reason", "advice"),
    [
        ({"pipeline": 4}, 61, "61 layers, 4 ranks and stages", "'Et*15|t*16|t*15|t*15L'"),
        ({"pipeline": 2, "virtual_pipeline": 2}, 46, "46 layers, 4 ranks and stages", "'Et*11|t*12|t*12|t*11L'"),
        ({"pipeline": 4, "account_for_loss": True}, 61, r"62 with what is accounted for", "'Et*15"),
        ({"pipeline": 2, "pipeline_layout": "Et*30|t*30L"}, 61, "60 layers in", "'Et*31|t*30L'"),
        ({"pipeline": 4, "first_stage_layers": 15}, 61, "46 of 61 layers left, 3 ranks between", "'Et*15"),
        ({"pipeline": 2, "first_stage_layers": 4, "last_stage_layers": 1}, 6, "1 of 6 layers left", "'Et*3|t*3L'"),
        ({"pipeline": 3, "first_stage_layers": 4, "last_stage_layers": 4}, 6, "-2 of 6 layers left", "'Et*2"),
        ({"pipeline": 3, "first_stage_layers": 3, "last_stage_layers": 3}, 6, "0 of 6 layers left", "'Et*2"),
        ({"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 3}, 8, "3 layers, 2 virtual stages", "'Et*2"),
    ],
)
def test_layers_that_do_not_add_up_are_refused_with_a_layout_that_does(
    settings: dict[str, Any], num_layers: int, reason: str, advice: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        stages(ParallelConfig(**settings), num_layers)
    assert caught.value.where.startswith("learner.parallel.")
    assert advice in caught.value.fix
