"""Makes Megatron-Core run where there is no CUDA. The one module of this project that patches third-party state.

Megatron-Core asks for CUDA devices, streams and generators by name. `install()` points each of these requests at the
CPU. Every patch below names the line of Megatron-Core 0.16.1 it answers. None is applied when CUDA is present, but
for `define_router_gemm`, which answers the absence of Transformer Engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_trm.errors import ConfigError

_CPU = torch.device("cpu")
STASH = "megatron.core.transformer.moe.ops.paged_stash"
"""Megatron-Core's module of kernels that keep activations in pages."""


def install() -> None:
    """Install the patches for this process, before any Megatron object is built; a second call does nothing.

    Raises `ConfigError` where CUDA is present: Megatron must run unpatched there.
    """
    if torch.cuda.is_available():
        raise ConfigError(
            "the CPU shim was asked for on a machine with CUDA",
            got="CUDA device",
            expected="no CUDA device",
            fix="Do not install it: Megatron-Core runs unpatched on CUDA.",
        )
    if getattr(torch.cuda, "current_device", None) is _current_device:
        return
    _install_torch_cuda()
    _install_random_state()
    define_router_gemm()
    _install_plain_router_bias()
    _install_latent_attention()
    _install_dispatcher()
    _install_tensor_type()
    _install_literals()


def import_uncompiled() -> None:
    """Import Megatron-Core with its functions as they are written, where there is no CUDA; else do nothing.

    It wraps some 40 functions in `torch.compile` when it is imported (jit.py:21, transformer/moe/router.py:532). That
    imports Inductor, for seconds, which on a CPU needs a C++ compiler. Call it before anything imports Megatron-Core.
    """
    if torch.cuda.is_available():
        return
    define_stash()
    # FlashMLA loads libcuda.so.1: without a driver its import is an OSError, and transformer/attention.py:105 of 0.19
    # expects an ImportError at most. None stands for a module that is not there.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
    compiling = torch.compile
    torch.compile = _as_written  # type: ignore[assignment]
    try:
        for name in ("models.gpt.gpt_model", "optimizer", "transformer.multi_latent_attention"):
            import_module(f"megatron.core.{name}")
    finally:
        torch.compile = compiling


def define_stash() -> None:
    """Let Megatron-Core 0.19 be imported without triton, which it does not declare among its requirements."""
    if find_spec("triton") is not None:
        return
    # transformer/moe/ops/paged_stash.py:4 imports triton, for two kernels of a setting that is off
    # (`moe_paged_stash`); transformer/moe/paged_stash.py:12 imports these names from it.
    stash = ModuleType(STASH)
    stash.__dict__.update(GLOBAL_BLOCK_SIZE=None, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None)
    sys.modules.setdefault(STASH, stash)


def _as_written(function: Callable[..., Any] | None = None, **_kwargs: Any) -> Any:
    return _as_written if function is None else function


def _current_device() -> torch.device:
    return _CPU


