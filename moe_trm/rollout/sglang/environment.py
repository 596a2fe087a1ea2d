"""The environment of a rollout server."""

from __future__ import annotations

from collections.abc import Mapping

from moe_trm.rollout.credentials import without_key
from moe_trm.runtime.gloo import LOOPBACK


def child_environment(parent: Mapping[str, str], cpu: bool, *, alone: bool) -> dict[str, str]:
    """The server's environment.

    `alone`: all of its processes are on this machine, and nobody else's reaches it.

    On CPU: SGLang's own CPU switch; one quiet thread, since engine and learner share the cores; no torch.compile, which
    wants triton and a C++ compiler.
    """
    child = {**(LOOPBACK if alone else {}), **without_key(parent)}
    if cpu:
        child |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        child["TORCHDYNAMO_DISABLE"] = "1"
        # Calls of torch without the bookkeeping of autograd, by SGLang's own switch.
        child["SGLANG_ENABLE_TORCH_INFERENCE_MODE"] = "1"
    return child
