"""Common behaviour of both learners, with parts that only remember their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_trm.errors import ConfigError
from moe_trm.learner.base import LearnerBase, adds_in_order, check_native
from routing import FlipBoundError, MisalignedError
from routing.judge.flip_bound import Suspect
from routing.record.sources import Native, Record, Recorded, ReplayRecorded, ReplayReport


class Replayer:
    layer_ids = (1, 2)

    def __init__(self) -> None:
        self.waiting = self.asked = 0

    def report(self, group: object = None) -> ReplayReport:
        self.asked += 1
        found, self.waiting = ReplayReport(replayed=self.waiting, matched=self.waiting), 0
        return found

    @property
    def is_proved(self) -> bool:
        return not self.waiting


def learner(replayer: Replayer | None, **options: Any) -> LearnerBase:
    data = SimpleNamespace(rank=1, size=2, device=torch.device("cpu"))
    return LearnerBase(replayer, None, None, None, data, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "top_k", "in_order"), [("cpu", 8, True), ("cuda", 2, True), ("cuda", 3, False)])
def test_experts_are_added_in_order_on_a_cpu_and_in_pairs(device: str, top_k: int, in_order: bool) -> None:
    assert adds_in_order(torch.device(device), top_k) is in_order


def test_a_report_holds_every_proof_since_the_last_one() -> None:
    replayer = Replayer()
    base = learner(replayer)
    for tokens in (3, 4):
        replayer.waiting = tokens
        base._verify()
    replayer.waiting = 5
    assert base.replay_report() == ReplayReport(replayed=12, matched=12)
    assert replayer.asked == 3
    assert base.replay_report() == ReplayReport()
    assert replayer.asked == 3, "nothing was replayed since: other ranks are not asked for anything"


def test_a_doubt_without_a_second_look_stops_and_a_moved_router_is_counted() -> None:
    seen = ReplayReport(replayed=10, matched=10, local_flips=6)
    doubt = FlipBoundError("too many", [Suspect(4, 2, 0.6, 0.3, 0.01, 40)], seen)

    class Doubtful(Replayer):
        num_layers = 3

        def report(self, group: object = None) -> ReplayReport:
            raise doubt

    base = learner(Doubtful())
    with pytest.raises(FlipBoundError, match="sample 4, layer 2"):
        base._verify()
    routes = torch.arange(40)[:, None] % 8
    recorded = Recorded({2: routes})
    batch: Any = SimpleNamespace(sample_ids=(4,), input_ids=torch.zeros(1, 40))
    base._verify([batch], [ReplayRecorded(recorded)], lambda _native: [recorded])
    assert base._report == ReplayReport(replayed=10, matched=10, local_flips=6, moved=1)
    with pytest.raises(MisalignedError, match=r"sample 4, layer 2.*of the row before"):
        base._verify([batch], [ReplayRecorded(recorded)], lambda _native: [Recorded({2: routes.roll(-1, 0)})])


def test_a_dense_model_replays_nothing() -> None:
    base = learner(None)
    assert (base.moe_layer_ids, base.model_moe_layer_ids) == ((), ())
    assert base.replay_report() == ReplayReport()
    check_native(Native())
    with pytest.raises(ConfigError, match="dense"):
        check_native(Record())


def test_ranks_and_layers_are_those_of_the_parts() -> None:
    base = learner(Replayer(), is_data_leader=False, model_moe_layer_ids=(1, 2, 3, 4))
    assert (base.data_rank, base.data_size, base.is_data_leader) == (1, 2, False)
    assert (base.moe_layer_ids, base.model_moe_layer_ids) == ((1, 2), (1, 2, 3, 4))
    values = torch.ones(3)
    assert base.sum_over_slices(values) is values
    assert base.sum_over_stages(values) is values
