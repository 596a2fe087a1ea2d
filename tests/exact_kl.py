"""The exact KL on recorded supports, one token at a time: what the fused computation is compared with."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def exact_kl(mu_logprobs: Tensor, pi_logprobs: Tensor, offsets: Tensor) -> Tensor:
    """KL(mu || pi) of each token, `[N]` nats, from `[M]` log-probs of both.

    Token i has `offsets[i]` to `offsets[i + 1]`.
    """
    bounds = offsets.tolist()
    supports = [slice(start, end) for start, end in pairwise(bounds)]
    return torch.stack([(mu_logprobs[s].exp() * (mu_logprobs[s] - pi_logprobs[s])).sum() for s in supports])
