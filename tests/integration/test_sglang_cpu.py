"""The CPU support package: inert without SGLang's switch, and second to anything real.

Every case is a fresh interpreter.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")


real_triton = pytest.mark.skipif(
    find_spec("triton") is not None, reason="a real triton is installed (a CUDA build of torch brings it), and wins"
)


def python(code: str, *, enabled: bool, path: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("SGLANG_USE_CPU_ENGINE", "PYTHONPATH")}
    env |= {"OMP_NUM_THREADS": "1"}
    if enabled:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_the_torchvision_hook_is_imported_without_the_switch() -> None:
    out = python(
        "import sys; print(*sorted(name for name in sys.modules if name.startswith('moe_trm_sglang_cpu')), "
        "'torch' in sys.modules)",
        enabled=False,
    )
    assert out == "moe_trm_sglang_cpu moe_trm_sglang_cpu.torchvision_ops False"


@real_triton
def test_stand_ins_appear_with_the_switch() -> None:
    code = """
import triton, triton.language as tl, sgl_kernel
@triton.jit
def one(): return 1
@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=['n'])
def two(): return 2
print(one(), two(), triton.cdiv(7, 2), triton.next_power_of_2(5), tl.constexpr(3).value, \
sgl_kernel.__file__.split('/')[-2])
"""
    assert python(code, enabled=True) == "1 2 4 8 3 sgl_kernel_stub"


@pytest.mark.parametrize("name", ["triton", "sgl_kernel"])
def test_a_real_package_on_the_path_wins(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("REAL = 'real'\n")
    (tmp_path / name / "part.py").write_text("REAL = 'part'\n")
    assert (
        python(f"import {name}, {name}.part; print({name}.REAL, {name}.part.REAL)", enabled=True, path=tmp_path)
        == "real part"
    )


@pytest.mark.parametrize("name", [pytest.param("triton", marks=real_triton), "sgl_kernel"])
def test_a_finder_installed_later_wins(tmp_path: Path, name: str) -> None:
    (tmp_path / "real.py").write_text("REAL = 'real'\n")
    code = f"""
import sys
from importlib.util import spec_from_file_location
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, {str(tmp_path / "real.py")!r}) if name == {name!r} else None
sys.meta_path.append(Editable)
import {name}
print({name}.REAL)
"""
    assert python(code, enabled=True) == "real"


def test_missing_kernels_are_loud() -> None:
    code = """
from sgl_kernel import silu_and_mul
try:
    silu_and_mul()
except RuntimeError as error:
    print(error)
try:
    import sgl_kernel.flash_attn
except ImportError:
    print('no submodule')
"""
    assert python(code, enabled=True).splitlines() == [
        "sgl_kernel.silu_and_mul has no CPU stand-in in moe-trm-sglang-cpu; install a real sgl_kernel to use it",
        "no submodule",
    ]


def test_murmur_hash_matches_the_published_algorithm() -> None:
    def mix(state: int, word: int) -> int:
        word = word * 0xCC9E2D51 & 0xFFFFFFFF
        word = ((word << 15 | word >> 17) & 0xFFFFFFFF) * 0x1B873593 & 0xFFFFFFFF
        state ^= word
        return ((state << 13 | state >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF

    def murmur(words: list[int]) -> int:
        state = 0
        for word in words:
            state = mix(state, word)
        state ^= 4 * len(words)
        state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return state ^ state >> 16

    seed, position, columns = 0x1234_5678_9ABC_DEF0, 7, [0, 1, 31999]
    expected = [murmur([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in columns]
    code = f"""
import torch, sgl_kernel
print(torch.ops.sgl_kernel.murmur_hash32_cpu(torch.tensor([{seed}]), torch.tensor([{position}]), \
torch.tensor({columns})).tolist()[0])
"""
    assert python(code, enabled=True) == str(expected)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvision_imports_beside_a_cpu_torch() -> None:
    code = """
