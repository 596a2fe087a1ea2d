"""The sections of verl's configuration that most settings stand in."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OPTIM, MEGATRON = f"{ACTOR}.optim", f"{ACTOR}.megatron"