def _install_torch_cuda() -> None:
    # `device=torch.cuda.current_device()`: tensor_parallel/layers.py:261,873; distributed/param_and_grad_buffer.py:783;
    # transformer/moe/router.py:79.
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    # `torch.cuda.synchronize()`: pipeline_parallel/p2p_communication.py:242,398;
    # distributed/distributed_data_parallel.py:588.
    torch.cuda.synchronize = _nothing
    # `torch.cuda.empty_cache()`: optimizer/optimizer.py:362.
    torch.cuda.empty_cache = _nothing
    # `torch.cuda.current_stream()`: DistributedDataParallel of 0.19 asks for it; its only uses are waits, which have no
    # meaning here.
    torch.cuda.current_stream = _NoStream  # type: ignore[assignment]
    # `.cuda()` on tensors and modules: optimizer/optimizer.py:375,380.
    torch.Tensor.cuda = _identity  # type: ignore[method-assign]
    torch.nn.Module.cuda = _identity  # type: ignore[method-assign]


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _identity(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


class _NoStream:
    """Stands for a CUDA stream: there is one queue, so waiting on it is already done."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        """Work is already in order."""

    def synchronize(self) -> None:
        """Work is already finished."""


def _install_random_state() -> None:
    import megatron.core.tensor_parallel.random as mcore_random

    def get_state(device: int | str | torch.device = "cuda") -> Tensor:
        return torch.get_rng_state()

    def set_state(new_state: Tensor, device: int | str | torch.device = "cuda") -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    # The generator tracker and activation recompute save and restore "the CUDA generator":
    # tensor_parallel/random.py:55,235-240,447.
    torch.cuda.manual_seed = manual_seed
    torch.cuda.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state
    torch.cuda.random.get_rng_state = get_state
    # tensor_parallel/random.py:41,72 reach for CUDA's generators directly, with options that only CUDA graphs need.
    mcore_random._get_cuda_rng_state = lambda *_args, **_options: get_state()
    mcore_random._set_cuda_rng_state = lambda new_state, *_args, **_options: set_state(new_state)


def define_router_gemm() -> None:
    """Let routers multiply by torch's product where Transformer Engine does not import, on CUDA too."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    # moe_utils.py:1192 tests `te_general_gemm is not None`, but :34 defines it only when Transformer Engine imports.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _install_plain_router_bias() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    # router.py:532 compiles the count of tokens per expert with torch.compile, which on a CPU needs a C++ compiler.
    count = TopKRouter._apply_expert_bias
    TopKRouter._apply_expert_bias = getattr(count, "_torchdynamo_orig_callable", count)


def _install_latent_attention() -> None:
    import megatron.core.transformer.multi_latent_attention as latent
    from megatron.core.post_training.modelopt.layers import Linear

    # multi_latent_attention.py:60 believes that Transformer Engine is there when its own wrappers import, which are
    # None without it; :185 then fails.
    latent.HAVE_TE = latent.HAVE_TE and isinstance(latent.TELinear, type)
    # Without Transformer Engine 0.19 does not import its own `Linear` (:74), which it accepts as a down-projection.
    latent.Linear = Linear


def _install_dispatcher() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    def splits_to_numpy(self: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                value = getattr(self, name)
                if torch.is_tensor(value):
                    setattr(self, name, value.cpu().numpy())
        return tokens_per_expert

    # token_dispatcher.py:444 creates a CUDA stream unless one is there; :862 copies the splits to the host on it.
    Dispatcher.cuda_dtoh_stream = _NoStream()
    Dispatcher._maybe_dtoh_and_synchronize = splits_to_numpy


def _install_tensor_type() -> None:
    plain_type: Callable[..., Any] = torch.Tensor.type

    def tensor_type(self: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain_type(self, dtype, **kwargs)
        name: str = plain_type(self)
        if "megatron/core/optimizer" in sys._getframe(1).f_code.co_filename:
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    # The optimizer sorts parameters by comparing `param.type()` with 'torch.cuda.FloatTensor' and its kin:
    # optimizer/optimizer.py:671,690; optimizer/distrib_optimizer.py:361,420; optimizer/clip_grads.py:167. Other callers
    # still get the true name.
    torch.Tensor.type = tensor_type  # type: ignore[method-assign, assignment]


LITERALS = (
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rope_utils",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "transformer.moe.moe_utils",
    "transformer.utils",
    "utils",
)
"""Modules of `megatron.core` that write `device='cuda'` or `pin_memory=True`."""


def _install_literals() -> None:
    # distributed/param_and_grad_buffer.py:768; models/common/embeddings/rope_utils.py:63; optimizer/clip_grads.py:90;
    # optimizer/grad_scaler.py:15,88; optimizer/optimizer.py:473,907; pipeline_parallel/schedules.py:596,983,2138;
    # transformer/moe/moe_utils.py:998; transformer/utils.py:35; utils.py:1207. Only these modules get another `torch`:
    # a TorchFunctionMode would see every call of every module, and cost as much as the calls of a small model.
    for name in LITERALS:
        import_module(f"megatron.core.{name}").torch = _TorchOnCpu("torch")  # type: ignore[attr-defined]


class _TorchOnCpu(ModuleType):
    """`torch` for a module that names CUDA in calls that make tensors."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in ("empty", "full", "ones", "tensor", "zeros"):
            value = _on_cpu(value)
        setattr(self, name, value)
        return value


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if torch.device(kwargs.get("device") or _CPU).type == "cuda":
            kwargs["device"] = _CPU
        return make(*args, **kwargs | ({"pin_memory": False} if "pin_memory" in kwargs else {}))

    return made
