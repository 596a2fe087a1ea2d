"""One rank of a vocabulary-parallel computation: `vocabulary_rank.py OUT RANK WORLD`.

A world of one uses no process group.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from moe_trm.sampling_mask.dense import full_scores
from moe_trm.sampling_mask.logprobs import log_kept_masses, masked_logprobs_and_kl
from moe_trm.sampling_mask.vocabulary import Vocabulary

V, H, TAU = 26, 6, 0.8
SIZES = (1, 5, 20, 2, 3, 1)
"""Some supports lie on one rank alone, one is wide."""


def main() -> None:
    out, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    group = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=world)
        group = dist.group.WORLD
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(SIZES), H, generator=gen).requires_grad_()
    weight = torch.randn(V, H, generator=gen)
    mine = V // world
    own = weight[rank * mine : (rank + 1) * mine].clone().requires_grad_()
    ids = [torch.randperm(V, generator=gen)[:size] for size in SIZES]
    target = torch.stack([row[0] for row in ids])
    offsets = torch.tensor([0, *torch.tensor(SIZES).cumsum(0).tolist()])
    mu = torch.cat([torch.randn(size, generator=gen).log_softmax(0) for size in SIZES])
    vocabulary = Vocabulary(first=rank * mine, group=group)
    slopes = torch.randn(len(SIZES), generator=gen)

    masked, kl = masked_logprobs_and_kl(hidden, own, target, torch.cat(ids), offsets, mu, TAU, 7, vocabulary)
    grad_masked = torch.autograd.grad((masked * slopes).sum(), [hidden, own])
    scores = full_scores(hidden, own, target, TAU, 4, vocabulary, entropy=True, sum_of_squares=True, top_k=3)
    assert scores.entropy is not None
    assert scores.sum_of_squares is not None
    assert scores.top_ids is not None
    assert scores.top_logprobs is not None
    grad_full = torch.autograd.grad(((scores.logprobs + 0.3 * scores.entropy) * slopes).sum(), [hidden, own])
    tensors = {
        "masked": masked,
        "kl": kl,
        "full": scores.logprobs,
        "entropy": scores.entropy,
        "squares": scores.sum_of_squares,
        "top_ids": scores.top_ids,
        "top_logprobs": scores.top_logprobs,
        "mass": log_kept_masses(hidden, own, torch.cat(ids), offsets, TAU, vocabulary=vocabulary),
        "hidden_grad": grad_masked[0],
        "hidden_grad_full": grad_full[0],
        "weight_grad_masked": grad_masked[1],
        "weight_grad_full": grad_full[1],
    }
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, out / f"{rank}.safetensors")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
