"""A model without attention, and random legal routes for it: torch and numpy are all that this needs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from routing import RouteRecord, Rows, token_digest

E, K, LAYERS = 8, 2, (0, 3)


class Gate(nn.Module):
    """Takes the best K of a linear layer, as transformers' softmax gates do."""

    top_k, num_experts, norm_topk_prob = K, E, True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, 4))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        weights, ids = logits.softmax(-1).topk(K)
        return logits, weights / weights.sum(-1, keepdim=True), ids


class Experts(nn.Module):
    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return hidden * ((ids + 1) * weights).sum(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Gate(), Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        _, weights, ids = self.gate(hidden.flatten(0, 1))
        return hidden + self.experts(hidden.flatten(0, 1), ids, weights).view_as(hidden)


class Layer(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.mlp = Block() if sparse else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.mlp(hidden))


class Toy(nn.Module):
    """A model without attention: what a rank computes of its columns is what one process computes there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 4)
        self.layers = nn.ModuleList([Layer(place in LAYERS) for place in range(4)])

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def records(rows: Rows, tokens: Tensor) -> tuple[RouteRecord | None, ...]:
    rng, found = np.random.default_rng(0), []
    for ids in rows.sequences(tokens):
        draw = np.argsort(rng.random((max(len(ids) - 1, 0), len(LAYERS), E)), axis=-1)[..., :K].astype(np.uint8)
        found.append(RouteRecord(draw, LAYERS, E, token_digest(ids.numpy())) if len(ids) > 1 else None)
    return tuple(found)
