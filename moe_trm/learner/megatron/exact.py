"""The learner's side of `exact`: sums whose order does not depend on what else is in a batch.

On CUDA these are Megatron's own batch-invariant kernels. On a CPU they are those that the rollout server has, too.
Shape letters: C columns of rows, B rows, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moe_trm.config.engines import FIXED_ORDER
from moe_trm.errors import ConfigError
from moe_trm.learner.megatron.cpu_attention import CausalAttention, PlainPack

_installed: list[Any] = []


def install(device: torch.device) -> None:
    """Let this process compute so. On CUDA not run yet: there was no device."""
    if device.type == "cuda":
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import enable_batch_invariant_mode

        enable_batch_invariant_mode()
    elif not _installed:
        _installed.append(_fixed_order().install())


def remove() -> None:
    """Undo it, on a CPU."""
    while _installed:
        _installed.pop()._destroy()


def _fixed_order() -> Any:
    try:
        return import_module(FIXED_ORDER)
    except ImportError as error:
        raise ConfigError(
            "exact runs on a CPU need the kernels of the rollout server's package",
            where="config key exact",
            got=str(error),
            expected=FIXED_ORDER,
            fix="pip install --no-deps ./packages/sglang_cpu",
        ) from error


class FixedAttention(CausalAttention):
    """Causal attention of whole rows or packs, the same in the rollout server."""

    def rows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` `[C, B, N, D]`, `key` and `value` `[C, B, G, D]` -> `[C, B, N * D]`."""
        rows = (tensor.transpose(0, 1) for tensor in (query, key, value))
        places = torch.arange(len(query))
        hidden_BCC = (places > places[:, None]).expand(query.shape[1], -1, -1)
        return _fixed_order().attend(*rows, hidden_BCC, self.scale).transpose(0, 1).flatten(2)  # type: ignore[no-any-return]

    def packed(self, query: Tensor, key: Tensor, value: Tensor, parameters: Any) -> Tensor:
        """`query` `[C, N, D]`, `key` and `value` `[C, G, D]` of a pack -> `[C, N * D]`. Each sequence by itself."""
        assert isinstance(parameters, PlainPack)
        parts = (tensor.unsqueeze(1).split_with_sizes(list(parameters.lengths)) for tensor in (query, key, value))
        return torch.cat([self.rows(*part) for part in zip(*parts, strict=True)]).squeeze(1)
