"""Rules between settings that only vLLM knows: wishes that it cannot fulfil, and arguments that would spoil a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from moe_trm.config.problems import Problem
from moe_trm.config.schema import Config

KEY = "rollout.server.extra_args"
OURS: Mapping[str, str] = MappingProxyType(
    {
        "--model": "model.checkpoint",
        "--host": "rollout.server.host",
        "--port": "rollout.server.port",
        "--dtype": "rollout.server.dtype",
        "--tensor-parallel-size": "rollout.server.tensor_parallel",
        "-tp": "rollout.server.tensor_parallel",
        "--num-gpu-blocks-override": "rollout.server.max_total_tokens",
        "--max-num-seqs": "rollout.server.max_running_requests",
        "--max-num-batched-tokens": "rollout.server.chunked_prefill_size",
        "--seed": "seed",
        "--api-key": "rollout.api_key",
        "--logprobs-mode": "nothing: log-probs are those of the distribution that was sampled from",
        "--middleware": "nothing: a second one would stand before the key",
        "--worker-extension-cls": "nothing: pushes need the one of packages/vllm_worker",
        "--generation-config": "nothing: the policy that samples is the one that the run records",
        "--api-server-count": "nothing: one process knows which weights answer",
    }
)
"""Arguments that the launcher sets, with the setting to use in their place."""


def refusals(config: Config) -> Iterator[Problem]:
    """Settings with which a run on vLLM would not have what it relies on."""
    rollout = config.rollout
    if rollout.truncates and not config.keeps_masks:
        yield Problem(
            "sampling_mask.mode",
            "vLLM's log-probs are over the kept ids alone, and without masks the learner would score all ids",
            got="off with rollout.top_p, top_k or min_p",
            expected="keep, or no truncation",
        )
    if config.keeps_masks and config.sampling_mask.violation != "reject":
        yield Problem(
            "sampling_mask.violation",
            "vLLM does not tell the log-prob of an id outside the kept ids, so a mask cannot be mended",
            got=config.sampling_mask.violation,
            expected="reject",
        )
    for key, set_to, why in (
        ("rollout.quantization", rollout.quantization, "pushes to vLLM are plain tensors"),
        ("rollout.router", rollout.router, "vLLM's servers are asked by the run itself"),
        ("rollout.server.fp32_head", rollout.server.fp32_head and rollout.starts_server, "vLLM has no such switch"),
    ):
        if set_to:
            yield Problem(key, why, got=str(set_to).lower(), expected="none" if isinstance(set_to, str) else "false")
    if rollout.starts_server:
        for argument in rollout.server.extra_args:
            name = argument.partition("=")[0]
            if name in OURS:
                yield Problem(KEY, "the launcher sets this argument", got=argument, expected=f"{OURS[name]}")
