"""The command line of a stock SGLang server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_trm.errors import ConfigError
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.registry import find_family
from moe_trm.rollout.servers.backend import Launch, Served
from moe_trm.rollout.servers.process import on_cpu
from moe_trm.rollout.sglang.environment import child_environment
from moe_trm.rollout.sglang.served_differences import check_cuda_kernels, config_overrides
from moe_trm.rollout.sglang.start_folder import RANDOM_WEIGHTS, folder_to_serve
from moe_trm.runtime.addresses import is_loopback
from moe_trm.runtime.private import write_private
from moe_trm.runtime.python import run_module

LOAD_FILES = "sglang_loads_*.shm"
"""Counters of a server's schedulers, which SGLang never removes."""
GRACE_S = 3.0
"""Time in which a server on GPUs may end by itself."""


@contextmanager
def launched(served: Served, port: int, api_key: str, folder: Path) -> Iterator[Launch]:
    """See `ServerBackend.launch`."""
    settings, checkpoint = served.rollout.server, Path(served.model.checkpoint).resolve()
    served_folder = checkpoint if served.pictures else folder_to_serve(checkpoint, folder, settings.dtype)
    # A file only this user can read: arguments are visible to everyone on the machine.
    secret = folder / "api-key.yaml"
    write_private(secret, f'api-key: "{api_key}"\n'.encode())
    command = launch_command(served, served_folder, port, config_file=str(secret))
    command += RANDOM_WEIGHTS if served_folder != checkpoint or settings.random_weights else ()
    cpu = on_cpu(settings)
    on_one_host = is_loopback(settings.host) and not {"--nnodes", "--dist-init-addr"} & {*settings.extra_args}
    dtype, exact = settings.dtype, served.exact
    num_ranks = settings.tensor_parallel
    environment = child_environment(
        os.environ, cpu, folder, alone=on_one_host, dtype=dtype, exact=exact, num_ranks=num_ranks
    )
    try:
        # SGLang looks at SIGTERM every five seconds, and on a CPU it has nothing to give back.
        yield Launch(command, environment, 0.0 if cpu else GRACE_S, LOAD_FILES)
    finally:
        secret.unlink(missing_ok=True)


def launch_command(served: Served, checkpoint: Path, port: int, config_file: str) -> list[str]:
    """The complete command line of the server. Raises `ConfigError` for what its device cannot do."""
    settings = served.rollout.server
    if settings.deterministic and on_cpu(settings):
        raise ConfigError(
            "SGLang's deterministic kernels need CUDA",
            where="rollout.server.deterministic",
            got="true on a CPU",
            expected="false, or a CUDA device",
            fix="set rollout.server.deterministic=false; rollout.server.dtype=float32 leaves the least rounding here",
        )
    hf = read_hf_config(checkpoint)
    repeats = settings.deterministic or (served.exact and not on_cpu(settings))
    if not on_cpu(settings):
        check_cuda_kernels(hf, settings.dtype, f"{checkpoint}/config.json", deterministic=repeats)
    options = {
        "--config": config_file,
        "--model-path": str(checkpoint),
        "--host": settings.host,
        "--port": port,
        "--dtype": settings.dtype,
        "--tp-size": settings.tensor_parallel,
        "--max-total-tokens": settings.max_total_tokens,
        "--max-running-requests": settings.max_running_requests,
        "--chunked-prefill-size": settings.chunked_prefill_size,
        "--random-seed": served.seed,
        # A line for every answer takes the server longer than to read its request.
        "--log-level-http": "warning",
    }
    if overrides := config_overrides(hf):
        options["--json-model-override-args"] = json.dumps(overrides)
    flags = ["--enable-return-routed-experts"]
    flags += ["--enable-fp32-lm-head"] if settings.fp32_head else []
    flags += ["--enable-deterministic-inference"] if repeats else []
    if on_cpu(settings):
        options |= {
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--cuda-graph-backend-decode": "disabled",
            "--cuda-graph-backend-prefill": "disabled",
            # The KV cache is sized by --max-total-tokens. SGLang refuses to start if other processes take this fraction
            # of the machine's free memory while it loads.
            "--mem-fraction-static": 0.9,
            # A row for each running request, one while it is prefilled and two that the prefix cache keeps. The default
            # is a share of the machine's memory. Only models with states read it.
            "--max-mamba-cache-size": 4 * settings.max_running_requests,
        }
        family = find_family(hf)
        if family is not None and family.sinks:
            # `torch_native` has no sinks; without triton its name stands for the attention of packages/sglang_cpu,
            # which wants one cache for all layers.
            options["--attention-backend"] = "triton"
            flags.append("--disable-hybrid-swa-memory")
        # Without --sleep-on-idle the waiting scheduler takes a whole core from the learner.
        # Overlap hides work from a device. Here it would compute one more token for every answer that is finished.
        flags += ["--sleep-on-idle", "--skip-server-warmup", "--disable-overlap-schedule"]
    elif served.rollout.colocate:
        flags += ["--enable-memory-saver"]
    if served.rollout.quantization is not None:
        options["--quantization"] = served.rollout.quantization
    arguments = [str(part) for pair in options.items() for part in pair]
    return run_module("sglang.launch_server", *arguments, *flags, *settings.extra_args)