import torch, torchvision
print(hasattr(torch.ops.torchvision, 'nms'))
"""
    assert python(code, enabled=False) == "True"


@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("num_queries", [1, 3, 5])
def test_attention_with_sinks_is_the_softmax_over_keys_and_one_logit_more(num_queries: int, window: int) -> None:
    from moe_trm_sglang_cpu.attention import attention

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, heads, 8, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator)
    got = attention(query[-num_queries:], key, value, 0.3, window, sinks)
    for row, position in enumerate(range(5 - num_queries, 5)):
        seen = range(0 if window < 0 else max(0, position - window), position + 1)
        for head in range(4):
            logits = [0.3 * float(query[position, head] @ key[other, head // 2]) for other in seen]
            total = sum(map(math.exp, logits)) + math.exp(float(sinks[head]))
            expected = sum(
                math.exp(logit) / total * value[other, head // 2] for logit, other in zip(logits, seen, strict=True)
            )
            torch.testing.assert_close(got[row, head], expected)


def test_norms_over_all_heads_are_those_of_minimax_m2_and_of_one_process_only() -> None:
    from moe_trm_sglang_cpu.elementwise import over_all_heads

    q, k = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(3, 4, dtype=torch.bfloat16)
    weights = torch.rand(8).bfloat16(), torch.rand(4).bfloat16()
    norms = SimpleNamespace(
        _world_size=1, _eps=1e-5, _q_norm=SimpleNamespace(weight=weights[0]), _k_norm=SimpleNamespace(weight=weights[1])
    )
    for got, x, weight in zip(over_all_heads(lambda *_: None, norms, q, k), (q, k), weights, strict=True):
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=0)
    norms._world_size = 2
    assert over_all_heads(lambda *_: "its own", norms, q, k) == "its own"


@pytest.fixture(scope="module")
def activated() -> list[str]:
    """The words of one process that imports SGLang, which takes half a minute."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    code = """
import torch
from types import SimpleNamespace
from moe_trm_sglang_cpu.plugin import activate
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry as registry
from sglang.srt.plugins.hook_registry import HookRegistry
print(registry.get_handler('torch_native') is registry.get_handler('triton'))
activate()
class Prefill:
    class forward_mode:
        is_extend_without_speculative = is_decode = lambda: True
    extend_prefix_lens_cpu = [0]
print(registry.get_handler('torch_native')(object(), Prefill).name)
registry.register('torch_native', 'its own')
activate()
print(registry.get_handler('torch_native'))
HookRegistry.apply_hooks()
from sglang.srt.models.minimax_m2 import MiniMaxM2QKRMSNorm
norm = SimpleNamespace(weight=torch.ones(2), variance_epsilon=0.0, attn_tp_size=1)
q, k = MiniMaxM2QKRMSNorm(norm, norm).forward(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]]))
print((q * 12.5**0.5).round().tolist(), (k * 2**0.5).round().tolist())
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.srt.models.qwen2_moe import fused_gate_sigmoid_mul_add
norm = FusedRMSNormGated(2, eps=0.0, dtype=torch.float32)
norm.weight.data = torch.tensor([1.0, 2.0])
x, gate, ones = torch.tensor([[3.0, 4.0]]), torch.tensor([[50.0, -50.0]]), torch.ones(1, 2)
fused_gate_sigmoid_mul_add(x, torch.tensor([0.0, 0.0]), 2 * x, ones)
print((norm(x, gate) * 12.5**0.5).round().abs().tolist(), ones.tolist())
print(torch.get_device_module().__name__, torch.get_device_module('cuda').__name__)
"""
    return python(code, enabled=True).splitlines()


def test_latent_attention_reads_the_latents_unless_sglang_knows_better(activated: list[str]) -> None:
    assert activated[:3] == ["True", "MLA", "its own"]


def test_sglang_norms_minimax_m2_over_all_heads_without_triton(activated: list[str]) -> None:
    assert activated[3] == "[[3.0, 4.0]] [[0.0, 2.0]]"


def test_the_gates_of_qwen3_next_without_triton(activated: list[str]) -> None:
    assert activated[4] == "[[150.0, 0.0]] [[4.0, 5.0]]"


def test_the_device_without_a_driver_is_the_cpu(activated: list[str]) -> None:
    assert activated[5] == "torch.cpu torch.cuda"


def test_the_gated_delta_rule_of_the_stand_in_is_that_of_transformers() -> None:
    """Three requests in one pass, each from a state of its own; decoding gives the same as a prefill."""
    code = """
