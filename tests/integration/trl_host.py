"""TRL's own GRPO on a tiny mixture of experts, with the classes of examples/trl: run in a process by itself.

`python -m tests.integration.trl_host FOLDER` prints what was trained, as JSON. FOLDER holds trl 1.16 and those of its
requirements that are not installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from moe_trm.corrections.plain import Rules
from routing import RouteError

NARROW: Rules = [("icepop", {"low": 0.99, "high": 1.01, "ratio": "merged"})]
NOTHING: Rules = [("seq_mean_k3", {"upper": 1e-12, "ratio": "merged"})]


def trained(example: Any, **options: Any) -> list[dict[str, float]]:
    """The log of each step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = example.build(folder, **options)
        trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def by_hand(example: Any) -> dict[str, float]:
    """A batch with an engine that is far off in one token and half off in another, and one token without a log-prob."""
    with tempfile.TemporaryDirectory() as folder:
        rules: Rules = [("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"})]
        trainer = example.build(folder, ours={"rules": rules}, loss_type="bnpo", router_aux_loss_coef=0.0)
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 32, (3, 5), generator=gen)
    inputs = {
        "prompt_ids": torch.randint(4, 32, (3, 3), generator=gen),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]]),
        "completion_ids": ids,
        "completion_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]),
        "advantages": torch.tensor([1.0, -0.5, 2.0]),
        "num_items_in_batch": torch.tensor(9),
    }
    whole = torch.cat([inputs["prompt_ids"], ids], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logprobs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, whole, mask, 5)
    sampled = logprobs.detach().clone()
    sampled[0, 1] -= 1.5
    sampled[0, 2] += 0.4
    sampled[2, 0] = float("nan")
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, {**inputs, "sampling_per_token_logps": sampled})
    weights = inputs["completion_mask"].float()
    weights[0, 1], weights[2] = 0.0, 0.0
    weights[0, 2] *= torch.tensor(-0.4).exp()
    expected = -(weights * inputs["advantages"][:, None] * (logprobs - logprobs.detach()).exp()).sum() / 9
    gradients = [torch.autograd.grad(one, trainer.model.lm_head.weight)[0] for one in (loss, expected)]
    return {
        "loss": float(loss.detach()),
        "expected": float(expected.detach()),
        "gap": float((gradients[0] - gradients[1]).abs().max()),
        "size": float(gradients[1].abs().max()),
        "no_logprobs": trainer._metrics["train"]["records/no_logprobs_fraction"][0],
    }


def refused_without_routes(example: Any) -> str:
    """A sequence whose record is gone."""
    try:
        trained(example, ours={"rules": "disabled", "routes": {}})
    except RouteError as error:
        return error.reason
    return ""


def main(folder: str) -> None:
    sys.path[:0] = [folder, str(Path(__file__).parents[2] / "examples" / "trl")]
    example = import_module("train")
    own = import_module("trl").GRPOTrainer
    found = {
        "by_hand": by_hand(example),
        "plain": trained(example, kind=own, ours={}),
        "disabled": trained(example, ours={"rules": "disabled"}),
        "replayed": trained(example),
        "checkpointed": trained(example, gradient_checkpointing=True),
        "uncheckpointed": trained(example, gradient_checkpointing=False),
        "narrow": trained(example, ours={"rules": NARROW, "routes": example.ROUTES}),
        "nothing": trained(example, ours={"rules": NOTHING, "routes": example.ROUTES}, router_aux_loss_coef=0.0),
        "refused": refused_without_routes(example),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
