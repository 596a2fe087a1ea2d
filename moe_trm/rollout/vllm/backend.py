"""vLLM as an engine with servers: what the rest of the harness asks of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_trm.config.engines import ENGINES
from moe_trm.errors import CheckpointError, ConfigError, EngineLost
from moe_trm.models.hf_config import read_hf_config, read_whole_config, reads_images
from moe_trm.models.quantisation import quantisation_of
from moe_trm.rollout.servers.backend import Launch, Served, ServerBackend
from moe_trm.rollout.servers.http import EngineHttp, parsed
from moe_trm.rollout.servers.indexers import check_indexer
from moe_trm.rollout.servers.process import on_cpu
from moe_trm.rollout.vllm.answers import VllmAnswers
from moe_trm.rollout.vllm.client import WEIGHTS, VllmClient
from moe_trm.rollout.vllm.given_tokens import greedy_tokens, scores_of
from moe_trm.rollout.vllm.launch import interpreter, launch_command, server_environment
from moe_trm.rollout.vllm.request import LISTED_IDS
from moe_trm.runtime.addresses import is_loopback

GRACE_S = 3.0
"""Time in which a server on GPUs may end by itself."""


class VllmBackend(VllmAnswers, ServerBackend):
    """vLLM's API server with packages/vllm_worker, over HTTP."""

    traits = ENGINES["vllm"]
    answers = "moe_trm.rollout.vllm.answers:VllmAnswers"
    labels_runs = True
    client = staticmethod(VllmClient)
    decoded, prefilled = staticmethod(greedy_tokens), staticmethod(scores_of)

    def check(self, served: Served) -> None:
        """Refuse indexers, checkpoints that are quantised or read images, masks with more kept ids than log-probs tell.

        Also a cache smaller than the longest sequence, and a start without vLLM. Raises `CheckpointError`,
        `ConfigError`.
        """
        hf, where = read_hf_config(served.model.checkpoint), f"{served.model.checkpoint}/config.json"
        check_indexer(hf, where)
        if served.rollout.starts_server:
            interpreter()
        if reads_images(whole := read_whole_config(served.model.checkpoint)):
            raise CheckpointError(
                "vLLM is started on a whole checkpoint here, and pushes have the names of its text alone",
                where=where,
                got=whole["architectures"][0],
                expected=hf["architectures"][0],
                fix="Train it with rollout.engine=sglang, which is started on the text.",
            )
        if quantisation_of(hf, where) is not None:
            raise CheckpointError(
                "pushes to vLLM are plain tensors, and this checkpoint's are quantised",
                where=where,
                got=hf["quantization_config"].get("quant_method"),
                expected="none",
                fix="Train it with rollout.engine=sglang, or from a dequantised checkpoint.",
            )
        server, longest = served.rollout.server, int(hf["max_position_embeddings"])
        shortened = any(argument.startswith("--max-model-len") for argument in server.extra_args)
        if served.rollout.starts_server and server.max_total_tokens < longest and not shortened:
            raise ConfigError(
                "vLLM does not start with a cache that is smaller than the longest sequence of the model",
                where="config key rollout.server.max_total_tokens",
                got=server.max_total_tokens,
                expected=f"at least {longest}, max_position_embeddings of {where}",
                fix='Or allow shorter sequences only: rollout.server.extra_args=["--max-model-len=N"].',
            )
        kept = served.rollout.top_k or int(hf["vocab_size"])
        if served.masks and kept > LISTED_IDS:
            raise ConfigError(
                "vLLM has no sampling masks here, and tells the kept ids only where they are few",
                where="config key rollout.top_k",
                got=f"{kept} ids with sampling_mask.mode=keep",
                expected=f"at most {LISTED_IDS}",
                fix="Set rollout.top_k, or truncate nothing: rollout.top_p=1 and sampling_mask.mode=off.",
            )

    @contextmanager
    def launch(self, served: Served, port: int, api_key: str, folder: Path) -> Iterator[Launch]:
        """`python -m vllm.entrypoints.openai.api_server`, of vLLM's own environment."""
        server, checkpoint = served.rollout.server, Path(served.model.checkpoint).resolve()
        cpu, alone = on_cpu(server), is_loopback(server.host)
        command = launch_command(server, checkpoint, port, seed=served.seed, routes=served.routes, cpu=cpu)
        environment = server_environment(os.environ, api_key, folder, cpu=cpu, alone=alone)
        yield Launch(command, environment, 0.0 if cpu else GRACE_S)

    async def version(self, http: EngineHttp, *, timeout_s: float) -> str:
        """The label of the last push; `none` before the first."""
        content = await http.request("GET", WEIGHTS, timeout_s=timeout_s, attempts=1)
        told = parsed(content, http.url)
        if not isinstance(told, dict) or "version" not in told:
            raise EngineLost("something else than vLLM answers here", where=http.url, got=content[:200])
        return str(told["version"])

    async def abort(self, http: EngineHttp) -> None:
        """For all."""
        await http.post("/moe_trm/abort", {})

    async def tokenized(self, http: EngineHttp, text: str) -> tuple[int, ...] | None:
        """By `/tokenize`."""
        return tuple((await http.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"])

    async def model_folder(self, http: EngineHttp) -> Path | None:
        """The folder that it was started with."""
        return Path(str((await http.get(WEIGHTS))["model"]))
