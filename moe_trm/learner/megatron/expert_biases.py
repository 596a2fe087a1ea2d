"""Experts with biases in Megatron's local layers, which have two faults there.

The last bias is added in place to what autograd holds for a view, and that is refused. And its gradient is summed over
tensor-parallel ranks under sequence parallelism, as if they held the same expert.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from moe_trm.learner.megatron.specs import submodules_of


class ExpertOutput(RowParallelLinear):  # type: ignore[misc]
    """Last matrix and bias of an expert that is whole on its rank, without the sum over one rank.

    That sum would make the output a view.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.explicit_expert_comm = True
        self.bias.sequence_parallel = False


def use_expert_biases(block: TransformerBlockSubmodules) -> None:
    """Put it into every MoE layer of a block specification of local layers."""
    for layer in block.layer_specs:
        experts = submodules_of(layer.submodules.mlp).experts
        submodules_of(experts).linear_fc2 = ExpertOutput
