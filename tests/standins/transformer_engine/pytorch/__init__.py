"""Layers of one rank's part of the weights. Sequence-parallel products gather and scatter as Megatron-Core's own do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import distributed, fp8, ops, optimizers, router
from .attention import DotProductAttention

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "ops",
    "optimizers",
    "router",
]


class _Product(nn.Module):
    def __init__(self, tp_group: Any, parallel_mode: str | None, sequence_parallel: bool, return_bias: bool) -> None:
        super().__init__()
        assert not return_bias
        assert parallel_mode in (None, "column", "row")
        self.tp_group, self.parallel_mode, self.sequence_parallel = tp_group, parallel_mode, sequence_parallel

    def _sizes(self, inputs: int, outputs: int, tp_size: int) -> tuple[int, int]:
        shares = tp_size if self.parallel_mode else 1
        return (inputs, outputs // shares) if self.parallel_mode == "column" else (inputs // shares, outputs)

    def _times(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode == "column":
            enter = (
                mappings.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
            values = enter(values, group=self.tp_group)
        product = F.linear(values, weight, bias)
        if self.parallel_mode == "row":
            leave = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
            product = leave(product, group=self.tp_group)
        return product


def _parameter(shape: Sequence[int], dtype: Any, device: Any, value: float | None = None) -> nn.Parameter:
    made = torch.empty(*shape, dtype=dtype, device=device)
    return nn.Parameter(made if value is None else made.fill_(value))


class Linear(_Product):
    """A product with one weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(tp_group, parallel_mode, sequence_parallel, return_bias)
        inputs, outputs = self._sizes(in_features, out_features, tp_size)
        self.weight = _parameter((outputs, inputs), params_dtype, device)
        self.bias = _parameter((outputs,), params_dtype, device, 0.0) if bias else None
        self.save_original_input = save_original_input

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        return self._times(inp, self.weight, self.bias)


class LayerNormLinear(_Product):
    """A norm and a product, whose parameters are in one module."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(tp_group, parallel_mode, sequence_parallel, return_bias)
        assert normalization == "RMSNorm"
        assert not return_layernorm_output
        assert not zero_centered_gamma
        inputs, outputs = self._sizes(in_features, out_features, tp_size)
        self.layer_norm_weight = _parameter((in_features,), params_dtype, device, 1.0)
        self.layer_norm_weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.weight = _parameter((outputs, inputs), params_dtype, device)
        self.bias = _parameter((outputs,), params_dtype, device, 0.0) if bias else None
        self.eps = eps

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        return self._times(F.rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps), self.weight, self.bias)


class GroupedLinear(nn.Module):
    """Products with one weight for each expert, on the rows that `m_splits` counts."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__()
        assert not bias
        assert not return_bias
        assert tp_size == 1
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", _parameter((out_features, in_features), params_dtype, device))

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int],
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor:
        parts = inp.split(list(m_splits))
        return torch.cat([F.linear(part, getattr(self, f"weight{number}")) for number, part in enumerate(parts)])


class RMSNorm(nn.Module):
    """A norm alone."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        assert size is not None
        self.weight = _parameter((size,), params_dtype, device, 1.0)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, inp: Tensor) -> Tensor:
        return F.rms_norm(inp, inp.shape[-1:], self.weight, self.eps)


class LayerNorm(RMSNorm):
    """No model of ours has one."""
