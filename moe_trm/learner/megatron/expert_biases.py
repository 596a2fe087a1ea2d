"""Experts with biases in Megatron's local layers, which add the last bias in place to what autograd holds for a view, and then refuse."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class ExpertOutput(RowParallelLinear):  # type: ignore[misc]
    """The last matrix of an expert that is whole on its rank: its output is not passed through a sum over one rank, which makes it a view."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.explicit_expert_comm = True


def use_expert_biases(block: TransformerBlockSubmodules) -> None:
    """Put it into every MoE layer of a block specification of local layers."""
    for layer in block.layer_specs:
        layer.submodules.mlp.submodules.experts.submodules.linear_fc2 = ExpertOutput
