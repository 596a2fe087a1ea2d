"""Common behaviour of both learners, with parts that only remember their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_trm.errors import ConfigError
from moe_trm.learner.base import LearnerBase, check_native
from routing.replay import Native, Record, ReplayReport


class Replayer:
    layer_ids = (1, 2)

    def __init__(self) -> None:
        self.waiting = 0

    def report(self, group: object = None) -> ReplayReport:
        found, self.waiting = ReplayReport(replayed=self.waiting, matched=self.waiting), 0
        return found


def learner(replayer: Replayer | None, **options: Any) -> LearnerBase:
    data = SimpleNamespace(rank=1, size=2)
    return LearnerBase(replayer, None, None, None, data, **options)  # type: ignore[arg-type]


def test_a_report_holds_every_proof_since_the_last_one() -> None:
    replayer = Replayer()
    base = learner(replayer)
    for tokens in (3, 4):
        replayer.waiting = tokens
        base._verify()
    replayer.waiting = 5
    assert base.replay_report() == ReplayReport(replayed=12, matched=12)
    assert base.replay_report() == ReplayReport()


def test_a_dense_model_replays_nothing() -> None:
    base = learner(None)
    assert (base.moe_layer_ids, base.model_moe_layer_ids) == ((), ())
    assert base.replay_report() == ReplayReport()
    check_native(Native())
    with pytest.raises(ConfigError, match="dense"):
        check_native(Record())


def test_ranks_and_layers_are_those_of_the_parts() -> None:
    base = learner(Replayer(), leads=False, model_moe_layer_ids=(1, 2, 3, 4))
    assert (base.data_rank, base.data_size, base.leads) == (1, 2, False)
    assert (base.moe_layer_ids, base.model_moe_layer_ids) == ((1, 2), (1, 2, 3, 4))
    values = torch.ones(3)
    assert base.sum_over_slices(values) is values
    assert base.sum_over_stages(values) is values
