"""Gate weights at replayed ids, proved in every replayed forward; the router's gradient, proved once for each layer.

Ids alone prove half of a replay. The experts could be given the live experts' weights, or weights without a gradient.
So in each replayed forward, the weights that the experts get are compared with the formula, applied to the expected
ids. And in the first backward with a gradient at these weights, the router must get one that is not zero. A run that
is resumed attaches anew, and proves the gradient again.

Shape letters: N local tokens in router order, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from routing.errors import ReplayProofError

FORMULA_TOLERANCE = 1e-2
"""Relative; far above bfloat16 rounding of a gate weight, far below the difference between two formulas."""
WRONG, UNANSWERED = range(2)


class GateProof:
    """The gates of one replayer's layers.

    Args:
        layers: the attached MoE layers.
        num_layers: rows of the counts.
        device: of the counts.
    """

    def __init__(self, layers: Sequence[int], num_layers: int, device: torch.device) -> None:
        self._unanswered = set(layers)
        self._nothing = torch.zeros(num_layers, 2, dtype=torch.int64, device=device)
        self._is_counted = False
        """True when anything was counted since the last `take`."""
        self._wrong = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self._requested, self._answered = (torch.zeros(num_layers, dtype=torch.bool, device=device) for _ in range(2))

    @torch.no_grad()
    def compare(self, layer: int, weights: Tensor, formula: Tensor, due_N: Tensor) -> None:
        """Count the tokens `due_N` `[N]` whose weights `[N, K]` differ from `formula`."""
        self._is_counted = True
        close = torch.isclose(weights.float(), formula.float(), rtol=FORMULA_TOLERANCE, atol=1e-6).all(1)
        self._wrong[layer] += (~close & due_N).sum()

    def watches(self, layer: int) -> bool:
        """True until the router of `layer` has got a gradient."""
        return layer in self._unanswered

    def asks(self, layer: int, weights: Tensor) -> None:
        """Remember whether a gradient arrives at the gate weights that the experts get."""
        if weights.requires_grad:
            weights.register_hook(partial(self._note, self._requested, layer))  # type: ignore[no-untyped-call]
        else:
            # Nothing below can get a gradient.
            self._requested[layer] = self._is_counted = True

    def answered(self, layer: int, gradient: Tensor) -> None:
        """A gradient hook of the router of `layer`: of its weight, or of its logits."""
        if layer in self._unanswered:
            self._note(self._answered, layer, gradient)

    def take(self) -> Tensor:
        """`[num_layers, 2]` int64: tokens with other weights, and whether the router was left without a gradient.

        Reset by the call.
        """
        if not self._is_counted:
            return self._nothing
        self._is_counted = False
        counts = torch.stack((self._wrong, (self._requested & ~self._answered).long()), dim=1)
        if self._unanswered and bool(self._requested.any()):
            self._unanswered -= set(self._answered.nonzero().flatten().tolist())
        self._wrong.zero_()
        self._requested.zero_()
        return counts

    def _note(self, flags: Tensor, layer: int, gradient: Tensor) -> None:
        self._is_counted = True
        flags[layer] |= gradient.detach().ne(0).any()


def check_gates(counts: Tensor) -> None:
    """Raise `ReplayProofError` when counts `[num_layers, 2]`, summed over ranks, show gates that are not replayed."""
    for layer, row in enumerate(counts.tolist() if counts.numel() else ()):
        if row[WRONG]:
            raise ReplayProofError(
                f"layer {layer}: {row[WRONG]} tokens got gate weights that are not those of their replayed experts. "
                "The step must not be trained on."
            )
        if row[UNANSWERED]:
            raise ReplayProofError(
                f"layer {layer}: the gate weights of replayed experts have a gradient, and the router got none on "
                f"{row[UNANSWERED]} ranks: it would never learn. The step must not be trained on."
            )


def megatron_weights(config: object, logits: Tensor, ids: Tensor) -> Tensor:
    """Gate weights `[N, K]` of `ids` by the formula that `TransformerConfig` names, from logits `[N, E]`.

    | score function | weights |
    |---|---|
    | softmax, after the choice | softmax of the chosen logits |
    | softmax, before it | chosen entries of the softmax |
    | sigmoid | chosen sigmoids, divided by their sum where there are several |

    All times `moe_router_topk_scaling_factor`, where there is one.
    """
    logits = logits.float()
    if getattr(config, "moe_router_score_function", "softmax") == "sigmoid":
        weights = logits.gather(1, ids).sigmoid()
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20) if ids.shape[1] > 1 else weights
    elif getattr(config, "moe_router_pre_softmax", False):
        weights = logits.softmax(1).gather(1, ids)
    else:
        weights = logits.gather(1, ids).softmax(1)
    factor = getattr(config, "moe_router_topk_scaling_factor", None)
    return weights * factor if factor else weights
