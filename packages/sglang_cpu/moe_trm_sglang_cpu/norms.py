"""Root mean square norms, and the norm and rotation of queries and keys, in few calls of torch.

SGLang's own take twenty to forty small calls per layer, which is most of their time when a pass has some dozens of
tokens. The arithmetic is theirs, element by element: the same products, sums and roundings.

Shape letters: N tokens, H heads of queries, G heads of keys, D head dimension, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def wrap(native: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's `RMSNorm.forward_native`, which is `native`, with the plain norms in fewer calls."""

    def forward_native(
        norm: Any,
        x: Tensor,
        residual: Tensor | None = None,
        post_residual_addition: Tensor | None = None,
        quant_linear: Any = None,
    ) -> Any:
        special = (
            post_residual_addition is not None
            or norm.cast_x_before_out_mul
            or norm.fp32_residual
            or norm.override_orig_dtype is not None
            or norm.variance_size_override is not None
            or x.shape[-1] != norm.hidden_size
        )
        if special:
            return native(norm, x, residual, post_residual_addition, quant_linear)
        wide = x.contiguous().float()
        if residual is None:
            return normed(wide, norm.weight, norm.variance_epsilon).to(x.dtype)
        wide = wide + residual
        return normed(wide, norm.weight, norm.variance_epsilon).to(x.dtype), wide.to(x.dtype)

    return forward_native


def normed(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight over the last dimension, in float32."""
    width = wide.shape[-1]
    sums = (wide * wide).sum(-1, keepdim=True)
    if width & (width - 1):
        scale = sums.div_(width).add_(eps).rsqrt_()
    else:  # the product with 1 / width is exact, so that one call does for two
        scale = torch.add(_number(eps), sums, alpha=1 / width).rsqrt_()
    return (wide * scale).mul_(weight)


@lru_cache(maxsize=16)
def _number(value: float) -> Tensor:
    """A tensor of one number, which torch adds faster than the number itself."""
    return torch.tensor(value)


def norm_and_rotate(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    is_neox: bool,
    positions: Tensor,
    cos_sin_cache: Tensor,
    rotary_dim: int,
) -> None:
    """`fused_qk_norm_rope_cpu` of `sgl_kernel` in torch: queries and keys normed and rotated, in place.

    Args:
        q: `[N, H * D]`, rows of a wider tensor.
        k: `[N, G * D]`, likewise.
        q_weight: `[D]`, of the norm of queries.
        k_weight: `[D]`, of that of keys.
        eps: of both norms.
        is_neox: the halves of a head are rotated against each other; otherwise its even and odd places.
        positions: `[N]`.
        cos_sin_cache: `[P, rotary_dim]`, cosines and then sines.
        rotary_dim: leading places of a head that are rotated.
    """
    dim = q_weight.shape[0]
    heads, groups = q.shape[1] // dim, k.shape[1] // dim
    if k.data_ptr() == q.data_ptr() + q.shape[1] * q.element_size() and k.stride() == q.stride():
        both = q.as_strided((len(q), heads + groups, dim), (q.stride(0), dim, 1))
        parts = [(both, torch.cat([q_weight.expand(heads, dim), k_weight.expand(groups, dim)]))]
    else:
        parts = [(q.unflatten(1, (heads, dim)), q_weight), (k.unflatten(1, (groups, dim)), k_weight)]
    for x, weight in parts:
        out = normed(x.float(), weight, eps).to(x.dtype)
        if is_neox and rotary_dim == dim:
            _rotate_halves(out, positions, cos_sin_cache, x)
        else:
            x.copy_(_rotated(out, positions, cos_sin_cache, rotary_dim, is_neox))


def _rotate_halves(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, out: Tensor) -> None:
    """`(a, b)` to `(a cos - b sin, b cos + a sin)`, a and b the halves of each head, into `out`."""
    cos, sin = signed_turn(cos_sin_cache, positions, x.dtype)
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    torch.add(x * cos, swapped.mul_(sin), out=out)


def signed_turn(cos_sin_cache: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each token for all places of a head, `[N, 1, D]`; sines are negative in the first half."""
    cos, sin = _signed(cos_sin_cache, dtype).index_select(0, positions).unsqueeze(1).chunk(2, -1)
    return cos, sin


@lru_cache(maxsize=4)
def _signed(cos_sin_cache: Tensor, dtype: torch.dtype) -> Tensor:
    """`[P, 2 D]`: the cosine of each place of a head, and its sine, negative in the first half."""
    cos, sin = cos_sin_cache.to(dtype).chunk(2, -1)
    return torch.cat([cos, cos, -sin, sin], -1)


def _rotated(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, rotary_dim: int, is_neox: bool) -> Tensor:
    """SGLang's native rotation of a part of each head."""
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).to(x.dtype).chunk(2, -1)
    turning = x[..., :rotary_dim]
    first, second = turning.chunk(2, -1) if is_neox else (turning[..., ::2], turning[..., 1::2])
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)
    return torch.cat([joined, x[..., rotary_dim:]], -1)
