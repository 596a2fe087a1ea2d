"""The environment of a rollout server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from moe_trm.rollout.credentials import without_key
from moe_trm.runtime.gloo import LOOPBACK


def child_environment(
    parent: Mapping[str, str],
    cpu: bool,
    scratch: Path,
    *,
    alone: bool,
    dtype: str,
    exact: bool = False,
    num_ranks: int = 1,
) -> dict[str, str]:
    """The server's environment.

    `scratch`: for the sockets and files that SGLang makes and leaves. `alone`: all of its processes are on this
    machine, and no other machine reaches it. `dtype`: of its arithmetic, and of the tokens that the convolution of the
    gated delta rule keeps, which SGLang would round to bfloat16 in every dtype.

    On CPU: SGLang's own CPU switch; one quiet thread, since engine and learner share the cores; no torch.compile, which
    wants triton and a C++ compiler. `exact`: sums in a fixed order, by packages/sglang_cpu.
    """
    # What is compiled is kept for the next start, where no other user puts code.
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(Path.home() / ".cache" / "torchinductor")}
    child = {**(LOOPBACK if alone else {}), **compiled, **without_key(parent), "TMPDIR": str(scratch)}
    # Of a rank that starts a server: with torchrun's the server would look for the ranks' store, and wait.
    child = {name: value for name, value in child.items() if not name.startswith("TORCHELASTIC_")}
    child.setdefault("SGLANG_MAMBA_CONV_DTYPE", dtype)
    if cpu:
        child |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        child["TORCHDYNAMO_DISABLE"] = "1"
        # Calls of torch without the bookkeeping of autograd, by SGLang's own switch.
        child["SGLANG_ENABLE_TORCH_INFERENCE_MODE"] = "1"
        # Log-probs of given tokens by the log-softmax of decoding, by SGLang's own switch.
        if num_ranks > 1:
            # SGLang gives each rank a NUMA node of its own, and has no more ranks than there are. Here they share all.
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            child["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * num_ranks)
        child |= {"MOE_TRM_EXACT": "1", "SGLANG_ENABLE_FAST_INPUT_LOGPROBS": "0"} if exact else {}
    return child
