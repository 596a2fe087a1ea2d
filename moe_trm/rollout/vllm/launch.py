"""The process of a vLLM server: its interpreter, command line and environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from moe_trm.config.schema import ServerConfig
from moe_trm.errors import ConfigError
from moe_trm.models.hf_config import read_hf_config
from moe_trm.rollout.credentials import API_KEY_VARIABLE, without_key
from moe_trm.rollout.vllm.request import LISTED_IDS
from moe_trm.runtime.gloo import LOOPBACK
from moe_trm.runtime.python import run_module

LOADER, DOOR = "moe_trm_vllm_worker.loader.WeightLoader", "moe_trm_vllm_worker.door.Door"
BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache."""


def interpreter(prefix: str = sys.prefix) -> Path:
    """Python of the environment that has vLLM: this one, else that beside it, `.venv-vllm` of `.venv`.

    vLLM wants other versions than SGLang of what both are built on. Raises `ConfigError` where neither has it.
    """
    if find_spec("vllm") is not None and find_spec("moe_trm_vllm_worker") is not None:
        return Path(sys.executable)
    beside = Path(prefix).with_name(Path(prefix).name + "-vllm")
    if any(beside.glob("lib/python*/site-packages/moe_trm_vllm_worker")):
        return beside / "bin" / "python"
    raise ConfigError(
        "vLLM is not installed for this run",
        where="config key rollout.engine",
        got=f"no vLLM with packages/vllm_worker in {prefix} or {beside}",
        expected="one of the two",
        fix="`make vllm-env` makes the second. Or set rollout.url to a server that runs elsewhere (docs/engines.md).",
    )


def server_environment(
    parent: Mapping[str, str], api_key: str, scratch: Path, *, cpu: bool, alone: bool
) -> dict[str, str]:
    """The server's environment, with its key. `scratch`, `alone`: as of `moe_trm.rollout.sglang.environment`."""
    environment = {
        **({**LOOPBACK, "VLLM_HOST_IP": "127.0.0.1"} if alone else {}),
        **without_key(parent),
        API_KEY_VARIABLE: api_key,
        "TMPDIR": str(scratch),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
    }
    if cpu:
        # One quiet thread: engine and learner share the cores. The blocks of the KV cache are counted, not measured.
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return environment


def launch_command(
    settings: ServerConfig, checkpoint: Path, port: int, *, seed: int, routes: bool, cpu: bool
) -> list[str]:
    """The command line; `vllm serve` finds no metadata where the wheel has another name."""
    hf = read_hf_config(checkpoint)
    options: dict[str, object] = {
        "--model": checkpoint,
        "--host": settings.host,
        "--port": port,
        "--dtype": settings.dtype,
        "--tensor-parallel-size": settings.tensor_parallel,
        "--block-size": BLOCK_TOKENS,
        # One more: vLLM keeps an empty block.
        "--num-gpu-blocks-override": 1 - (-settings.max_total_tokens // BLOCK_TOKENS),
        "--max-num-seqs": settings.max_running_requests,
        "--seed": seed,
        "--max-logprobs": min(LISTED_IDS, int(hf["vocab_size"])),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--worker-extension-cls": LOADER,
        "--middleware": DOOR,
        "--uvicorn-log-level": "warning",
    }
    flags = ["--enable-scale-out"]
    flags += ["--enable-return-routed-experts"] if routes else []
    flags += ["--load-format", "dummy"] if settings.random_weights else []
    if cpu:
        # A seed with a part of a prompt ends the engine.
        options["--max-num-batched-tokens"] = max(settings.chunked_prefill_size, int(hf["max_position_embeddings"]))
        flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
    else:
        options["--max-num-batched-tokens"] = settings.chunked_prefill_size
    arguments = [str(part) for pair in options.items() for part in pair]
    arguments += [*flags, *settings.extra_args]
    return run_module("vllm.entrypoints.openai.api_server", *arguments, interpreter=str(interpreter()))
