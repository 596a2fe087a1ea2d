"""Schedules that cannot work are refused with the reason; settings without effect are told."""

from __future__ import annotations

from typing import Any

import pytest

from moe_trm.config.rules import refusals, warnings
from moe_trm.config.schema import Config

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def config(pipeline: dict[str, Any], **sections: Any) -> Config:
    given = {"model": {"checkpoint": "unused"}, "replay": {"mode": "R3"}, "probe": {"every": 10}, **sections}
    return Config.model_validate({**given, "pipeline": pipeline})


@pytest.mark.parametrize(
    ("pipeline", "bound"),
    [
        ({}, 0),
        ({"push_every": 3}, 2),
        ({"mode": "periodic", "push_every": 4}, 3),
        ({"mode": "one_step"}, 1),
        ({"mode": "one_step", "push_every": 2}, 2),
        ({"mode": "async"}, 2),
        ({"mode": "async", "push_every": 3}, 4),
        ({"mode": "async", "push_every": 3, "max_staleness": 2}, 2),
    ],
)
def test_the_bound_of_each_mode(pipeline: dict[str, Any], bound: int) -> None:
    chosen = config(pipeline)
    assert chosen.pipeline.staleness_limit == bound
    assert chosen.pipeline.recovery == ("snapshot" if bound else "same")
    assert refusals(chosen) == []


ASYNC = {"mode": "async"}
AVERAGE = {**ASYNC, "proximal": "average"}
STREAM = {**ASYNC, "stream": True}


@pytest.mark.parametrize(
    ("pipeline", "sections", "key", "says"),
    [
        ({"push_every": 2, "max_staleness": 0}, {}, "pipeline.max_staleness", "none, or 1"),
        ({"mode": "periodic", "max_staleness": 2}, {}, "pipeline.max_staleness", "none, or 0"),
        ({**ASYNC, "push_every": 3, "max_staleness": 1}, {}, "pipeline.max_staleness", "at least 2"),
        ({"push_every": 2}, {"rollout": {"colocate": True}}, "rollout.colocate", "gets it back with a push"),
        (
            {},
            {"rollout": {"colocate": True, "urls": URLS, "router": "http://127.0.0.1:3"}},
            "rollout.colocate",
            "asks its servers for their health",
        ),
        ({"push_every": 2}, {"train": {"eval_every": 3}}, "train.eval_every", "a multiple of 2"),
        (
            {**ASYNC, "rolling_push": True},
            {"rollout": {"urls": URLS, "router": "http://127.0.0.1:3"}},
            "pipeline.rolling_push",
            "behind a router",
        ),
        (
            {**ASYNC, "rolling_push": True, "partial": "interrupt"},
            {"rollout": {"urls": URLS}},
            "pipeline.rolling_push",
            "older weights than it began with",
        ),
        ({"reuse_groups": 1}, {}, "pipeline.reuse_groups", "older than the bound"),
        ({"mode": "one_step", "reuse_groups": 1}, {}, "pipeline.reuse_groups", "trained first"),
        (AVERAGE, {"replay": {"mode": "R2"}}, "pipeline.proximal", "replay.mode=R2"),
        ({**AVERAGE, "behavior": "bypass"}, {}, "pipeline.proximal", "pipeline.behavior=bypass"),
        (AVERAGE, {"kl": {"coef": 0.1, "where": "reward"}}, "pipeline.proximal", "kl.where=reward"),
        (
            AVERAGE,
            {"kl": {"coef": 0.1, "where": "advantage", "estimator": "k1"}},
            "pipeline.proximal",
            "kl.where=advantage",
        ),
        (AVERAGE, {"optimizer": {"ess_scale": "sqrt"}}, "pipeline.proximal", "optimizer.ess_scale"),
        (
            AVERAGE,
            {"advantage": {"name": "opob"}, "rollout": {"top_p": 0.9}},
            "pipeline.proximal",
            "advantage.name=opob",
        ),
        (STREAM, {"learner": {"minibatches": 2, "epochs": 2}}, "pipeline.stream", "learner.epochs=2"),
        (STREAM, {"learner": {"minibatches": 32}}, "pipeline.stream", "16 prompts"),
        (STREAM, {"optimizer": {"ess_scale": "sqrt"}}, "pipeline.stream", "optimizer.ess_scale"),
        (STREAM, {"optimizer": {"surge_limit": 1.2}}, "pipeline.stream", "surge_limit"),
        (STREAM, {"advantage": {"name": "reinforce_plus_plus"}}, "pipeline.stream", "whitened"),
        ({"stream": True}, {"rollout": {"colocate": True}}, "pipeline.stream", "colocate"),
    ],
)
def test_what_cannot_work_is_refused(pipeline: dict[str, Any], sections: dict[str, Any], key: str, says: str) -> None:
    found = {problem.key: str(problem) for problem in refusals(config(pipeline, **sections))}
    assert set(found) == {key}
    assert says in found[key]


@pytest.mark.parametrize(
    ("pipeline", "sections", "says"),
    [
        ({**ASYNC, "max_uses": 3}, {}, "pipeline.max_uses has no effect: pipeline.reuse_groups=0"),
        ({**ASYNC, "reuse_tau": 2.0}, {}, "pipeline.reuse_tau has no effect"),
        ({**ASYNC, "reuse_correction": 0.5}, {}, "pipeline.reuse_correction has no effect"),
        ({**ASYNC, "proximal_decay": 0.5}, {}, "pipeline.proximal_decay has no effect"),
        ({**ASYNC, "rolling_push": True}, {}, "pipeline.rolling_push has no effect: one server"),
        ({"rolling_push": True}, {"rollout": {"urls": URLS}}, "pipeline.rolling_push has no effect: nothing is"),
        (STREAM, {"learner": {"minibatches": 1}}, "pipeline.stream has no effect"),
    ],
)
def test_what_has_no_effect_is_told(pipeline: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    chosen = config(pipeline, **sections)
    assert refusals(chosen) == []
    assert any(warning.startswith(says) for warning in warnings(chosen))


def test_schedules_go_together() -> None:
    everything = {**ASYNC, "push_every": 2, "stream": True, "rolling_push": True, "proximal": "average"}
    chosen = config({**everything, "reuse_groups": 4}, rollout={"urls": URLS}, train={"eval_every": 4})
    assert refusals(chosen) == []
    assert not [warning for warning in warnings(chosen) if "pipeline." in warning]
