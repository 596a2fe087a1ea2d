"""Megatron's data-parallel wrapper and optimizer, set up so that gradients are plain sums, and one guarded step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_trm.config.schema import OptimizerConfig
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.learner.protocol import UpdateResult


def wrap_model(
    chunks: Sequence[PolicyModel], config: TransformerConfig, *, distributed_optimizer: bool
) -> list[DistributedDataParallel]:
    """`chunks` with Megatron's gradient buffers, accumulated and reduced in float32.

    Gradients of dense and of expert parameters are *summed* over the ranks that share them: `calculate_per_token_loss` switches Megatron's
    averaging off, and the token count it would divide by afterwards is withheld.
    """
    config.finalize_model_grads_func = _finalize_sums
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    return [
        DistributedDataParallel(config, ddp_config, Float16Module(config, chunk) if config.bf16 else chunk)
        for chunk in chunks
    ]


def _finalize_sums(model: list[Any], _num_tokens: Any = None, **options: Any) -> None:
    finalize_model_grads(model, None, **options)


class GuardedOptimizer:
    """AdamW with linear warm-up that refuses to apply non-finite gradients.

    Weight decay acts on matrices only (Megatron's default: biases and norm weights are exempt). Step `t` (from 0) uses
    `lr * min(1, (t + 1) / warmup_steps)`; a refused step does not advance `t`.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], settings: OptimizerConfig, *, bf16: bool, distributed: bool
    ) -> None:
        self._chunks = chunks
        self._settings = settings
        self.steps = 0
        """Steps that were applied."""
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=0.0,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                clip_grad=settings.max_grad_norm,
                bf16=bf16,
                use_distributed_optimizer=distributed,
            ),
            list(chunks),
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        warmup = self._settings.warmup_steps
        return self._settings.lr * min(1.0, (self.steps + 1) / warmup) if warmup else self._settings.lr

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> UpdateResult:
        """Clip by the global norm and apply, unless the norm is not finite. Gradients must be reduced already."""
        self.megatron.prepare_grads()
        norm, lr = float(self.megatron.get_grad_norm()), self.lr
        if not math.isfinite(norm):
            return UpdateResult(grad_norm=norm, lr=lr, applied=False)
        for group in self.megatron.param_groups:
            group["lr"] = lr
        applied, _, _ = self.megatron.step()
        self.steps += int(applied)
        return UpdateResult(grad_norm=norm, lr=lr, applied=bool(applied))
