"""Stand-in for `sgl_kernel.mamba`: the gated delta rule and its convolution in torch, and Qwen3.5's gated attention.

SGLang calls them under these names where it serves on a CPU. States are rows of its own pools: of the last tokens
before the convolution, and of one matrix per head. A prefill goes on from the row that its cached prefix left.

Shape letters: T tokens of all requests, R requests, C channels, W width of the convolution, H heads of queries and
keys, G heads of values (a multiple of H), K and V their widths, P rows of a pool.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, rms_norm, silu, softplus

_EPSILON = 1e-6
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
) -> Tensor:
    """Prefill: `silu` of the convolution of each request's `[C, T]`, after the tokens that its state holds."""
    rows, past = cache_indices.long(), conv_states[cache_indices.long()]
    past[~has_initial_state] = 0
    parts, kept = [], []
    for part, past_state in zip(torch.split(x, seq_lens_cpu, 1), past, strict=True):
        out, after = _convolve(part[None], past_state[None], weight, bias, activation)
        parts.append(out[0])
        kept.append(after)
    conv_states[rows] = torch.cat(kept)
    return torch.cat(parts, 1)


def causal_conv1d_update_cpu(
    x: Tensor, conv_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, conv_state_indices: Tensor
) -> Tensor:
    """Decoding: the same for one token `[R, C]` of each request."""
    rows = conv_state_indices.long()
    out, conv_states[rows] = _convolve(x[..., None], conv_states[rows], weight, bias, activation)
    return out[..., 0]


def _convolve(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    if activation != "silu":
        raise NotImplementedError(f"the convolution of moe-trm-sglang-cpu has silu only, not {activation}")
    window = torch.cat([past.to(x.dtype), x], -1)
    out = conv1d(window, weight[:, None], bias, groups=len(weight))
    return silu(out), window[..., -past.shape[-1] :].to(past.dtype)


def gates(decay_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the share of the state that is left after each token, and its correction: `[1, T, G]` float32."""
    kept = -decay_log.float().exp() * softplus(a.float() + dt_bias.float())
    return kept[None], b.sigmoid().float()[None]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    """Prefill: the outputs `[1, T, G, V]`. States are rows of the pool `initial_state` `[P, G, V, K]`, in place.

    `S = exp(g) S; S = S + beta (v - S k) k^T; o = S q / sqrt(K)`, token by token, with `q` and `k` of length 1.
    """
    if head_first or not use_qk_l2norm_in_kernel:
        raise NotImplementedError("moe-trm-sglang-cpu has tokens before heads, and queries and keys of length 1, only")
    repeat = v.shape[2] // k.shape[2]
    query, key = (_unit(tensor[0].float()).repeat_interleave(repeat, 1) for tensor in (q, k))
    query = query * query.shape[-1] ** -0.5
    value, decay, rate = v[0].float(), g[0].float().exp(), beta[0].float()
    lengths, order = cu_seqlens.diff().sort(descending=True)
    rows, first = initial_state_indices.long()[order], cu_seqlens.long()[:-1][order]
    states, out = initial_state[rows].float(), torch.empty_like(value)
    for step in range(int(lengths[0])):
        live = int((lengths > step).sum())  # the requests that have a token here: longest first
        token, state = first[:live] + step, states[:live]
        state *= decay[token][..., None, None]
        error = (value[token] - _times(state, key[token])) * rate[token][..., None]
        state += error[..., None] * key[token][..., None, :]
        out[token] = _times(state, query[token])
    initial_state[rows] = states.to(initial_state.dtype)
    return out[None].to(v.dtype), None, None


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def decode(
    decay_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Decoding: gates and rule for one token of each request."""
    decay, rate = gates(decay_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        decay,
        rate,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )[0]


def apart(
    qkvz: Tensor, ba: Tensor, _heads: int, value_heads: int, _width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Qwen3.5's projections: what the convolution takes `[T, C]`, the gate `[T, G, V]`, and `b` and `a` `[T, G]`."""
    channels = qkvz.shape[1] - value_heads * value_width
    z = qkvz[:, channels:].unflatten(1, (value_heads, value_width))
    return qkvz[:, :channels].contiguous(), z, *(gate.contiguous() for gate in ba.chunk(2, 1))


def normed(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, width: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Qwen3.5's attention: queries and keys normed by head, with weights that are offsets from 1, and the gates."""
    q, gate = q_gate.unflatten(1, (heads, 2, width)).unbind(2)
    q, k = (
        rms_norm(x.float(), (width,), 1 + weight.float(), eps).to(x.dtype)
        for x, weight in ((q, q_weight), (k.unflatten(1, (-1, width)), k_weight))
    )
    return q, k, gate.contiguous()


def gated(x: Tensor, gate: Tensor) -> None:
    """The output of Qwen3.5's attention times its gate, in place."""
    x.mul_(gate.sigmoid())


for _schema, _function in {
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, int heads, int value_heads, int width, "
    "int value_width) -> (Tensor, Tensor, Tensor, Tensor)": apart,
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, "
    "int width, int heads) -> (Tensor, Tensor, Tensor)": normed,
    "fused_qk_gemma_rmsnorm_cpu() -> ()": lambda: None,  # where attention has no gate, as here it always has
    "fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()": gated,
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)": gates,
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor": decode,
}.items():
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CPU")  # type: ignore[no-untyped-call]
