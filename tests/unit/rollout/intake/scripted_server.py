"""A stand-in of an SGLang server whose answer follows from the prompt alone, so that every run gets the same one."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from aiohttp import web

from tests.unit.rollout.local_app import LocalApp

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 4, 2, 32
HF = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
BROKEN: dict[int, str] = {
    5: "malformed",
    6: "route_rows",
    7: "route_range",
    8: "logprob_value",
    9: "aborted",
    10: "version_missing",
    11: "mask_violation",
}
"""The fault of the answer to a prompt, by its last id."""


class ScriptedServer(LocalApp):
    """Answers requests; `free` holds answers back, and `asked` counts them by prompt."""

    def __init__(self) -> None:
        self.version, self.asked = "0", Counter[tuple[int, ...]]()
        self.free = asyncio.Event()
        self.free.set()
        self.arrived = asyncio.Event()
        self.refuses = 0
        """Requests that are answered with HTTP 500 before the others."""

    def routes(self) -> Sequence[web.RouteDef]:
        paths = ("pause_generation", "update_weights_from_disk", "continue_generation", "abort_request")
        return [
            web.post("/generate", self._generate),
            *(web.post(f"/{path}", self._post) for path in paths),
            web.get("/model_info", self._info),
            web.get("/health", self._health),
        ]

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked[tuple(body["input_ids"])] += 1
        self.arrived.set()
        if self.refuses:
            self.refuses -= 1
            return web.Response(status=500)
        version = self.version
        await self.free.wait()
        text, meta = answer(body, version)
        return web.Response(text="{]") if text == "malformed" else web.json_response(meta)

    async def _post(self, request: web.Request) -> web.Response:
        if request.path == "/update_weights_from_disk":
            self.version = (await request.json())["weight_version"]
        return web.json_response({"success": True})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, "architectures": HF["architectures"]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()


def answer(body: dict[str, Any], version: str) -> tuple[str, dict[str, Any]]:
    """The fault of the answer, if it has one, and the answer."""
    context = body["input_ids"]
    rng, wrong = np.random.default_rng(context), BROKEN.get(context[-1], "")
    sampled = int(rng.integers(2, 9))
    output = [*rng.integers(12, VOCAB, sampled - 1).tolist(), 2]
    rows = len(context) + sampled - 1 - (wrong == "route_rows")
    routes = np.argsort(rng.random((rows, LAYERS, EXPERTS)))[..., :TOP_K].astype("<i4")
    routes[-1, 0, 0] = EXPERTS if wrong == "route_range" else routes[-1, 0, 0]
    logprobs = (-rng.random(sampled)).tolist()
    if wrong == "logprob_value":
        logprobs[0] = 0.5
    kept = [sorted({token, (token + 1) % VOCAB, (token + 5) % VOCAB}) for token in output]
    if wrong == "mask_violation":
        kept[0] = sorted(set(range(3, 6)) - {output[0]})
    meta: dict[str, Any] = {
        "finish_reason": {"type": "abort" if wrong == "aborted" else "stop", "message": ""},
        "prompt_tokens": len(context),
        "num_retractions": 0,
        "weight_versions": [{"version": version, "start": 0, "end": sampled - (wrong == "version_missing")}],
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, output, strict=True)],
        "routed_experts": b64encode(routes.tobytes()).decode(),
    }
    if body.get("return_sampling_mask"):
        meta["output_token_sampling_mask"] = kept
        meta["output_token_sampling_logprobs"] = [[float(-np.log(len(ids)))] * len(ids) for ids in kept]
    return wrong, {"output_ids": output, "meta_info": meta}
