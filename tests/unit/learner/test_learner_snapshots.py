from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_trm.errors import LearnerError
from moe_trm.learner.checkpoint.pieces import Piece, PieceReader, whole, write_pieces
from moe_trm.learner.snapshots import Snapshots
from moe_trm.sync.rounding import Rounding


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_snapshot_holds_what_a_push_in_that_dtype_leaves(dtype: torch.dtype) -> None:
    """Buffers stay exact, as the biases by which experts are chosen do on their way to the engine."""
    model = make_model().float()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.linspace(0.1, 1.3, tensor.numel()).view(tensor.shape))
    snapshots, now = Snapshots([model]), state(model)
    snapshots.take("cast", rounding=Rounding(str(dtype).removeprefix("torch.")))
    with snapshots.using("cast"):
        for held, exact in zip(model.parameters(), now, strict=False):
            assert torch.equal(held, exact.to(dtype).float())
        assert not torch.equal(next(model.parameters()), now[0])
        assert same(list(model.buffers()), now[-len(list(model.buffers())) :])
    assert same(state(model), now)


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


class WholeWeights:
    """The parameters of one module as whole tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def save_weights(self, kind: str) -> list[Piece]:
        return [whole(f"{kind}/{name}", parameter) for name, parameter in self._model.named_parameters()]

    @torch.no_grad()
    def load_weights(self, kind: str, reader: PieceReader) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(reader.read(f"{kind}/{name}", parameter.shape))


def test_copies_that_were_taken_to_be_saved_come_back_and_others_do_not(tmp_path: Path) -> None:
    model = make_model()
    snapshots, taken = Snapshots([model]), []
    for name, saved in (("behavior-3", True), ("reference", False), ("behavior-4", True), ("behavior-5", True)):
        snapshots.take(name, saved=saved)
        taken.append([parameter.detach().clone() for parameter in model.parameters()])
        move(model)
    snapshots.forget("behavior-3")
    now = state(model)
    write_pieces(tmp_path / "pieces", snapshots.save(WholeWeights(model)))
    assert same(state(model), now)

    other = make_model()
    restored = Snapshots([other])
    restored.load(WholeWeights(other), PieceReader([tmp_path / "pieces"]))
    assert restored.names == ("behavior-4", "behavior-5")
    for name, expected in zip(restored.names, taken[2:], strict=True):
        with restored.using(name):
            assert same([parameter.detach() for parameter in other.parameters()], expected)


def drift(model: torch.nn.Module, chance: torch.Generator) -> None:
    """Moves as small as updates are: most round to nothing in bfloat16 when they are added to an average."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.02 * torch.randn(tensor.shape, generator=chance))


def test_an_average_is_the_weighted_mean_of_all_weights_so_far() -> None:
    """Against one sum in float64 over the whole history, with the shares of PPO-EWMA at decay 0.9."""
    model, chance = make_model(), torch.Generator().manual_seed(0)
    snapshots, history, total = Snapshots([model]), [], 0.0
    plain: list[torch.Tensor] = []
    for _ in range(30):
        drift(model, chance)
        history.append([parameter.detach().double() for parameter in model.parameters()])
        total = 0.9 * total + 1
        snapshots.blend("proximal", 1 / total)
        new = [parameter.detach().clone() for parameter in model.parameters()]
        plain = [one.lerp(two, 1 / total) for one, two in zip(plain or new, new, strict=True)]
    shares = torch.tensor([0.9 ** (len(history) - 1 - i) for i in range(len(history))], dtype=torch.float64)
    shares /= shares.sum()
    with snapshots.using("proximal"):
        held = [parameter.detach().clone() for parameter in model.parameters()]
    worst = 0.0
    for index, (average, without_rest) in enumerate(zip(held, plain, strict=True)):
        exact = sum(share * weights[index] for share, weights in zip(shares, history, strict=True))
        assert isinstance(exact, torch.Tensor)
        step = exact.abs() * 2.0**-8 + 1e-7
        assert bool(((average.double() - exact).abs() <= step).all())
        worst = max(worst, float(((without_rest.double() - exact).abs() / step).max()))
    assert worst > 1, "an average in bfloat16 alone would do as well"


def test_an_average_has_the_buffers_of_the_present() -> None:
    """Selection biases are not averaged: they are set, not trained."""
    model, chance = make_model(), torch.Generator().manual_seed(2)
    model.register_buffer("bias", torch.zeros(3))
    snapshots = Snapshots([model])
    for number in range(3):
        drift(model, chance)
        model.bias.fill_(number)  # type: ignore[operator]
        snapshots.blend("proximal", 0.5)
    model.bias.fill_(9)  # type: ignore[operator]
    with snapshots.using("proximal"):
        assert model.bias.tolist() == [2, 2, 2]  # type: ignore[operator]


def test_an_average_that_was_saved_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    model, chance = make_model(), torch.Generator().manual_seed(1)
    snapshots = Snapshots([model])
    for _ in range(5):
        drift(model, chance)
        snapshots.blend("proximal", 0.3)
    write_pieces(tmp_path / "pieces", snapshots.save(WholeWeights(model)))
    other = make_model()
    restored = Snapshots([other])
    restored.load(WholeWeights(other), PieceReader([tmp_path / "pieces"]))
    for _ in range(5):
        drift(model, chance)
        with torch.no_grad():
            for own, new in zip(other.parameters(), model.parameters(), strict=True):
                own.copy_(new)
        snapshots.blend("proximal", 0.3)
        restored.blend("proximal", 0.3)
    for name in ("proximal", "proximal-rest"):
        with snapshots.using(name), restored.using(name):
            assert same([*model.parameters()], [*other.parameters()])
