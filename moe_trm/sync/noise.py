"""Noise on pushed weights: on norms, so that a rollout explores, and on routers, so that engines route apart."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_NORM = re.compile(r".*\.layers\.\d+\.(input_layernorm|post_attention_layernorm)\.weight")
_ROUTER = re.compile(r".*\.layers\.\d+\.(mlp|block_sparse_moe)\.(gate|router)\.weight")


@dataclass(frozen=True)
class NormNoise:
    """Adaptive quantisation noise (AQN): w + z in the place of w in both norms of each block, z ~ N(0, sigma^2).

    The run is cut into K + 1 equal intervals. In the first there is no noise, and in stage k = 1..K
    sigma = start (end / start)^((k - 1) / (K - 1)); with one stage it is `start`. A norm scales what all of a block's
    matrices read, so this is noise on the rows of these matrices, without touching them. Each push has its own draw,
    made of the run's seed, the version and the tensor's name: the same on every rank, and again after a resumption.

    The published method adds it to 4-bit weights under low-rank adapters. Here it goes on top of any push.
    Source: QeRL (arXiv 2510.11696), equation 10; intervals as in its released code.
    """

    start: float
    end: float
    stages: int
    steps: int
    seed: int
    version: int = 0

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise of this version."""
        stage = min(self.version * (self.stages + 1) // self.steps, self.stages)
        if stage == 0:
            return 0.0
        fraction = (stage - 1) / (self.stages - 1) if self.stages > 1 else 0.0
        return float(self.start * (self.end / self.start) ** fraction)

    def added(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of a checkpoint with its noise, float32; one that is no norm of a block, or without noise, as it
        is.
        """
        if not self.sigma or _BLOCK_NORM.fullmatch(name) is None:
            return tensor
        return tensor.float() + self.sigma * _normal(f"{self.seed}-{self.version}-{name}", tensor)


@dataclass(frozen=True)
class RouterNoise:
    """Mismatch of routing alone, at a chosen dose: w + s std(w) z in the place of w in every router, z ~ N(0, 1).

    s is `relative`, and std(w) is over the elements of the tensor. An instrument for experiments: it is no model of
    what separates two engines, which differ in every tensor. Draws are the same on every rank, and again after a
    resumption: one for the run, of its seed and the tensor's name, or with `each_push` one for each version.
    """

    relative: float
    each_push: bool
    seed: int
    version: int = 0

    def added(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of a checkpoint with its noise, float32; one that is no router's weight as it is."""
        if _ROUTER.fullmatch(name) is None:
            return tensor
        version = f"-{self.version}" if self.each_push else ""
        noise = _normal(f"router-{self.seed}{version}-{name}", tensor)
        return tensor.float() + self.relative * tensor.float().std() * noise


def _normal(key: str, like: Tensor) -> Tensor:
    digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
    draw = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randn(like.shape, generator=draw)
