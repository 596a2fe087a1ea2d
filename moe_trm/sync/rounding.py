"""Rounding of weights on their way to the rollout: the cast to the engine's dtype, and fake quantisation before it.

A fake-quantised weight is q s: an integer or an 8-bit float q, times the scale s of its channel or block. The engine
gets q s in its own dtype, so that it computes with the weights of a quantised model, on any hardware:

- `int8`, `int4` of b bits: s = max|w| / (2^(b-1) - 1), q = round(w / s), to even at a tie.
- `fp8_e4m3`: s = max|w| / 448, q = w / s as the nearest 8-bit float with 4 bits of exponent and 3 of mantissa.

A scale serves an output channel (the weights of one output), or a block of N x N weights. As in published quantised
checkpoints, only matrices of attention, MLPs and experts are rounded. Embeddings, output layer, routers, norms and
biases stay.

Shape letters: O outputs, I inputs, E experts.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trm.config.schema import LearnerConfig, RolloutConfig, TrainConfig
from moe_trm.methods.weight_formats import LARGEST, WeightFormat

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_MATRIX = re.compile(r".*\.(\w*_proj|in_proj_\w+|kv_a_proj_with_mqa|w[123]|linear_qkv|linear_fc[12])(\.weight\d*)?")
_EXACT = ".e_score_correction_bias"


@dataclass(frozen=True)
class Rounding:
    """The rounding that a push does to weights.

    Attributes:
        dtype: the engine's arithmetic, e.g. "bfloat16".
        fake: format of the fake quantisation before the cast; None: the cast alone.
        block: side of the blocks that share a scale; None: one scale for each output channel.
        noises: on norms and on routers, before anything is rounded. `held` is without them.
    """

    dtype: str
    fake: WeightFormat | None = None
    block: int | None = None
    noises: tuple[NormNoise | RouterNoise, ...] = ()

    def at(self, version: int) -> Rounding:
        """The rounding of the push of this version."""
        return replace(self, noises=tuple(replace(noise, version=version) for noise in self.noises))

    def dtype_of(self, name: str) -> str:
        """The dtype in which the Hugging Face tensor `name` is sent.

        Biases that choose experts stay float32, as the engine holds them: rounded, they would choose others than the
        learner's.
        """
        return "float32" if name.endswith(_EXACT) else self.dtype

    def pushed(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of a checkpoint as it is sent: on the CPU, contiguous. Stacked experts are `[E, I, O]`."""
        weights = tensor.detach().cpu()
        for noise in self.noises:
            weights = noise.added(name, weights)
        return self._rounded(name, weights, inputs_first=tensor.dim() == 3).contiguous()

    def held(self, name: str, tensor: Tensor, *, inputs_first: bool = False) -> Tensor:
        """The learner's parameter `name` as the engine has it, in the dtype of the push.

        Exact where the parameter has whole output channels (no tensor or ZeRO-3 partition) and no blocks.
        `inputs_first`: of stacked experts, `[E, I, O]` in place of `[E, O, I]`.
        """
        return self._rounded(name, tensor, inputs_first=inputs_first and tensor.dim() == 3)

    def _rounded(self, name: str, tensor: Tensor, *, inputs_first: bool) -> Tensor:
        if self.fake is not None and is_matrix(name, tensor):
            matrix = tensor.mT if inputs_first else tensor
            matrix = fake_quantize(matrix.float(), self.fake, self.block)
            tensor = matrix.mT if inputs_first else matrix
        return tensor.to(DTYPES[self.dtype_of(name)])


def is_matrix(name: str, tensor: Tensor) -> bool:
    """True for weights of attention, MLPs and experts, by their names in Hugging Face, Megatron and transformers."""
    return tensor.dim() >= 2 and _MATRIX.fullmatch(name) is not None


def fake_quantize(weight: Tensor, to: WeightFormat, block: int | None = None) -> Tensor:
    """The nearest weights that `to` can hold to finite `[..., O, I]` float32 ones, in float32.

    `block`: side of the blocks that share a scale, smaller at the end; None: one scale for each output channel.
    """
    if block is None:
        return _to_grid(weight, weight.abs().amax(-1, keepdim=True), to)
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight, (0, -columns % block, 0, -rows % block))
    *outer, tall, wide = padded.shape
    tiles = padded.view(*outer, tall // block, block, wide // block, block)
    largest = tiles.abs().amax((-1, -3), keepdim=True)
    return _to_grid(tiles, largest, to).flatten(-4, -3).flatten(-2)[..., :rows, :columns]


def _to_grid(weight: Tensor, largest: Tensor, to: WeightFormat) -> Tensor:
    scale = torch.where(largest > 0, largest / LARGEST[to], 1.0)
    on_grid = weight / scale
    on_grid = on_grid.to(torch.float8_e4m3fn).float() if to == "fp8_e4m3" else on_grid.round()
    return on_grid * scale


def rounding_of(rollout: RolloutConfig, train: TrainConfig, seed: int) -> Rounding:
    """Rounding of the weights in every push of this run."""
    noises: list[NormNoise | RouterNoise] = []
    if rollout.norm_noise:
        steps = train.steps
        noises.append(NormNoise(rollout.norm_noise, rollout.norm_noise_end, rollout.norm_noise_stages, steps, seed))
    if rollout.fake_router_noise:
        noises.append(RouterNoise(rollout.fake_router_noise, rollout.fake_router_noise_each_push, seed))
    return Rounding(rollout.server.dtype, rollout.fake_quantization, rollout.fake_quantization_block, tuple(noises))


def computes_in(learner: LearnerConfig, rollout: RolloutConfig, train: TrainConfig, seed: int) -> Rounding | None:
    """Rounding of the weights in every pass of the learner; None: passes use them as they are."""
    return replace(rounding_of(rollout, train, seed), noises=()) if learner.round_like_rollout else None


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
