"""DeepSpeed's optimizer step, guarded: parameter groups, a schedule, and no step on gradients that are not finite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_trm.config.learning_rate import LearningRate
from moe_trm.config.schema import LearnerConfig, OptimizerConfig
from moe_trm.learner.alignment import GradientAlignment
from moe_trm.learner.deepspeed.weights import checkpoint_form
from moe_trm.learner.loss_scale import LossScale
from moe_trm.learner.parameter_groups import GroupSettings, is_frozen, settings_of
from moe_trm.learner.protocol import UpdateResult
from moe_trm.learner.steps import Steps


def freeze(causal: Any, learner: LearnerConfig) -> None:
    """Exclude what is not to be trained from gradients and optimizer. Call it before DeepSpeed takes the model."""
    for name, parameter in causal.named_parameters():
        if all(is_frozen(hf_name, learner) for hf_name in checkpoint_form(causal, name, parameter)):
            parameter.requires_grad_(False)


def adamw(
    causal: Any, settings: OptimizerConfig, factors: Mapping[str, tuple[str, ...]] | None = None
) -> torch.optim.AdamW:
    """AdamW over the trained parameters of a transformers model, with one group for each combination of settings.

    `factors`: Hugging Face names of adapters' factors by their names in the model.
    """
    members: dict[GroupSettings, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in causal.named_parameters():
        if parameter.requires_grad:
            names = (factors or {}).get(name) or tuple(checkpoint_form(causal, name, parameter))
            members[settings_of(names, is_matrix=parameter.dim() > 1, optimizer=settings)].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": group.weight_decay, "lr_multiplier": group.lr_multiplier}
        for group, parameters in sorted(members.items(), key=lambda item: item[0])
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


class DeepSpeedGuardedOptimizer(Steps):
    """AdamW with a schedule. It refuses non-finite gradients; a refused step does not advance the schedule.

    Begin each step with `begin`, and end it with `step` or `skip`.

    Args:
        engine: DeepSpeed's engine, which clips by the global norm and refuses non-finite gradients on all ranks alike.
        rate: the learning rate of each step.
        loss_scale: of a float16 model; DeepSpeed multiplies and divides by it.
        alignment: of consecutive gradients, at ZeRO 1 and 2.
    """

    def __init__(
        self, engine: Any, rate: LearningRate, loss_scale: LossScale | None, alignment: GradientAlignment | None = None
    ) -> None:
        super().__init__(rate, loss_scale, alignment)
        self._engine, self._has_gradients = engine, False

    def begin(self) -> None:
        """Forget the gradients of a step that was not made."""
        if self._has_gradients:
            self._forget()
        self._has_gradients = True
        if self.loss_scale is not None:
            self._engine.optimizer.loss_scale = float(self.loss_scale.value)

    def step(self, lr_scale: float = 1.0) -> UpdateResult:
        """Apply the accumulated gradients, unless their norm is not finite, and forget them."""
        lr = lr_scale * self.lr
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]
        cosine = None
        if self._alignment is not None:
            cosine = self._alignment.apply(self._gradients(), _inner)
            self._measure_again()
        self._engine.step()
        self._has_gradients = False
        norm, applied = float(self._engine.get_global_grad_norm()), bool(self._engine.was_step_applied())
        return self.finish(norm, lr, applied=applied, cosine=cosine)

    def skip(self, lr_scale: float = 1.0) -> UpdateResult:
        """The result of a step whose gradients are zero, which is not made."""
        return self.finish(0.0, lr_scale * self.lr, applied=False)

    def _forget(self) -> None:
        """As DeepSpeed does where it refuses a step itself."""
        zero = self._engine.optimizer
        zero.zero_grad(set_to_none=True)
        if getattr(zero, "cpu_offload", False):
            zero.reset_cpu_buffers()
        for collected in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            collected.update(dict.fromkeys(collected))
        if hasattr(zero, "all_grad_tensors"):  # of stages 1 and 2, which count from another number than stage 3
            zero.micro_step_id = -1

    def _updated(self) -> list[Tensor]:
        flat: list[Tensor] = self._engine.optimizer.single_partition_of_fp32_groups
        return flat

    def _gradients(self) -> list[Tensor]:
        """This rank's share of the gradient, reduced, which the optimizer is about to use."""
        zero = self._engine.optimizer
        if zero.cpu_offload:
            from deepspeed.accelerator import get_accelerator

            # Gradients travel to the host beside the computation.
            get_accelerator().synchronize()
            return [partition.grad for partition in zero.single_partition_of_fp32_groups]
        return [gradient for index in range(len(zero.bit16_groups)) for gradient in zero.averaged_gradients[index]]

    def _measure_again(self) -> None:
        """Norms by which an offloaded step is clipped: DeepSpeed took them when the gradients arrived."""
        zero = self._engine.optimizer
        for number in zero.norm_for_param_grads if zero.cpu_offload else ():
            group, _, start, length = zero.grad_position[number]
            gradient = zero.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, start, length)
            zero.norm_for_param_grads[number] = gradient.norm()


def _inner(vectors: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Inner product over the ranks, each of which has another share."""
    sums = [
        torch.dot(vector.flatten(), other_vector.flatten()).double()
        for vector, other_vector in zip(vectors, right, strict=True)
    ]
    product = torch.stack(sums).sum()
    dist.all_reduce(product)
    return float(product)
