"""Our loss and rules in verl: set `actor_rollout_ref.model.external_lib=losses` and `policy_loss.loss_mode=moe_trm`."""

from __future__ import annotations

from moe_trm.adapters.verl import register_policy_loss

register_policy_loss(
    "moe_trm", [("trm_max", {"max_kl": 0.05, "ratio": "update"}), ("opsm", {"delta": 0.01, "ratio": "update"})]
)
