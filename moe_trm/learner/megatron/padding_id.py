"""The embedding of the padding id, which transformers never trains and Megatron-Core would.

`torch.nn.Embedding` with `padding_idx` gives this row no gradient. The row is zero in most models, and the gradient of
RMSNorm at zero is divided by the root of its epsilon: a policy that samples the id once gives a gradient norm of
thousands. Where embedding and output weight are tied, the row still learns as an output, as it does there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_trm.learner.megatron.policy import PolicyModel


def leave_untrained(chunks: Sequence[PolicyModel], hf: Mapping[str, Any]) -> None:
    """Give the embedding of the padding id, if config.json `hf` names one, no gradient in this rank's `chunks`."""
    if (named := hf.get("pad_token_id")) is None:
        return
    # transformers counts negative ids from the end.
    padding_id = int(named) % int(hf["vocab_size"])
    for chunk in chunks:
        if chunk.pre_process:
            chunk.embedding.word_embeddings.register_forward_hook(partial(_without_gradient, padding_id))


def _without_gradient(padding_id: int, embedding: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output `[B, C, H]`, or this rank's part `[C / tp, B, H]` of it, with the rows of the padding id cut off."""
    is_padding = inputs[0] == padding_id
    if embedding.reduce_scatter_embeddings:
        group = embedding.tp_group
        is_padding = is_padding.t().chunk(group.size())[group.rank()]
    return torch.where(is_padding[..., None], output.detach(), output)
