from __future__ import annotations

import pytest
import torch

from moe_trm.errors import LearnerError
from moe_trm.learner.snapshots import Snapshots


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    model.register_buffer("unsaved", torch.ones(2), persistent=False)
    return model


def state(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def move(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(left, right, strict=True))


def test_a_snapshot_is_used_and_the_own_weights_come_back_bit_for_bit() -> None:
    model = make_model()
    snapshots, start = Snapshots([model]), state(model)
    snapshots.take("start")
    move(model)
    snapshots.take("later")
    move(model)
    now, places = state(model), [tensor.data_ptr() for tensor in model.parameters()]
    with snapshots.using("start"):
        assert same(state(model), start)
    assert same(state(model), now)
    with snapshots.using(None):
        assert same(state(model), now)
    assert [tensor.data_ptr() for tensor in model.parameters()] == places
    assert snapshots.names == ("start", "later")


def test_the_own_weights_come_back_after_an_error() -> None:
    model = make_model()
    snapshots = Snapshots([model])
    snapshots.take("start")
    move(model)
    now = state(model)
    with pytest.raises(RuntimeError, match="mid-pass"), snapshots.using("start"):
        raise RuntimeError("mid-pass")
    assert same(state(model), now)


def test_a_name_that_is_not_held_is_refused() -> None:
    snapshots = Snapshots([make_model()])
    snapshots.take("one")
    snapshots.forget("one")
    with pytest.raises(LearnerError, match="no snapshot of this name"):
        snapshots.forget("one")
    with pytest.raises(LearnerError, match="none has been taken"), snapshots.using("one"):
        pass
