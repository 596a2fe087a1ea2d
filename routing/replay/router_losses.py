"""Losses of routers in one forward: balance of the experts' load, and size of the logits.

For a row of T tokens, in each layer with experts, with s the routers' scores (softmax of the logits, or their sigmoids
divided by their sum):

| loss | of a row |
|---|---|
| balance | `E sum_e f_e P_e`; f_e: share of the T K choices that fall on expert e, P_e: mean of s_e |
| z | mean of `logsumexp(logits)^2` |

Sources: Switch Transformer (arXiv 2101.03961), by sequence as in DeepSeek-V3 (arXiv 2412.19437); z: ST-MoE (arXiv
2202.08906). Layers and rows are added up. An even load has a balance of 1.

f counts the K best of the live scores, under replay too, and without a selection bias. P is of the present weights, so
f has to be as well: counted by replayed routes, the loss would push away from experts that were crowded when the
rollout was sampled, whether or not they still are. Megatron-Core and transformers count alike. f has no gradient.

The losses enter by the backward pass alone. In the forward the gate weights keep their bits.

Shape letters: N local tokens in router order, M of them real, B rows, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RouterTerms:
    """Factors of the sum over rows and layers: coefficients, already divided by the rows of the whole minibatch."""

    balance: float = 0.0
    z: float = 0.0


class RouterLosses:
    """The losses of one forward, which its routers add to their gradient.

    Args:
        terms: of the minibatch.
        row_of: `[N]` int64: the row of each local token, -1 for padding.
        lengths: `[B]` tokens of each row, on all ranks that share it.
        device: of the routers.
        scale: factor of every gradient of this backward.
        over_ranks: sum of a tensor over the ranks that hold other tokens of the same rows; None: rows are whole.

    Attributes:
        sums: `[2]` float64, the balance and the z of the local tokens, added up over rows and layers.
    """

    def __init__(
        self,
        terms: RouterTerms,
        row_of: Tensor,
        lengths: Tensor,
        device: torch.device,
        *,
        scale: float = 1.0,
        over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        real = (row_of >= 0).nonzero().flatten()
        self._real, self._rows = real.to(device), row_of[real].to(device)
        self._lengths = lengths.to(device)
        self._terms, self._scale, self._over_ranks = terms, scale, over_ranks
        self._shares: dict[int, Tensor] = {}
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def attach(self, layer: int, weights: Tensor, logits: Tensor, top_k: int, *, sigmoid: bool) -> Tensor:
        """The gate weights, in any shape, whose backward adds the losses of `layer` to the gradient of `logits`.

        `logits` are `[N, E]`. Collective over the ranks of `over_ranks`, once for each layer. Recomputation in backward
        calls it again, and counts nothing twice.
        """
        # What attention makes of padding may be NaN.
        real_ME = logits.index_select(0, self._real)
        real_ME = real_ME.to(torch.promote_types(real_ME.dtype, torch.float32))
        lengths_M = self._lengths[self._rows].to(real_ME.dtype)
        scores_ME = real_ME.sigmoid() if sigmoid else real_ME.softmax(-1)
        if sigmoid:
            scores_ME = scores_ME / (scores_ME.sum(-1, keepdim=True) + 1e-20)
        is_first = layer not in self._shares
        if is_first:
            self._shares[layer] = self._load(scores_ME.detach(), top_k)
        shares_ME = self._shares[layer][self._rows].to(scores_ME.dtype)
        balance = ((shares_ME * scores_ME).sum(-1) * scores_ME.shape[-1] / lengths_M).sum()
        z = (real_ME.logsumexp(-1).square() / lengths_M).sum()
        if is_first:
            self.sums += torch.stack((balance.detach(), z.detach()))
        loss = self._terms.balance * balance + self._terms.z * z
        return _WithLoss.apply(weights, loss, self._scale)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]

    def _load(self, scores_ME: Tensor, top_k: int) -> Tensor:
        """`[B, E]` f of each row."""
        chosen_ME = torch.zeros_like(scores_ME).scatter_(1, scores_ME.topk(top_k, dim=-1).indices, 1.0)
        counts_BE = chosen_ME.new_zeros(len(self._lengths), chosen_ME.shape[1]).index_add_(0, self._rows, chosen_ME)
        if self._over_ranks is not None:
            counts_BE = self._over_ranks(counts_BE)
        return counts_BE / (top_k * self._lengths.clamp(min=1))[:, None]


class _WithLoss(torch.autograd.Function):
    """`values`, in whose backward `loss` takes part with the gradient `scale`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full((), ctx.scale, dtype=ctx.dtype, device=gradients[0].device), None
