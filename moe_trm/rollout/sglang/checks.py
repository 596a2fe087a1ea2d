"""Checks that a rollout server is the configured one, made at the start of a run, before its first sample counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from moe_trm.errors import EngineError, RecordRejected
from moe_trm.rollout.servers.backend import Requirements
from moe_trm.rollout.servers.http import EngineHttp, HttpStatusError
from moe_trm.rollout.servers.question import Question, RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.rollout.sglang.api import reported_weights
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.rollout.sglang.parse import MetaInfo, decode_answer, parse_turn
from moe_trm.rollout.sglang.request import generate_request
from moe_trm.rollout.sglang.route_defects import defects_of
from moe_trm.rollout.sglang.served_shape import shape_of, unpredicted
from moe_trm.rollout.turn import naming
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from routing.sglang import PAYLOAD_BYTES, PAYLOAD_DTYPE

BAD_REQUEST = 400

log = logging.getLogger(__name__)


class ServerCheck:
    """Requirements on every server of a run."""

    def __init__(self, requirements: Requirements) -> None:
        self._model, self._requested = requirements.model, requirements.requested
        self._temperature, self._dtype, self._verify = (
            requirements.temperature,
            requirements.dtype,
            requirements.verify,
        )
        self._quantization, self._num_ranks = requirements.quantization, requirements.tensor_parallel
        self._with_random_weights = set[str]()

    async def run(self, http: EngineHttp) -> EngineShape | None:
        """Check that a server which generates serves this checkpoint with the wanted features on.

        Returns how it holds its tensors, of which checksums follow; None: its pushes are proved by use alone, or not at
        all. Raises `EngineError`, `SyncError`.
        """
        served = await http.get("/model_info")
        architectures = served.get("architectures") or []
        if self._model.architecture not in architectures:
            raise _mismatch(http, "architecture", architectures, self._model.architecture)
        server = await http.get("/server_info")
        if self._requested.routes and not server.get("enable_return_routed_experts"):
            raise EngineError(
                "the rollout server does not record routes",
                where=http.url,
                got="enable_return_routed_experts is off",
                expected="on",
                fix="Start it with --enable-return-routed-experts, as launch.rollout does.",
            )
        if self._requested.routes:
            _check_routes(http, server)
        if server.get("dtype") not in (self._dtype, "auto"):
            raise _mismatch(http, "dtype (config key rollout.server.dtype)", server.get("dtype"), self._dtype)
        if (num_ranks := server.get("tp_size", 1)) != self._num_ranks:
            raise EngineError(
                "the rollout server has another number of ranks than the configuration says",
                where=http.url,
                got=f"tp_size={num_ranks}",
                expected=f"rollout.server.tensor_parallel={self._num_ranks}",
                fix=f"Set rollout.server.tensor_parallel={num_ranks}, or start the server from this configuration.",
            )
        if self._quantization is None and server.get("quantization") not in (None, "unquant"):
            raise EngineError(
                "the rollout server holds quantised weights, and pushes are plain tensors",
                where=http.url,
                got=f"quantization={server['quantization']}",
                expected="none: pushed weights would be copied into 8-bit tensors under the scales of the old ones",
                fix="Start it from the same configuration, `python -m launch.rollout CONFIG`: it then serves the "
                "dequantised weights. Or set rollout.quantization if it rounds what it is sent.",
            )
        await self._probe_model(http)
        if server.get("load_format") == "dummy":
            self.has_random_weights(http)
        else:
            await self._probe_temperature(http)
        return await self._shape(http, server) if self._verify else None

    async def _shape(self, http: EngineHttp, server: Mapping[str, Any]) -> EngineShape | None:
        reasons = unpredicted(server, self._model)
        reported = dict(await reported_weights(http)) if not reasons else {}
        shape = shape_of(server, self._model, self._dtype, reported.get(0, {}))
        if not reasons and reported.keys() != {*range(shape.ranks.total)}:
            reasons = f"ranks {sorted(reported)} of {shape.ranks.total} say what they hold"
        if not reasons:
            return shape
        log.warning("rollout server %s: every push is proved by use, not tensor by tensor: %s", http.url, reasons)
        return None

    def has_random_weights(self, http: EngineHttp) -> None:
        """Leave to `loaded` what random weights do not show."""
        self._with_random_weights.add(http.url)

    async def loaded(self, http: EngineHttp) -> None:
        """Check what was left, once the server has the weights of the run. Raises `EngineError`."""
        if http.url in self._with_random_weights:
            self._with_random_weights.discard(http.url)
            await self._probe_temperature(http)

    async def through(self, router: EngineHttp) -> None:
        """Check that a router forwards every field of a request; it may drop fields that it does not know.

        Raises `EngineError`.
        """
        params = SamplingParams(top_k=min(2, self._model.vocab_size), max_new_tokens=1)
        request = generate_request(Question((0, 0), params, self._requested, start=1))
        body = await router.request("POST", "/generate", request)
        try:
            answer = decode_answer(body)
        except RecordRejected as rejection:
            raise _dropped(router, f"an answer of another kind: {rejection.got}") from rejection
        meta, recorded = answer.meta_info, self._requested.routes or self._requested.mask
        got = {
            "prompt ids": recorded and answer.prompt_token_ids != [0, 0],
            "routes": self._requested.routes and len(bytes(meta.routed_experts).strip(b'"')) != self._one_row(meta),
            "sampling masks": self._requested.mask and not meta.output_token_sampling_logprobs,
        }
        if lost := [name for name, missing in got.items() if missing]:
            raise _dropped(router, f"an answer without {' and '.join(lost)}")

    def _one_row(self, meta: MetaInfo) -> int:
        """Characters of the routes of one token as they travel, in base64."""
        size = PAYLOAD_BYTES.get(meta.routed_experts_dtype or PAYLOAD_DTYPE, 0)
        return (size * self._model.num_layers * self._model.top_k + 2) // 3 * 4

    def _request(self, token_ids: tuple[int, ...], params: SamplingParams) -> dict[str, object]:
        return generate_request(Question(token_ids, params, self._requested))

    async def _probe_model(self, http: EngineHttp) -> None:
        """Sample one token: its routes show layers and experts per token.

        The last id has a log-prob, the next one has none.
        """
        vocab_size = self._model.vocab_size
        probe = Prompt("probe", (0,))
        request = self._request(probe.token_ids, SamplingParams(top_k=1, max_new_tokens=1))
        if not await self._has_token(http, request, vocab_size - 1) or await self._has_token(http, request, vocab_size):
            raise _mismatch(http, "vocabulary size", "another size", vocab_size)
        body = await http.request("POST", "/generate", request)
        try:
            parse_answer(body, probe, self._model, self._requested, sample_id=0, group_id=0)
        except RecordRejected as rejection:
            # Before the first push the server's weights carry no version number.
            if rejection.reason != "version_unknown":
                raise _mismatch(
                    http, f"answer to a probe ({rejection.reason})", rejection.got, rejection.expected
                ) from rejection

    async def _probe_temperature(self, http: EngineHttp) -> None:
        """Check that log-probs belong to the tempered distribution. A server can report them at temperature 1
        instead.

        Tempered log-probs of the first and the last of a few likeliest ids differ by less.
        """
        if self._temperature == 1.0:
            return
        plain, tempered = await self._spread(http, 1.0), await self._spread(http, self._temperature)
        if abs(tempered - plain) < abs(tempered - plain / self._temperature):
            raise EngineError(
                "the rollout server reports log-probs at temperature 1, but samples are scored at the rollout's "
                "temperature",
                where=http.url,
                got=f"a spread of {tempered:.4f} nats at temperature {self._temperature}, {plain:.4f} at 1",
                expected=f"{plain / self._temperature:.4f}",
                fix="Start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or set rollout.temperature=1.",
            )

    async def _spread(self, http: EngineHttp, temperature: float) -> float:
        num_ids = min(8, self._model.vocab_size)
        params = SamplingParams(temperature=temperature, top_k=num_ids, max_new_tokens=1)
        body = await http.request(
            "POST", "/generate", self._request(tuple(range(num_ids)), params) | {"top_logprobs_num": num_ids}
        )
        [top] = decode_answer(body).meta_info.output_top_logprobs or [None]
        values = [value for value, *_ in top or () if value is not None]
        if len(values) != num_ids:
            raise _mismatch(http, "answer to a probe (output_top_logprobs)", len(values), num_ids)
        return max(values) - min(values)

    async def _has_token(self, http: EngineHttp, request: dict[str, object], token_id: int) -> bool:
        try:
            await http.request("POST", "/generate", request | {"token_ids_logprob": [token_id]})
        except HttpStatusError as error:
            if error.status != BAD_REQUEST:
                raise
            return False
        return True


def _check_routes(http: EngineHttp, server: Mapping[str, Any]) -> None:
    """Raise `EngineError` where this server's routes are known to be wrong."""
    for defect, got in defects_of(server):
        raise EngineError(
            f"routes of this rollout server would be wrong: {defect.what} ({defect.source})",
            where=http.url,
            got=f"{defect.setting}={got} on SGLang {server.get('version')}",
            expected=f"{defect.setting}={defect.harmless[0]}",
            fix=f"{defect.fix} Without routes (replay.mode=none or R2, and probe.every=0) it does not matter.",
        )


