"""The rollout engine that is a real SGLang server, driven over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, EngineError, RecordRejected
from moe_trm.rollout.conversation import Conversation, naming, parse_answer
from moe_trm.rollout.http import EngineHttp, HttpStatusError
from moe_trm.rollout.parse import SampledTurn, Wanted, decode_answer, parse_turn
from moe_trm.rollout.served import ServedModel
from moe_trm.sync.api import check_can_verify
from moe_trm.sync.disk import load_from_disk
from moe_trm.sync.distributed import DistributedPush
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.types import Prompt, RolloutRecord, SamplingParams

BAD_REQUEST, SERVICE_UNAVAILABLE = 400, 503

POLL_S = 0.5
"""Pause between two health checks of a server that is still starting."""


class SglangEngine:
    """`RolloutEngine` over HTTP: one request per sample, many in flight.

    Args:
        config: `model`, `rollout`, `sampling_mask`, `replay`, `probe` and `sync` are read, here only.
        api_key: the server's bearer token.

    Raises:
        CheckpointError: `model.checkpoint` cannot be read, or is a dense model while routes are wanted.
    """

    def __init__(self, config: Config, api_key: str | None) -> None:
        rollout, server = config.rollout, config.rollout.server
        self._model = ServedModel.from_checkpoint(Path(config.model.checkpoint))
        self._wanted = Wanted(
            routes=config.replay.mode in ("R3", "auto") or config.probe.every > 0,
            mask=config.sampling_mask.mode == "keep",
            violation=config.sampling_mask.violation,
            missing=config.replay.missing,
        )
        if self._wanted.routes and not self._model.moe_layer_ids:
            raise CheckpointError(
                "a dense model has no routes to record",
                where=config.model.checkpoint,
                got=self._model.architecture,
                expected="a Mixture-of-Experts model",
                fix="Set replay.mode=none and probe.every=0, or choose another checkpoint.",
            )
        self._temperature = rollout.temperature
        self._dtype, self._verify = server.dtype, config.sync.verify
        self._startup_timeout_s = server.startup_timeout_s
        self._http = EngineHttp(
            rollout.url or f"http://{server.host}:{server.port}",
            api_key,
            timeout_s=rollout.timeout_s,
            max_attempts=rollout.max_attempts,
        )
        self._broadcast: DistributedPush | None = None
        self._device = "cpu"
        self._slots = asyncio.Semaphore(rollout.concurrency)

    async def start(self) -> None:
        """Wait until the server generates, and check that it serves this checkpoint with what is wanted switched on. Raises `EngineError`."""
        await self._wait_until_healthy()
        served = await self._http.get("/model_info")
        architectures = served.get("architectures") or []
        if self._model.architecture not in architectures:
            raise self._mismatch("architecture", architectures, self._model.architecture)
        server = await self._http.get("/server_info")
        if self._wanted.routes and not server.get("enable_return_routed_experts"):
            raise EngineError(
                "the rollout server does not record routes",
                where=self._http.url,
                got="enable_return_routed_experts is off",
                expected="on",
                fix="Start it with --enable-return-routed-experts, as launch.rollout does.",
            )
        if server.get("dtype") not in (self._dtype, "auto"):
            raise self._mismatch("dtype (config key rollout.server.dtype)", server.get("dtype"), self._dtype)
        if self._verify:
            self._device = check_can_verify(server)
        await self._probe_model()
        await self._probe_temperature()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        """Sample one continuation. Raises `RecordRejected` for an answer that violates an invariant, `EngineError` for none."""
        conversation = Conversation(prompt)
        with naming(sample_id):
            conversation.add(await self.turn(prompt.token_ids, params))
            return conversation.record(
                sample_id=sample_id, group_id=group_id, keep_changed=self._wanted.missing == "native"
            )

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        """Sample what comes after `context`; raises as `generate` does."""
        request = self.generate_request(context, params, bare=bare)
        if start and "return_routed_experts" in request:
            request["routed_experts_start_len"] = start
        async with self._slots:
            body = await self._http.request("POST", "/generate", request)
        wanted = Wanted(routes=False, mask=False) if bare else self._wanted
        return parse_turn(body, context, self._model, wanted, start=start)

    async def generate_greedy(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[tuple[int, ...]]:
        """Greedy continuations without the stop token; () for those that did not stop within `max_new_tokens`."""
        return list(await asyncio.gather(*(self._greedy(prompt, params) for prompt in prompts)))

    async def load_weights(self, push: WeightPush) -> None:
        """Make the server load `push` from its folder and prove it. Raises `SyncError`."""
        await load_from_disk(self._http, push, dtype=self._dtype, verify=self._verify, device=self._device)

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        """Lead the server through a broadcast from the learner ranks and witness it. Raises `SyncError`."""
        if self._broadcast is None:
            self._broadcast = DistributedPush(self._http, device=self._device)
            await self._broadcast.join([share.meeting for share in shares])
        await self._broadcast.load(version, shares, dtype=self._dtype, verify=self._verify)

    async def close(self) -> None:
        """Release connections and groups."""
        if self._broadcast is not None:
            await self._broadcast.close()
        await self._http.close()

    def generate_request(
        self, token_ids: Sequence[int], params: SamplingParams, *, bare: bool = False
    ) -> dict[str, object]:
        """The JSON body of one sample, `bare`: without routes and masks. The server refuses masks together with `n > 1`, hence one request each."""
        request: dict[str, object] = {
            "input_ids": list(token_ids),
            "sampling_params": {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "min_p": params.min_p,
                "max_new_tokens": params.max_new_tokens,
                "stop_token_ids": list(params.stop_token_ids),
            },
            "return_logprob": True,
        }
        if bare:
            return request
        if self._wanted.routes:
            request["return_routed_experts"] = True
        if self._wanted.mask:
            request |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
            if self._wanted.violation == "union":
                request["top_logprobs_num"] = 1
        return request

    async def _greedy(self, prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
        request = {
            "input_ids": list(prompt.token_ids),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": params.max_new_tokens,
                "stop_token_ids": list(params.stop_token_ids),
            },
        }
        async with self._slots:
            body = await self._http.request("POST", "/generate", request)
        try:
            answer = decode_answer(body)
        except RecordRejected as rejection:
            raise EngineError(
                rejection.what, where=self._http.url, got=rejection.got, expected=rejection.expected
            ) from rejection
        reason = answer.meta_info.finish_reason
        if reason is None or reason.type != "stop" or not answer.output_ids:
            return ()
        stopped = answer.output_ids[-1] in params.stop_token_ids
        return tuple(answer.output_ids[:-1] if stopped else answer.output_ids)

    async def _wait_until_healthy(self) -> None:
        """A server that refuses connections fails after the usual attempts; one that answers 503 is loading and gets `startup_timeout_s`."""
        deadline = asyncio.get_running_loop().time() + self._startup_timeout_s
        while True:
            try:
                await self._http.request("GET", "/health")
            except HttpStatusError as error:
                if error.status != SERVICE_UNAVAILABLE or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(POLL_S)
            else:
                return

    async def _probe_model(self) -> None:
        """Sample one token: its routes show layers and experts per token. The log-prob of the last id exists, that of the next does not."""
        vocab_size = self._model.vocab_size
        probe = Prompt("probe", (0,))
        request = self.generate_request(probe.token_ids, SamplingParams(top_k=1, max_new_tokens=1))
        if not await self._has_token(request, vocab_size - 1) or await self._has_token(request, vocab_size):
            raise self._mismatch("vocabulary size", "another size", vocab_size)
        body = await self._http.request("POST", "/generate", request)
        try:
            parse_answer(body, probe, self._model, self._wanted, sample_id=0, group_id=0)
        except RecordRejected as rejection:
            # Before the first push the server's weights carry no version number.
            if rejection.reason != "version_unknown":
                raise self._mismatch(
                    f"answer to a probe ({rejection.reason})", rejection.got, rejection.expected
                ) from rejection

    async def _probe_temperature(self) -> None:
        """Log-probs must be those of the tempered distribution; a server can be told to report them at temperature 1 instead.

        The distance of the first and the last of a few likeliest ids shrinks by the temperature, or does not.
        """
        if self._temperature == 1.0:
            return
        plain, tempered = await self._spread(1.0), await self._spread(self._temperature)
        if abs(tempered - plain) < abs(tempered - plain / self._temperature):
            raise EngineError(
                "the rollout server reports log-probs at temperature 1, but samples are scored at the rollout's temperature",
                where=self._http.url,
                got=f"a spread of {tempered:.4f} nats at temperature {self._temperature}, {plain:.4f} at 1",
                expected=f"{plain / self._temperature:.4f}",
                fix="Start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or set rollout.temperature=1.",
            )

    async def _spread(self, temperature: float) -> float:
        num_ids = min(8, self._model.vocab_size)
        params = SamplingParams(temperature=temperature, top_k=num_ids, max_new_tokens=1)
        body = await self._http.request(
            "POST", "/generate", self.generate_request(range(num_ids), params) | {"top_logprobs_num": num_ids}
        )
        [top] = decode_answer(body).meta_info.output_top_logprobs or [None]
        values = [value for value, *_ in top or () if value is not None]
        if len(values) != num_ids:
            raise self._mismatch("answer to a probe (output_top_logprobs)", len(values), num_ids)
        return max(values) - min(values)

    async def _has_token(self, request: dict[str, object], token_id: int) -> bool:
        try:
            await self._http.request("POST", "/generate", request | {"token_ids_logprob": [token_id]})
        except HttpStatusError as error:
            if error.status != BAD_REQUEST:
                raise
            return False
        return True

    def _mismatch(self, what: str, got: object, expected: object) -> EngineError:
        return EngineError(
            f"the rollout server does not serve the configured model: {what} differs",
            where=self._http.url,
            got=got,
            expected=expected,
            fix="Start the server from the same configuration: `python -m launch.rollout CONFIG`.",
        )
