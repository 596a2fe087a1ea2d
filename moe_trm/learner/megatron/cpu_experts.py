"""Megatron's experts of a rank, whose activation and gate weights are computed together for all their places.

Megatron-Core has a grouped product for CUDA only. Its experts in sequence make some thirty calls each, forward and
backward. Parameters keep the names and the places that it gives them.

Shape letters: P places (tokens, as often as experts of this rank were chosen for them), H hidden size, F columns of an
expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Experts of `SequentialMLP` with one matrix product each, and one activation of all.

    y = W_2 (act(W_gate x) * (W_up x + offset) * p) for every place x with gate weight p, as in Megatron's `MLP`. The
    forward of `SequentialMLP` runs where an expert's call has more to do: biases, an activation that is not gated,
    weights applied to inputs, or hooks, such as those that merge adapters.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # A plain list of pairs: as modules they are registered already.
        self._pairs = [(expert.linear_fc1, expert.linear_fc2) for expert in self.local_experts]

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Places `[P, H]` by expert, tokens of each expert, gate weights `[P]` -> outputs `[P, H]`, and no bias."""
        if not self._is_plain():
            output: tuple[Tensor, Tensor | None] = super().forward(
                permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
            return output
        counts = tokens_per_expert.tolist()
        first, second = ([linear.weight for linear in linears] for linears in zip(*self._pairs, strict=True))
        inner_PF = self._activated(_products(permuted_local_hidden_states, counts, first), permuted_probs)
        return _products(inner_PF, counts, second), None

    def _activated(self, channels_P2F: Tensor, probs_P: Tensor) -> Tensor:
        """The same operations as in Megatron's `MLP`, in the same order, so that they round alike."""
        gate_PF, up_PF = channels_P2F.chunk(2, dim=-1)
        if (limit := self.config.activation_func_clamp_value) is not None:
            gate_PF, up_PF = gate_PF.clamp(max=limit), up_PF.clamp(min=-limit, max=limit)
        inner_PF: Tensor = self.config.activation_func(gate_PF) * (up_PF + self.config.glu_linear_offset)
        return (inner_PF * probs_P.unsqueeze(-1)).to(inner_PF.dtype)

    def _is_plain(self) -> bool:
        config = self.config
        return (
            config.gated_linear_unit
            and not config.add_bias_linear
            and not config.moe_apply_probs_on_input
            and not any(linear._forward_pre_hooks or linear._forward_hooks for pair in self._pairs for linear in pair)
        )


def _products(inputs_PI: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Each place times the matrix `[O, I]` of its expert, `[P, O]`. An expert without places gets zeros as gradient."""
    return torch.cat(
        [F.linear(rows, weight) for rows, weight in zip(inputs_PI.split_with_sizes([*counts]), weights, strict=True)]
    )
