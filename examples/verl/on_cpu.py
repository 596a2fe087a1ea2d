"""Our correction and our policy loss on verl's own batch, of its own source, on a CPU.

    python examples/verl/on_cpu.py FOLDER      # FOLDER holds verl's source

A `DataProto` of three answers passes verl's rollout correction, with ours standing in its place, and then the policy
loss that losses.py registers. One answer has a token that is far off. Printed is what was kept, and the gradient.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from moe_trm.adapters.verl import rollout_correction, standing_in

RULES: Any = [
    ("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"}),
    ("trm_max", {"max_kl": 0.05, "ratio": "merged"}),
]
"""IcePop weighs by the ratio of trainer to rollout, within a band. TRM drops answers whose worst token is far off."""


def tensors() -> dict[str, torch.Tensor]:
    """Three answers of up to four tokens, `[B, R]`."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 4, generator=generator)
    rollout = old + 0.02 * torch.randn(3, 4, generator=generator)
    rollout[0, 1] -= 1.5
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    return {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask}


def corrected_step(folder: str) -> dict[str, Any]:
    """One batch through correction and loss, as verl's trainer takes it."""
    sys.path[:0] = [*folder.split(":"), str(Path(__file__).parent)]
    helper = import_module("verl.trainer.ppo.rollout_corr_helper")
    core = import_module("verl.trainer.ppo.core_algos")
    config = import_module("verl.workers.config").FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28
    )
    import_module("losses")  # registers moe_trm
    batch = import_module("verl.protocol").DataProto.from_single_dict(tensors())
    with standing_in(rollout_correction(RULES)):
        batch, metrics = helper.compute_rollout_correction_and_add_to_batch(batch, None)
    mask = batch.batch["response_mask"]
    config.global_batch_info.update({"dp_size": 1, "batch_num_tokens": int(mask.sum())})
    log_prob = (batch.batch["old_log_probs"] + 0.01).requires_grad_()
    loss, _ = core.get_policy_loss_fn("moe_trm")(
        old_log_prob=batch.batch["old_log_probs"],
        log_prob=log_prob,
        advantages=torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4),
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=batch.batch["rollout_is_weights"],
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return {
        "loss": float(loss.detach()),
        "kept_fraction": metrics["rollout_corr/correction/kept_fraction"],
        "weights": [[round(value, 3) for value in row] for row in batch.batch["rollout_is_weights"].tolist()],
        "tokens_with_gradient": (gradient != 0).sum(1).tolist(),
        "response_mask_sum": int(mask.sum()),
    }


if __name__ == "__main__":
    print(json.dumps(corrected_step(sys.argv[1])))
