"""Megatron's data-parallel wrapper and optimizer with plain gradient sums; parameter groups, and one guarded step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe_trm.config.learning_rate import LearningRate
from moe_trm.config.schema import LearnerConfig, OptimizerConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.alignment import alignment_of
from moe_trm.learner.loss_scale import LossScale
from moe_trm.learner.megatron.lora import Factor
from moe_trm.learner.megatron.model import global_parameters
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.learner.parameter_groups import GroupSettings, is_frozen, settings_of
from moe_trm.learner.protocol import UpdateResult
from moe_trm.learner.replicas import agreed_norm
from moe_trm.learner.steps import Steps


def wrap_model(
    chunks: Sequence[PolicyModel],
    config: TransformerConfig,
    loss_scale: LossScale | None,
    *,
    distributed_optimizer: bool,
) -> list[DistributedDataParallel]:
    """`chunks` with Megatron's gradient buffers, accumulated and reduced in float32.

    Gradients of dense and of expert parameters are *summed* over the ranks that share them. `calculate_per_token_loss`
    switches Megatron's averaging off, and the token count for the later division is not given. Backward begins at the
    loss times `loss_scale`.
    """
    config.finalize_model_grads_func = _finalize_sums
    if loss_scale is not None:
        config.grad_scale_func = lambda loss: loss * loss_scale.value
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    return [DistributedDataParallel(config, ddp_config, _narrowed(config, chunk)) for chunk in chunks]


def _narrowed(config: TransformerConfig, chunk: PolicyModel) -> PolicyModel | Float16Module:
    """`chunk` in its dtype. Float16Module casts buffers too; biases that choose experts keep their float32 values."""
    if not (config.bf16 or config.fp16):
        return chunk
    routers = [module for module in chunk.modules() if isinstance(getattr(module, "expert_bias", None), Tensor)]
    precise = [router.expert_bias.clone() for router in routers]
    narrowed = Float16Module(config, chunk)
    for router, bias in zip(routers, precise, strict=True):
        router.expert_bias.data = bias
    return narrowed


def _finalize_sums(model: list[Any], _num_tokens: Any = None, **options: Any) -> None:
    finalize_model_grads(model, None, **options)


def freeze(chunks: Sequence[PolicyModel], learner: LearnerConfig) -> None:
    """Exclude what is not to be trained from gradients and optimizer. Call it before `wrap_model`."""
    for name, parameter in global_parameters(chunks):
        if all(is_frozen(hf_name, learner) for hf_name in chunks[0].names.link(name).hf_names):
            parameter.requires_grad_(False)


class MegatronGuardedOptimizer(Steps):
    """AdamW with a schedule. It refuses non-finite gradients; a refused step does not advance the schedule.

    Args:
        loss_scale: of a float16 model; its gradients are divided by it. Megatron's own scales would differ between
            dense and expert parameters.
        bf16: whether the model is bfloat16. As of float16, the optimizer then keeps float32 master weights.
        distributed: shard the optimizer's state.
        offloaded: keep it on the host, and step there.
        factors: of adapters.

    Raises `ConfigError` for an option that Megatron does not have, and for impossible parameter groups.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        wrapped: Sequence[DistributedDataParallel],
        settings: OptimizerConfig,
        rate: LearningRate,
        loss_scale: LossScale | None,
        *,
        bf16: bool,
        distributed: bool,
        offloaded: bool = False,
        factors: Sequence[Factor] = (),
    ) -> None:
        super().__init__(rate, loss_scale, alignment_of(settings.alignment_limit))
        self._wrapped, self._max_norm = wrapped, settings.max_grad_norm
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            _options(settings, fp16=loss_scale is not None, bf16=bf16, distributed=distributed, offloaded=offloaded),
            list(wrapped),
            _groups(chunks, factors, settings),
        )
        for part in self._parts:
            _fuse(getattr(part, "optimizer", None))

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, lr_scale: float = 1.0) -> UpdateResult:
        """Clip by the global norm and apply, unless it is 0 or not finite. Gradients must be reduced already."""
        if self.loss_scale is not None:
            for chunk in self._wrapped:
                chunk.scale_gradients(1 / self.loss_scale.value)
        self.megatron.prepare_grads()
        # Megatron's step finds these gradients as they are left here.
        cosine = None if self._alignment is None else self._alignment.apply(self._gradients(), self._inner)
        norm, lr = agreed_norm(self._norm(), self._device), lr_scale * self.lr
        applied = False
        if math.isfinite(norm) and norm:
            for group in self.megatron.param_groups:
                group["lr"] = lr * group["lr_mult"]
            self._clip(norm)
            applied = bool(self.megatron.step_with_ready_grads())
        return self.finish(norm, lr, applied=applied, cosine=cosine)

    def _norm(self) -> float:
        """Norm of the whole model's gradient, each parameter once. On a CPU, Megatron calls once for each tensor."""
        if self._device.type != "cpu":
            return float(self.megatron.get_grad_norm())
        total = 0.0
        for part in self._parts:
            gradients = _counted_gradients(part)
            norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1)
            square = norms.double().square().sum()
            if (group := part.get_grad_stats_parallel_group()).size() > 1:
                dist.all_reduce(square, group=group)
            total += float(square)
        return math.sqrt(total)

    def _clip(self, norm: float) -> None:
        """Megatron's clipping. Its own `step` would prepare the gradients and take their norm once more."""
        share = self._max_norm / (norm + 1e-6)
        if self._max_norm > 0 and share < 1 and (gradients := self._gradients()):
            torch._foreach_mul_(gradients, share)

    def _updated(self) -> list[Tensor]:
        return [tensor for part in self._parts for tensor in part.get_parameters()]

    def _gradients(self) -> list[Tensor]:
        """This rank's gradients, which the optimizer is about to use."""
        return [gradient for part in self._parts for gradient in _main_gradients(part)]

    def _inner(self, vectors: Sequence[Tensor], right: Sequence[Tensor]) -> float:
        """Inner product over the whole model, each parameter once. Both are in the order of `_gradients`."""
        total, start = 0.0, 0
        for part in self._parts:
            gradients = _main_gradients(part)
            once = _counted_gradients(part)
            counted = {gradient.data_ptr() for gradient in once if gradient.numel()}
            sums = [
                torch.dot(vectors[start + place].flatten(), right[start + place].flatten()).double()
                for place, gradient in enumerate(gradients)
                if gradient.numel() and gradient.data_ptr() in counted
            ]
            product = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=self._device)
            dist.all_reduce(product, group=part.get_grad_stats_parallel_group())
            total, start = total + float(product), start + len(gradients)
        return total

    @property
    def _parts(self) -> Sequence[MegatronOptimizer]:
        """Megatron's optimizers: one for dense and one for expert parameters, where they are sharded differently."""
        parts: Sequence[MegatronOptimizer] = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return parts

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(values for chunk in self._wrapped for values in chunk.parameters()).device
        return device


