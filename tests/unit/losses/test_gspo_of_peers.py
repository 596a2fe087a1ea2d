"""verl's `gspo` is our `gspo_token`: sigma over the response mask, aggregated by rows.

They differ in one place: verl takes rejected tokens out of the response mask, and so out of sigma. Here sigma stays
that of the whole answer.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_trm import losses
from moe_trm.losses import LossInputs, aggregate
from moe_trm.ratios import LogRatios

LOW, HIGH = 3e-2, 4e-2


def verl(
    current: Tensor, proximal: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, num_rows: int, counts: Tensor
) -> Tensor:
    """sum_i 1/(N T_i) sum_t w max(-A s, -A clip(s)), s = sg[mean of log r over the mask] with the token's own gradient.

    Written from the definition; `counts` are the T_i.
    """
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(current)):
        places = mask[i].nonzero()[:, 0]
        if not len(places):
            continue
        level = (current[i, places] - proximal[i, places]).mean().detach()
        for t in places.tolist():
            s = (level + current[i, t] - current[i, t].detach()).clamp(max=10).exp()
            bounded = s.clamp(1 - LOW, 1 + HIGH)
            total = total + weights[i, t] * torch.max(-advantages[i, t] * s, -advantages[i, t] * bounded) / counts[i]
    return total / num_rows


@pytest.mark.parametrize("rejects", ["nothing", "rows", "tokens"])
def test_gspo_token_is_gspo_of_verl(rejects: str) -> None:
    gen = torch.Generator().manual_seed(3)
    proximal = -torch.rand(6, 9, generator=gen, dtype=torch.float64)
    current = (proximal + 0.05 * torch.randn(6, 9, generator=gen, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(6, 9, generator=gen) < 0.7
    keep = mask.clone()
    if rejects == "rows":
        keep[2] = False
    if rejects == "tokens":
        keep &= torch.rand(6, 9, generator=gen) < 0.8
    advantages = torch.randn(6, 9, generator=gen, dtype=torch.float64)
    weights = torch.where(keep, torch.rand(6, 9, generator=gen, dtype=torch.float64) + 0.5, 0.0)
    ratios = LogRatios(proximal, proximal, current, mask)
    inputs = LossInputs(ratios, current, advantages, weights, keep)
    values = losses.get("gspo_token")(inputs, clip_low=LOW, clip_high=HIGH).values
    ours = aggregate(values, keep, mask, "seq-mean-token-mean", num_sequences=6, num_tokens=int(mask.sum()))
    theirs = verl(current, proximal, advantages, weights, keep, 6, mask.sum(dim=1))
    same = [torch.autograd.grad(one, current, retain_graph=True)[0] for one in (ours, theirs)]
    if rejects == "tokens":
        assert ours.item() != pytest.approx(theirs.item(), rel=1e-4)
        return
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*same)


def test_gspo_itself_differs_from_gspo_token_by_token_weights() -> None:
    """One term for each row: a token's weight multiplies the gradient of all of them, not its own alone."""
    proximal = torch.zeros(1, 3, dtype=torch.float64)
    current = torch.full((1, 3), 0.01, dtype=torch.float64).requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64)
    inputs = LossInputs(LogRatios(proximal, proximal, current, mask), current, -torch.ones(1, 3), weights, mask)
    slopes = []
    for name in ("gspo", "gspo_token"):
        values = losses.get(name)(inputs, clip_low=0.5, clip_high=0.5).values
        slopes.append(torch.autograd.grad(values.sum(), current, retain_graph=True)[0][0] / torch.e**0.01)
    torch.testing.assert_close(slopes[0], torch.full((3,), 3.5 / 3, dtype=torch.float64))
    torch.testing.assert_close(slopes[1], weights[0])
