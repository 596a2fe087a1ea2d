"""verl's own policy loss, registry and data protocol with our hooks: run in a process by itself.

`python -m tests.integration.verl_host FOLDER[:FOLDER]` prints gaps to what verl computes, as JSON. The folders hold
verl's package and those of its requirements that are not installed.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trm.adapters.verl import register_policy_loss, rollout_correction, standing_in
from moe_trm.corrections import presets

B, R = 6, 9
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def tensors(seed: int) -> dict[str, Tensor]:
    """Log-probs in float64 of rows near the thresholds and far from them, with padding and tool tokens."""
    gen = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1e-4, 1e-3, 0.02, 0.1, 0.3, 1.0], dtype=torch.float64)[:, None]
    rollout = -torch.rand(B, R, generator=gen, dtype=torch.float64)
    old = rollout + scale * torch.randn(B, R, generator=gen, dtype=torch.float64)
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": old,
        "response_mask": (torch.rand(B, R, generator=gen) < 0.7).long() | (torch.arange(R) == 0).long(),
        "log_prob": old + 0.2 * torch.randn(B, R, generator=gen, dtype=torch.float64),
        "advantages": torch.randn(B, 1, generator=gen, dtype=torch.float64).expand(B, R).contiguous(),
    }


def loss_and_gradient(function: Any, data: dict[str, Tensor], config: Any, mask: Tensor, **weights: Any) -> Tensor:
    log_prob = data["log_prob"].clone().requires_grad_()
    loss, _ = function(
        old_log_prob=data["old_log_probs"],
        log_prob=log_prob,
        advantages=data["advantages"],
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=config,
        **weights,
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return torch.cat([loss.detach()[None], gradient.flatten()])


def main(folders: str) -> None:
    sys.path[:0] = [*folders.split(":"), str(Path(__file__).parents[2] / "examples" / "verl")]
    core, helper = (import_module(f"verl.trainer.ppo.{name}") for name in ("core_algos", "rollout_corr_helper"))
    protocol, settings = import_module("verl.protocol"), import_module("verl.trainer.config.algorithm")
    config = import_module("verl.workers.config").FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28
    )
    import_module("losses")  # the example registers its loss
    ours = register_policy_loss("moe_trm_plain", parameters=CLIP)
    assert core.get_policy_loss_fn("moe_trm_plain") is ours
    found: dict[str, Any] = {
        "loss": 0.0,
        "correction": {},
        "effect": {},
        "registered": "moe_trm" in core.POLICY_LOSS_REGISTRY,
    }
    for seed in range(20):
        data = tensors(seed)
        config.global_batch_info.update({"dp_size": 1, "batch_num_tokens": int(data["response_mask"].sum())})
        mask = data["response_mask"].bool()
        mine, theirs = (
            loss_and_gradient(core.get_policy_loss_fn(name), data, config, mask)
            for name in ("moe_trm_plain", "vanilla")
        )
        found["loss"] = max(gap(mine, theirs), found["loss"])
        for name, preset in presets.items():
            if preset.bypass or name == "disabled":
                continue
            apart, effect = corrected_gap(name, data, config, core, helper, protocol, settings)
            found["correction"][name] = max(apart, found["correction"].get(name, 0.0))
            found["effect"][name] = max(effect, found["effect"].get(name, 0.0))
    print(json.dumps(found))


def gap(left: Tensor, right: Tensor) -> float:
    """The largest difference. What is not finite is no number to compare."""
    assert bool(left.isfinite().all() & right.isfinite().all())
    return float((left - right).abs().max())


def corrected_gap(
    name: str, data: dict[str, Tensor], config: Any, core: Any, helper: Any, protocol: Any, settings: Any
) -> tuple[float, float]:
    """Largest difference of loss and gradient, after verl's correction and after ours in its place; and what the
    correction changes.

    Both divide by the number of tokens of the whole batch, which verl takes before it rejects.
    """
    results = []
    for place in (None, rollout_correction(name)):
        fields = ("rollout_log_probs", "old_log_probs", "response_mask")
        batch = protocol.DataProto.from_single_dict({field: data[field].clone() for field in fields})
        if place is None:
            batch, _ = helper.compute_rollout_correction_and_add_to_batch(
                batch, getattr(settings.RolloutCorrectionConfig, name)()
            )
        else:
            with standing_in(place):
                batch, _ = helper.compute_rollout_correction_and_add_to_batch(batch, None)
        weighed = "rollout_is_weights" in batch.batch.keys()  # noqa: SIM118
        weights = batch.batch["rollout_is_weights"] if weighed else None
        mask = batch.batch["response_mask"].bool()
        results.append(
            loss_and_gradient(core.get_policy_loss_fn("vanilla"), data, config, mask, rollout_is_weights=weights)
        )
    assert helper.compute_rollout_correction_and_add_to_batch.__module__ == helper.__name__
    plain = loss_and_gradient(core.get_policy_loss_fn("vanilla"), data, config, data["response_mask"].bool())
    return gap(*results), gap(plain, results[1])


if __name__ == "__main__":
    main(sys.argv[1])