def _fuse(optimizer: torch.optim.Optimizer | None) -> None:
    """Let torch's Adam make one call for each tensor on a CPU, where it makes nine otherwise."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        if all(parameter.device.type == "cpu" for parameter in group["params"]):
            group["fused"] = True


def _counted_gradients(part: MegatronOptimizer) -> list[Tensor]:
    """Those of this rank that count in the norm of the whole model: of a tensor that several ranks hold, one does."""
    # Its name up to Megatron-Core 0.18 is the second.
    gradients = getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm
    counted: list[Tensor] = gradients()
    return counted


def _main_gradients(part: MegatronOptimizer) -> list[Tensor]:
    gradients = [
        getattr(parameter, "decoupled_grad", None) if parameter.grad is None else parameter.grad
        for parameter in part.get_parameters()
    ]
    return [gradient for gradient in gradients if gradient is not None]


def _options(
    settings: OptimizerConfig, *, fp16: bool, bf16: bool, distributed: bool, offloaded: bool
) -> MegatronOptimizerConfig:
    options: dict[str, Any] = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.betas[0],
        "adam_beta2": settings.betas[1],
        "adam_eps": settings.eps,
        "clip_grad": settings.max_grad_norm,
        "bf16": bf16,
        "fp16": fp16,
        # Gradients come without the loss scale here.
        "loss_scale": 1.0 if fp16 else None,
        "use_distributed_optimizer": distributed,
        # Without precision awareness a float32 copy of the weights would stay on the device.
        "use_precision_aware_optimizer": offloaded,
        "optimizer_cpu_offload": offloaded,
        "optimizer_offload_fraction": 1.0 if offloaded else 0.0,
        "overlap_cpu_optimizer_d2h_h2d": offloaded,
    }
    option_names = {field.name for field in fields(MegatronOptimizerConfig)}
    for name in settings.extra:
        if name not in option_names or name in options:
            raise ConfigError(
                "this option is set by a field of its own"
                if name in options
                else "Megatron's optimizer has no such option",
                where="optimizer.extra",
                got=name,
                expected=", ".join(sorted(option_names - options.keys())),
            )
    return MegatronOptimizerConfig(**options, **settings.extra)


def _groups(chunks: Sequence[PolicyModel], factors: Sequence[Factor], settings: OptimizerConfig) -> dict[ParamKey, Any]:
    """One of Megatron's parameter groups for each combination of settings that occurs."""
    settings_by_parameter = {
        parameter: settings_of(chunks[0].names.link(name).hf_names, is_matrix=parameter.dim() > 1, optimizer=settings)
        for name, parameter in global_parameters(chunks)
    }
    settings_by_parameter |= {
        factor.parameter: settings_of((factor.name,), is_matrix=True, optimizer=settings) for factor in factors
    }

    def key(group: GroupSettings) -> ParamKey:
        return ParamKey(
            predicate=ParamPredicate(str(group), lambda parameter: settings_by_parameter[parameter] == group)
        )

    return {
        key(group): {"lr_mult": group.lr_multiplier, "weight_decay": group.weight_decay}
        for group in sorted(set(settings_by_parameter.values()))
    }
