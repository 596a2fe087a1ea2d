"""The policy loss of slime or miles, of its real source, with examples/slime: run in a process by itself.

`python -m tests.integration.slime_host FOLDER[:FOLDER] [miles]` prints what the loss and its metrics are, and what they
should be, as JSON. The folders hold the host's package and those of its requirements that are not installed.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trm.corrections.plain import correct


def main(folder: str, host: str = "slime") -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "slime"))
    example = import_module("on_cpu")
    loss, metrics, logits, batch = example.corrected_loss(host, folder)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = by_hand(batch)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    print(
        json.dumps(
            {
                "loss": float(loss),
                "expected": float(expected),
                "gradient_gap": float((gradient - expected_gradient).abs().max()),
                "gradient": float(expected_gradient.abs().max()),
                "metrics": {name: float(value) for name, value in metrics.items() if name.startswith("moe_trm/")},
                "routes": example.sample_routes(host),
            }
        )
    )


def by_hand(batch: dict[str, Any]) -> Tensor:
    """The sum over samples of the mean of weighted clipped losses, one sample at a time."""
    total = torch.zeros(())
    fields = ("current", "log_probs", "rollout_log_probs", "loss_masks", "advantages")
    for parts in zip(*(batch[field] for field in fields), strict=True):
        now, before, sampled, mask, advantage = parts
        got = correct(
            [
                ("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"}),
                ("trm_max", {"max_kl": 0.05, "ratio": "merged"}),
            ],
            rollout_logprobs=sampled[None],
            proximal_logprobs=before[None],
            mask=mask[None].bool(),
        )
        ratio = (now - before).exp()
        clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        total = total + (clipped * got.weights[0])[got.keep[0]].sum() / mask.sum()
    return total


if __name__ == "__main__":
    main(*sys.argv[1:])