import torch
from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as reference
torch.manual_seed(0)
lengths, heads, groups, width = [5, 70, 1], 2, 4, 8
total, rows = sum(lengths), torch.tensor([4, 1, 2], dtype=torch.int32)
start = torch.tensor([0, 5, 75, 76], dtype=torch.int32)
q, k, v = torch.randn(1, total, heads, 16), torch.randn(1, total, heads, 16), torch.randn(1, total, groups, width)
log, bias, a, b = torch.rand(groups), torch.randn(groups), torch.randn(total, groups), torch.randn(total, groups)
left, rate = torch.ops.sgl_kernel.fused_gdn_gating_cpu(log, a, b, bias)
pool = torch.randn(6, groups, width, 16)
before, own = pool.clone(), pool.clone()
options = dict(cu_seqlens=start, head_first=False, use_qk_l2norm_in_kernel=True, initial_state_indices=rows)
out = chunk_gated_delta_rule_cpu(q, k, v, left, rate, initial_state=pool, **options)[0]
for row, begin, end in zip(rows.tolist(), start.tolist(), start[1:].tolist()):
    wide = [x[:, begin:end].repeat_interleave(2, 2) for x in (q, k)]
    rest = [x[:, begin:end] for x in (v, left, rate)]
    expected, state = reference(*wide, *rest, initial_state=before[row][None].mT, output_final_state=True,
                                use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out[:, begin:end], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(pool[row], state[0].mT, rtol=0, atol=1e-5)
assert torch.equal(pool[[0, 3, 5]], before[[0, 3, 5]])
for step in range(5, 75):  # the second request token by token
    one = slice(step, step + 1)
    got = torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=log, dt_bias=bias, q=q[:, one], k=k[:, one], v=v[:, one], a=a[one], b=b[one], initial_state_source=own,
        initial_state_indices=rows[1:2], cu_seqlens=torch.tensor([0, 1]), use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0, softplus_threshold=20.0)
    torch.testing.assert_close(got, out[:, one], rtol=0, atol=1e-5)
torch.testing.assert_close(own[1], pool[1], rtol=0, atol=1e-5)

x, weight, kept = torch.randn(6, total), torch.randn(6, 4), torch.randn(6, 6, 3)
held, fresh = kept.clone(), torch.tensor([False, True, True])
got = causal_conv1d_fn_cpu(x, weight, None, activation="silu", conv_states=kept, has_initial_state=fresh,
                           cache_indices=rows, query_start_loc=start, seq_lens_cpu=lengths)
for number, (row, begin, end) in enumerate(zip(rows.tolist(), start.tolist(), start[1:].tolist())):
    seen = torch.cat([held[row] * fresh[number], x[:, begin:end]], 1)
    expected = torch.stack([(seen[:, i:i + 4] * weight).sum(1) for i in range(end - begin)], 1)
    torch.testing.assert_close(got[:, begin:end], torch.nn.functional.silu(expected), rtol=0, atol=1e-5)
    assert torch.equal(kept[row], seen[:, -3:])
again = held.clone()
for step in range(5, 75):
    one = causal_conv1d_update_cpu(x[:, step][None], again, weight, None, "silu", conv_state_indices=rows[1:2])
    torch.testing.assert_close(one[0], got[:, step], rtol=0, atol=1e-5)
assert torch.equal(again[1], kept[1])
print("the same")
"""
    assert python(code, enabled=True) == "the same"


def test_the_attention_of_qwen3_5_of_the_stand_in_is_that_of_transformers() -> None:
    """Norms by head and gates, from slices as SGLang passes them, and its projections into the delta rule apart."""
    code = """
import sgl_kernel, torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm
ops, heads, groups, width = torch.ops.sgl_kernel, 4, 2, 8
torch.manual_seed(0)
norms = [Qwen3_5MoeRMSNorm(width, eps=1e-3) for _ in range(2)]
for norm in norms:
    norm.weight.data = torch.randn(width)
q_gate, k, _ = torch.randn(3, 2 * heads * width + 2 * groups * width).split([64, 16, 16], -1)
q, k_normed, gate = ops.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, *(n.weight.data for n in norms), 1e-3, 8, heads)
plain, plain_gate = q_gate.view(3, heads, 2 * width).chunk(2, -1)
torch.testing.assert_close(q.view(3, heads, width), norms[0](plain))
torch.testing.assert_close(k_normed.view(3, groups, width), norms[1](k.reshape(3, groups, width)))
assert torch.equal(gate.view(3, heads, width), plain_gate)
x = torch.randn(3, heads * width)
expected = x * torch.sigmoid(gate.view(3, -1))
ops.fused_sigmoid_mul_cpu(x, gate.view(3, -1))
torch.testing.assert_close(x, expected)
qkvz, ba = torch.randn(3, 2 * 2 * 8 + 2 * 4 * 6), torch.randn(3, 8)
mixed, z, b, a = ops.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, 2, 4, 8, 6)
assert torch.equal(torch.cat([mixed, z.flatten(1)], 1), qkvz) and z.shape == (3, 4, 6)
assert torch.equal(torch.cat([b, a], 1), ba)
print("the same")
"""
    assert python(code, enabled=True) == "the same"
