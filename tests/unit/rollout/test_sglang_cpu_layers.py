"""All layers of a plain model in one loop: the arithmetic of SGLang's modules, for few tokens and many.

Shape letters: as in `whole_layers`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.layer_matrices import KEPT, forget_after, kept_matrices, matrices_of
from moe_trm_sglang_cpu.norms import signed_turn
from moe_trm_sglang_cpu.whole_layers import through_layers

D, H, G, A, E, K, F = 16, 4, 2, 8, 8, 2, 6
EPS, LAYERS = 1e-6, 2


def weight(*shape: int, dtype: torch.dtype, seed: int) -> torch.nn.Parameter:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    return torch.nn.Parameter(values.to(dtype), requires_grad=False)


def norm(width: int, dtype: torch.dtype, seed: int) -> SimpleNamespace:
    return SimpleNamespace(weight=weight(width, dtype=dtype, seed=seed), variance_epsilon=EPS)


def sglang_layer(number: int, dtype: torch.dtype) -> Any:
    """The part of SGLang's layer that `matrices_of` reads."""

    def matrix(*shape: int, seed: int) -> SimpleNamespace:
        return SimpleNamespace(weight=weight(*shape, dtype=dtype, seed=100 * number + seed))

    attention = SimpleNamespace(
        num_heads=H,
        num_kv_heads=G,
        q_norm=norm(A, dtype, 1),
        k_norm=norm(A, dtype, 2),
        qkv_proj=matrix((H + 2 * G) * A, D, seed=3),
        o_proj=matrix(D, H * A, seed=4),
        attn=SimpleNamespace(layer_id=number),
    )
    experts = SimpleNamespace(w13_weight=matrix(E, 2 * F, D, seed=5).weight, w2_weight=matrix(E, D, F, seed=6).weight)
    chooser = SimpleNamespace(layer_id=number, topk_config=SimpleNamespace(top_k=K, renormalize=True))
    return SimpleNamespace(
        input_layernorm=norm(D, dtype, 7),
        post_attention_layernorm=norm(D, dtype, 8),
        self_attn=attention,
        mlp=SimpleNamespace(experts=experts, topk=chooser, gate=matrix(E, D, seed=9)),
    )


def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each token sees itself only, and the number of the layer."""
    weights = (query.unflatten(1, (G, -1)) * key.unsqueeze(2)).sum(-1, keepdim=True)
    return (weights * value.unsqueeze(2) + layer.layer_id).flatten(1)


def native(x: Tensor, layers: list[Any], last: Tensor, cos_sin: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """The layers as SGLang's modules compute them, one step after the other; and the choices."""
    dtype, residual, choices = x.dtype, None, {}

    def normed(values: Tensor, by: Tensor) -> Tensor:
        wide = values.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * by).to(dtype)

    def rotated(heads: Tensor) -> Tensor:
        cos, sin = (half.unsqueeze(1).to(dtype) for half in cos_sin.chunk(2, -1))
        one, two = heads.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    for layer in layers:
        wide = x.float() if residual is None else x.float() + residual.float()
        residual, mixing = wide.to(dtype), layer.self_attn
        heads = functional.linear(normed(wide, layer.input_layernorm.weight), mixing.qkv_proj.weight).unflatten(
            -1, (-1, A)
        )
        query = rotated(normed(heads[:, :H], mixing.q_norm.weight))
        key = rotated(normed(heads[:, H : H + G], mixing.k_norm.weight))
        x = functional.linear(attend(mixing.attn, query, key, heads[:, H + G :]), mixing.o_proj.weight)
        wide = x.float() + residual.float()
        residual = wide.to(dtype)
        x = normed(wide, layer.post_attention_layernorm.weight)
        block = layer.mlp
        weights, ids = functional.linear(x, block.gate.weight).float().softmax(-1).topk(K)
        choices[block.topk.layer_id] = ids
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros(len(x), D)
        for token, place in ((token, place) for token in range(len(x)) for place in range(K)):
            expert = int(ids[token, place])
            gate, up = functional.linear(x[token], block.experts.w13_weight[expert]).chunk(2)
            done = functional.linear(functional.silu(gate) * up, block.experts.w2_weight[expert])
            out[token] += weights[token, place] * done.float()
        x = out.to(dtype)
    return normed(x.float() + residual.float(), last), choices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "crowded"), [(1, False), (3, False), (7, False), (90, False), (300, True)])
def test_the_loop_computes_what_the_modules_do(dtype: torch.dtype, tokens: int, crowded: bool) -> None:
    """One token, experts of each choice, all experts at once, and one expert with most of the tokens."""
    layers = [sglang_layer(number, dtype) for number in range(LAYERS)]
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens))
    x = (x * 0.01 + torch.randn(D, generator=torch.Generator().manual_seed(1)) if crowded else x).to(dtype)
    last, cache = norm(D, dtype, 11).weight, torch.randn(512, A, generator=torch.Generator().manual_seed(2))
    positions, told = torch.arange(tokens) % 400 + 5, list[Tensor]()
    got = through_layers(
        x,
        [matrices_of(layer) for layer in layers],
        last,
        signed_turn(cache, positions, dtype),
        attend,
        told,
    )
    expected, choices = native(x, layers, last, cache[positions])
    assert got.dtype == dtype
    assert [ids.tolist() for ids in told] == [choices[number].tolist() for number in range(LAYERS)]
    torch.testing.assert_close(got, expected, atol=2e-6 if dtype == torch.float32 else 0.04, rtol=2e-2)


def model_of(layers: int = LAYERS) -> Any:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    model.layers.extend(torch.nn.Linear(4, 4) for _ in range(layers))
    return model


def test_a_model_that_is_not_plain_has_no_matrices_and_is_asked_once() -> None:
    model = model_of()
    asked: list[Any] = []

    def is_plain(found: Any) -> bool:
        asked.append(found)
        return False

    for _ in range(2):
        assert kept_matrices(model, is_plain) is None
    assert asked == [model]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ([], True),
        (["TokenizedGenerateReqInput", "AbortReq"], True),
        (["BatchTokenizedGenerateReqInput"], True),
        (["TokenizedGenerateReqInput", "UpdateWeightFromDiskReqInput"], False),
        (["EndWeightUpdateReqInput"], False),
    ],
)
def test_what_is_kept_outlives_requests_for_tokens_only(names: list[str], kept: bool) -> None:
    model = model_of()
    model.__dict__[KEPT] = ["of the first weights"]
    forgotten: list[str] = []
    backend = SimpleNamespace(forget=lambda: forgotten.append("rows"))
    runner = SimpleNamespace(model=SimpleNamespace(model=model), attn_backend=backend)
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
    forget_after(scheduler, [type(name, (), {})() for name in names])
    assert (KEPT in model.__dict__) is kept
    assert forgotten == ([] if kept else ["rows"])