def _dropped(router: EngineHttp, got: str) -> EngineError:
    return EngineError(
        "the router does not hand on what samples are asked with",
        where=router.url,
        got=got,
        expected="the answer that a server gives",
        fix=(
            "smg 1.13 (pip install 'moe-trm[router]') hands everything on; sglang-router 0.3.2 drops what it does not "
            "know. Without rollout.router samples are shared among rollout.urls as well."
        ),
    )


def _mismatch(http: EngineHttp, what: str, got: object, expected: object) -> EngineError:
    return EngineError(
        f"the rollout server does not serve the configured model: {what} differs",
        where=http.url,
        got=got,
        expected=expected,
        fix="Start the server from the same configuration: `python -m launch.rollout CONFIG`.",
    )


def parse_answer(
    body: bytes, prompt: Prompt, model: ServedModel, requested: RequestedFields, *, sample_id: int, group_id: int
) -> RolloutRecord:
    """The record of a sample of one answer.

    Raises `RecordRejected` as `parse_turn` and `Conversation.record` do, naming the sample.
    """
    conversation = Conversation(prompt)
    with naming(f"sample {sample_id}"):
        conversation.add(parse_turn(body, prompt.token_ids, model, requested))
        return conversation.record(sample_id=sample_id, group_id=group_id, keep_changed=requested.missing == "native")
