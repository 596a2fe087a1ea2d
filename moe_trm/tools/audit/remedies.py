"""Remedies for each cause, in the words of each framework."""

from __future__ import annotations

from functools import partial

SETTINGS: dict[str, dict[str, str]] = {
    "slime": {
        "routing": "--use-rollout-routing-replay (docs/en/get_started/customization.md)",
        "temperature": "--rollout-temperature: one value for sampling and training",
        "another support": "train with the --rollout-top-p that sampled; its kept ids are in the dump then",
        "weights": "--check-weight-update-equal compares the weights after a push (docs/en/developer_guide/debug.md)",
    },
    "miles": {
        "routing": "--use-rollout-routing-replay (docs/developer/debug.md)",
        "temperature": "--rollout-temperature: one value for sampling and training",
        "weights": "--check-weight-update-equal compares weights after a push (docs/advanced/p2p-weight-transfer.md)",
    },
    "verl": {
        "routing": "actor_rollout_ref.rollout.enable_rollout_routing_replay=True and "
        "actor_rollout_ref.actor.router_replay.mode=R3 (verl/trainer/config/actor/actor.yaml)",
        "temperature": "actor_rollout_ref.rollout.temperature: one value for sampling and training",
    },
    "moe-trm": {
        "routing": "replay.mode=R3",
        "temperature": "rollout.temperature: the value that the rollout samples with",
        "another support": "sampling_mask.mode=keep",
        "weights": "sync.verify=true",
    },
}
"""Framework -> cause -> setting, with the page of its own documentation."""
ROUTES = "do not replay these routes: look for the fault where the dump's routes are joined to its tokens"
ANYWHERE = {
    "shifted": f"{ROUTES}; row t of the routes belongs to token t, which predicts token t+1",
    "padded": f"{ROUTES}; rows of cached prefixes, of earlier turns or of the last token may never have been filled",
    "layer": f"{ROUTES}; columns are decoder layers or MoE layers in order, pipeline stages joined in order",
    "request": f"{ROUTES}; sorting, packing or filtering has moved one of the two",
    "older weights": f"{ROUTES}; answers that go on over a weight update keep routes of the weights before",
    "unrelated": ROUTES,
    "shifted log-probs": "look for an index error: log-probs at row t are those of token t+1",
    "log-probs of another row": "look where log-probs are joined to their samples: sorting, packing or filtering has "
    "moved one of the two",
    "temperature": "score with the temperature that sampled, on both sides",
    "another support": "renormalise both sides over the kept ids, or neither",
    "mask": "do not train with these masks: look for the fault where they are joined to their tokens",
    "routing": "replay the rollout's routes",
    "weights": "compare the weights that the engine holds with the checkpoint, tensor by tensor",
    "expert": "compare this expert's tensors on both sides",
    "positions": "compare rope settings of config.json on both sides, and score once without the prefix cache",
}
"""Where the framework has no setting for it."""
ALIAS = {"another version of the weights": "weights"}


def remedy(framework: str, cause: str) -> str:
    """The setting to change; the general words where the framework has no setting, or several wrote the dump."""
    cause = ALIAS.get(cause, cause)
    return SETTINGS.get(framework, {}).get(cause) or ANYWHERE.get(cause, "")


def remedies_of(framework: str) -> partial[str]:
    """`remedy` of this framework."""
    return partial(remedy, framework)
