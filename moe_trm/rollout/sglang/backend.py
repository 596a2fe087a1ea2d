"""SGLang as an engine with servers: what the rest of the harness asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_trm.config.engines import DEFAULT, ENGINES
from moe_trm.errors import EngineLost
from moe_trm.models.hf_config import read_hf_config
from moe_trm.rollout.servers.backend import ServerBackend
from moe_trm.rollout.servers.http import EngineHttp, parsed
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.answers import SglangAnswers
from moe_trm.rollout.sglang.client import SglangClient
from moe_trm.rollout.sglang.given_tokens import cached_tokens, greedy_tokens, scores_of
from moe_trm.rollout.sglang.hidden_states import FLAG, read_states
from moe_trm.rollout.sglang.launch import launched
from moe_trm.rollout.sglang.served_differences import remark_on_epsilons
from moe_trm.rollout.sglang.served_shape import unpredicted
from moe_trm.runtime.patience import patient

IDLE_S = 60.0
"""Longest wait for a server whose answers have all come to say that it is idle: a health check may still run."""

ARGUMENT_CHECK = """
import json, sys
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args
if sys.argv[-2:] == ["--device", "cuda"]:  # also where there is none
    override_platform(is_cuda=True).install()
arguments = prepare_server_args(sys.argv[1:])
arguments.resolve_once()
arguments.check_server_args()
plain = (str, int, float, bool, type(None))
print("\\n" + json.dumps({name: value for name, value in arguments.resolved_dict().items() if type(value) in plain}))
"""


class SglangBackend(SglangAnswers, ServerBackend):
    """Stock SGLang servers over HTTP."""

    traits = ENGINES[DEFAULT]
    alive_path = "/model_info"
    answers = "moe_trm.rollout.sglang.answers:SglangAnswers"
    labels_runs = True
    argument_check = ARGUMENT_CHECK
    launch = staticmethod(launched)
    client = staticmethod(SglangClient)
    decoded, prefilled, cached = staticmethod(greedy_tokens), staticmethod(scores_of), staticmethod(cached_tokens)
    hidden_states = staticmethod(read_states)

    def unpredicted(self, settings: Mapping[str, Any], model: ServedModel) -> str:
        """See `served_shape.unpredicted`."""
        return unpredicted(settings, model)

    def remark(self, checkpoint: Path) -> str:
        """See `remark_on_epsilons`."""
        return remark_on_epsilons(read_hf_config(checkpoint))

    async def version(self, http: EngineHttp, *, timeout_s: float) -> str:
        """`weight_version`; `default` of a server that was given none."""
        content = await http.request("GET", "/model_info", timeout_s=timeout_s, attempts=1)
        info = parsed(content, http.url)
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineLost("something else than SGLang answers here", where=http.url, got=content[:200])
        return str(info["weight_version"])

    async def abort(self, http: EngineHttp) -> None:
        """`/abort_request` for all."""
        await http.request("POST", "/abort_request", {"rid": "", "abort_all": True})

    def refuses_request(self, status: int, text: str) -> bool:
        """See `ServerBackend`. Where masks are asked for, SGLang 0.5.23 answers 500 to what is too long."""
        return super().refuses_request(status, text) or "context length" in text

    async def release_memory(self, http: EngineHttp, tags: Sequence[str]) -> None:
        """`/release_memory_occupation`, when `/flush_cache` says that nothing runs or waits.

        SGLang's scheduler dies of a release while anything runs. In the pause that a push ends, a request from
        elsewhere waits at the door. A release is not asked for twice, and neither is a return: of the second, the
        scheduler dies too.
        """
        idle_s = patient(IDLE_S)
        await http.request("POST", f"/flush_cache?timeout={idle_s:.0f}", {}, timeout_s=2 * idle_s)
        await http.post("/pause_generation", {"mode": "retract"})
        await http.request("POST", "/release_memory_occupation", {"tags": [*tags]}, attempts=1)

    async def flush(self, http: EngineHttp) -> bool:
        """`/flush_cache`, which a server refuses while anything runs."""
        await http.request("POST", "/flush_cache", {})
        return True

    async def resume_memory(self, http: EngineHttp, tag: str) -> None:
        """`/resume_memory_occupation`."""
        await http.request("POST", "/resume_memory_occupation", {"tags": [tag]}, attempts=1)

    def writing_states(self, folder: Path) -> Sequence[str]:
        """See `hidden_states.FLAG`."""
        return FLAG, str(folder)

    async def tokenized(self, http: EngineHttp, text: str) -> tuple[int, ...] | None:
        """By `/tokenize`."""
        answer = await http.post("/tokenize", {"model": "default", "prompt": text, "add_special_tokens": False})
        return tuple(answer["tokens"])

    async def model_folder(self, http: EngineHttp) -> Path | None:
        """`model_path` of `/model_info`."""
        return Path(str((await http.get("/model_info")).get("model_path", "")))
