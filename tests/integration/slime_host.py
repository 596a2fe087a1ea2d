"""slime's own policy loss, of its real source, with the rules of examples/slime: run in a process by itself.

`python -m tests.integration.slime_host FOLDER` prints what the loss and its metrics are, and what they should be, as
JSON. FOLDER holds slime's package.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

from moe_trm.corrections.plain import correct

LENGTHS, PROMPT, VOCAB = (4, 1, 3), 2, 11


def arguments(path: str) -> Namespace:
    return Namespace(
        use_rollout_logprobs=False, rollout_top_p=1.0, rollout_temperature=1.0, log_probs_chunk_size=-1,
        allgather_cp=False, use_opsm=False, advantage_estimator="grpo", eps_clip=0.2, eps_clip_high=0.28,
        eps_clip_c=None, get_mismatch_metrics=False, use_tis=True, custom_tis_function_path=path,
        calculate_per_token_loss=False, custom_pg_loss_reducer_function_path=None, entropy_coef=0.0,
        use_kl_loss=False, use_opd=False, qkv_format="thd",
    )  # fmt: skip


def main(folder: str) -> None:
    sys.path[:0] = [folder, str(Path(__file__).parents[2] / "examples" / "slime")]
    from megatron.core import parallel_state

    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group("gloo", init_method=f"file://{file.name}x", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    loss_module = import_module("slime.backends.megatron_utils.loss")
    reducers = import_module("slime.backends.megatron_utils.cp_utils")

    gen = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, VOCAB, (PROMPT + length,), generator=gen) for length in LENGTHS]
    logits = torch.randn(1, sum(map(len, tokens)), VOCAB, generator=gen, requires_grad=True)
    starts = torch.tensor([0, *(len(ids) for ids in tokens)]).cumsum(0).tolist()
    current = [
        logits[0, start + PROMPT - 1 : start + len(ids) - 1].log_softmax(-1).gather(1, ids[PROMPT:, None])[:, 0]
        for start, ids in zip(starts, tokens, strict=False)
    ]
    # The policy has moved in the step already, one rollout token is far off, and one token is a tool's.
    old = [part.detach() + 0.1 for part in current]
    rollout = [part.clone() for part in old]
    rollout[0][1] -= 1.5
    rollout[2] += 0.2
    masks = [torch.ones(length) for length in LENGTHS]
    masks[0][3] = 0
    advantages = [torch.full((length,), value) for length, value in zip(LENGTHS, (1.0, -1.0, 0.5), strict=True)]
    batch = {
        "advantages": advantages,
        "log_probs": old,
        "rollout_log_probs": rollout,
        "loss_masks": masks,
        "unconcat_tokens": tokens,
        "total_lengths": [len(ids) for ids in tokens],
        "response_lengths": list(LENGTHS),
        "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]),
    }
    reducer = reducers.get_sum_of_sample_mean(
        batch["total_lengths"], batch["response_lengths"], masks, batch["rollout_mask_sums"], False
    )
    loss, metrics = loss_module.policy_loss_function(arguments("rules.corrected"), batch, logits, reducer)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = by_hand(current, old, rollout, masks, advantages)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    print(
        json.dumps(
            {
                "loss": float(loss),
                "expected": float(expected),
                "gradient_gap": float((gradient - expected_gradient).abs().max()),
                "gradient": float(expected_gradient.abs().max()),
                "metrics": {name: float(value) for name, value in metrics.items() if name.startswith("moe_trm/")},
            }
        )
    )
    torch.distributed.destroy_process_group()


def by_hand(
    current: list[Tensor], old: list[Tensor], rollout: list[Tensor], masks: list[Tensor], advantages: list[Tensor]
) -> Tensor:
    """The sum over samples of the mean of weighted clipped losses, one sample at a time."""
    total = torch.zeros(())
    for parts in zip(current, old, rollout, masks, advantages, strict=True):
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
    main(sys.argv[1])
