"""The rollout engine that is one or several real SGLang servers, driven over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from moe_trm.config.choices import wants_routes
from moe_trm.config.engines import ENGINES
from moe_trm.config.schema import Config
from moe_trm.errors import EngineError, RecordRejected, SyncError
from moe_trm.rollout.intake.messages import Hello, Question, Whole
from moe_trm.rollout.intake.pool import IntakePool
from moe_trm.rollout.intake.reading import Reading
from moe_trm.rollout.servers.continuation import continued, settled
from moe_trm.rollout.servers.fleet import REISSUES, Fleet
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.rollout.servers.router import Router
from moe_trm.rollout.servers.seeds import Seeds
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.rollout.sglang.broadcast import DistributedPush
from moe_trm.rollout.sglang.checks import ServerCheck
from moe_trm.rollout.sglang.disk_load import load_folder, num_bytes, verified_checksums
from moe_trm.rollout.sglang.parse import Wanted
from moe_trm.rollout.sglang.reader import Reader
from moe_trm.rollout.sglang.together import Received
from moe_trm.rollout.turn import naming
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams, ServerState

KEPT_PUSH_BYTES = 1 << 30
"""Largest push for which the servers keep samples while they load it: the load counts to `rollout.timeout_s`."""


class SglangEngine:
    """`RolloutEngine` over HTTP: one request per answer, or several where weight pushes interrupt it; many in flight.

    Args:
        config: `model`, `rollout`, `sampling_mask`, `replay`, `probe`, `pipeline` and `sync` are read, here only.
        api_key: the servers' bearer token.

    Raises:
        CheckpointError: `model.checkpoint` cannot be read.
    """

    traits = ENGINES["sglang"]

    def __init__(self, config: Config, api_key: str | None) -> None:
        rollout, server = config.rollout, config.rollout.server
        self._model = ServedModel.from_checkpoint(Path(config.model.checkpoint))
        self._wanted = Wanted(
            routes=wants_routes(config),
            mask=config.keeps_masks,
            violation=config.sampling_mask.violation,
            missing=config.replay.missing,
            partial=config.pipeline.partial == "interrupt",
        )
        self._reader = Reader(self._model)
        self._dtype, self._verify = server.dtype, config.sync.verify
        self._check = ServerCheck(
            self._model,
            self._wanted,
            self.generate_request,
            temperature=rollout.temperature,
            dtype=server.dtype,
            verify=config.sync.verify,
            startup_timeout_s=server.startup_timeout_s,
            quantization=rollout.quantization,
            wait_s=server.wait_s,
        )

        def connect(url: str) -> EngineHttp:
            return EngineHttp(url, api_key, timeout_s=rollout.timeout_s, max_attempts=rollout.max_attempts)

        self._router = Router(connect(rollout.router), api_key) if rollout.router else None
        endpoint = self._router.endpoint if self._router is not None else None
        self._fleet = Fleet(
            [RemoteServer(connect(url), endpoint) for url in rollout.addresses],
            self._load,
            interrupt=self._wanted.partial,
            patience_s=rollout.recovery_timeout_s,
            router=self._router,
            rolling=config.pipeline.rolling_push,
        )
        hello = Hello(self._model, api_key, rollout.timeout_s, rollout.max_attempts)
        self._intake = IntakePool(rollout.intake_processes, hello) if rollout.intake_processes else None
        self._slots = asyncio.Semaphore(rollout.concurrency)
        self._device = "cpu"
        self._push: tuple[WeightPush, Awaitable[Mapping[str, str]] | None] | None = None
        self._broadcast: DistributedPush | None = None
        self._shares: tuple[int, Sequence[Share]] | None = None
        self._retracted = 0
        self._seeds = Seeds(config.seed if server.deterministic else None)

    def write_text(self, checkpoint: str) -> None:
        """Let intake processes decode samples, with the tokenizer of this folder. Before `start`."""
        if self._intake is not None:
            self._intake.decode_with(checkpoint)

    async def start(self) -> None:
        """Wait until every server generates, and check that it is the one that was configured. Raises `EngineError`."""
        devices = await asyncio.gather(*(self._check.run(server.http) for server in self._fleet.servers))
        if len(set(devices)) > 1:
            raise EngineError("the rollout servers compute on different devices", got=devices, expected="one kind")
        self._device = devices[0]
        if self._router is not None:
            await self._router.choose_among(frozenset(server.http.url for server in self._fleet.servers), every=True)
            await self._check.through(self._router.endpoint.http)
        if self._intake is not None:
            await self._intake.start()
        self._fleet.start()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        """Sample one continuation.

        Raises `RecordRejected` for an answer that violates an invariant, `EngineError` for none.
        """
        return (await self.generate_written(prompt, params, sample_id=sample_id, group_id=group_id))[0]

    async def generate_written(
        self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int
    ) -> tuple[RolloutRecord, tuple[str, str] | None]:
        """As `generate`, with the sample's text (`tasks.rewards.written_text`) where an intake process has made it."""
        keep_changed = self._wanted.missing == "native"
        params = _seeded(params, self._seeds.of_sample(sample_id))
        whole = Whole(sample_id, group_id, prompt.prompt_id, params, keep_changed)
        conversation = Conversation(prompt)
        with naming(f"sample {sample_id}"):
            reading = await self._sampled(prompt.token_ids, params, whole=whole)
            if isinstance(reading.value, RolloutRecord):
                return reading.value, reading.written
            conversation.add(reading.value)
            return conversation.record(sample_id=sample_id, group_id=group_id, keep_changed=keep_changed), None

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        """Sample what comes after `context`; raises as `generate` does.

        A sample that a weight push interrupts is continued from where it was, with the new weights. Each token keeps
        the version that sampled it.
        """
        value = (await self._sampled(context, params, start=start, bare=bare)).value
        assert isinstance(value, SampledTurn)
        return value

    async def _sampled(
        self,
        context: Sequence[int],
        params: SamplingParams,
        *,
        start: int = 0,
        bare: bool = False,
        whole: Whole | None = None,
    ) -> Reading:
        """The turn after `context`; its record, where an intake process could make that of the first answer."""
        wanted = replace(self._wanted, routes=False, mask=False) if bare else self._wanted
        params = params if params.seed is not None else _seeded(params, self._seeds.next())
        so_far: SampledTurn | None = None
        refused = RecordRejected("aborted", "the engine aborted the request every time it was asked")
        for _ in range(params.max_new_tokens + REISSUES):
            tokens = [*context, *(so_far.tokens.tolist() if so_far else ())]
            first_row = start if so_far is None else len(tokens) - 1
            left = params.max_new_tokens - len(tokens) + len(context)
            asked = params if so_far is None else replace(params, max_new_tokens=left)
            request = self.generate_request(tokens, asked, bare=bare)
            if first_row and "return_routed_experts" in request:
                request["routed_experts_start_len"] = first_row
            question = Question(request, wanted, first_row, whole if so_far is None else None)
            try:
                reading = await self._read(question)
            except RecordRejected as rejection:
                self._retracted += rejection.reason == "retracted"
                unknown = rejection.reason == "version_unknown" and self._push is not None
                if unknown:
                    await self._fleet.fence_restarted()
                elif not (rejection.reason == "aborted" and wanted.partial):  # before its first token
                    raise
                refused = rejection
                continue
            self._retracted += reading.retracted
            if isinstance(reading.value, RolloutRecord):
                return reading
            so_far = settled(reading.value if so_far is None else continued(so_far, reading.value), params)
            if so_far.finish_reason != "abort":
                return Reading(so_far, so_far.retracted)
        raise refused

    async def _read(self, question: Question) -> Reading:
        """The checked answer to one request, read in an intake process or here."""
        intake = self._intake
        async with self._slots:
            if intake is not None:
                return await self._fleet.ask_by(lambda http: intake.ask(http.url, question))
            with self._reader.awaiting():
                body = await self._fleet.ask(question.request)
        received = Received(body, question.request["input_ids"], question.start)
        turn = await self._reader.turn(received, question.wanted)
        return Reading(turn, turn.retracted)

    def expect(self, version: int) -> None:
        """See `RolloutEngine.expect`."""
        self._fleet.expect(version)

    async def load_weights(self, push: WeightPush) -> None:
        """Make every server load `push` from its folder and prove it; a lost one follows when it is back.

        Raises `SyncError`, `EngineError`.
        """
        verifying = asyncio.ensure_future(self._verified(push)) if self._verify else None
        if verifying is not None and not self._fleet.expects(push.version):
            await verifying  # the servers go on meanwhile
        self._push = push, verifying
        try:
            await self._fleet.update(push.version)
        finally:
            if verifying is not None:
                await verifying  # damaged files are the cause of whatever a server says of them

    async def _verified(self, push: WeightPush) -> Mapping[str, str]:
        return await asyncio.to_thread(verified_checksums, push, self._dtype, self._device)

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        """Lead the server through a broadcast from the learner ranks and witness it. Raises `SyncError`."""
        self._shares = version, shares
        await self._fleet.update(version)

    async def release_memory(self) -> None:
        """Every server in service releases its weights and cache; it takes the memory back around the next load."""
        await asyncio.gather(*(server.release_memory() for server in self._fleet.servers if not server.fenced))

    def metrics(self) -> dict[str, float]:
        """Now: `rollout/servers` in service and `rollout/servers_lost`. The others are totals since the start.

        `rollout/reissued`: samples asked for again; `rollout/losses` and `rollout/recoveries`: times that a server was
        lost and came back; `rollout/lost_s`: seconds that servers were out of service, added up; `rollout/retracted`:
        answers with routes that an engine short of memory computed again, where routes are asked for. With intake
        processes also what `IntakePool.metrics` says.
        """
        retracted = {"rollout/retracted": float(self._retracted)} if self._wanted.routes else {}
        intake = self._intake.metrics() if self._intake is not None else {}
        return self._fleet.metrics() | retracted | intake

    def servers(self) -> tuple[ServerState, ...]:
        """State of each server now."""
        return self._fleet.states()

    async def close(self) -> None:
        """Release connections and groups."""
        if self._broadcast is not None:
            await self._broadcast.close()
        await self._fleet.close()
        if self._intake is not None:
            await self._intake.close()

    async def _load(self, server: RemoteServer) -> None:
        """Give one server the newest weights: from their folder, or by the broadcast that is waiting for it."""
        await server.resume_memory("weights")
        if self._shares is not None:
            await self._receive(server, *self._shares)
        elif self._push is not None:
            push, expected = self._push
            await load_folder(server.http, push, expected, self._keeping(server, push))
            server.version = push.version
        await server.resume_memory("kv_cache")
        await self._check.loaded(server.http)

    def _keeping(self, server: RemoteServer, push: WeightPush) -> AbstractContextManager[None]:
        small = sum(map(num_bytes, push.tensors)) <= KEPT_PUSH_BYTES
        return self._fleet.keeping(server) if small else nullcontext()

    async def _receive(self, server: RemoteServer, version: int, shares: Sequence[Share]) -> None:
        if server.fenced:
            raise SyncError(
                "the rollout server lost its weights, and a broadcast leaves no copy to give it again",
                where=server.http.url,
                got="sync.method=distributed",
                expected="disk",
                fix="Start the run again from its last checkpoint; "
                "with sync.method=disk a server that comes back is given its weights again.",
            )
        if self._broadcast is None:
            self._broadcast = DistributedPush(server.http, device=self._device)
            await self._broadcast.join([share.meeting for share in shares])
        await self._broadcast.load(version, shares, dtype=self._dtype, verify=self._verify)
        server.version = version

    def generate_request(
        self, token_ids: Sequence[int], params: SamplingParams, *, bare: bool = False
    ) -> dict[str, object]:
        """The JSON body of one sample, `bare`: without routes and masks.

        The server refuses masks together with `n > 1`, hence one request each.
        """
        sampling: dict[str, object] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            **({} if params.seed is None else {"sampling_seed": params.seed}),
        }
        request: dict[str, object] = {
            "input_ids": list(token_ids),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if params.stop_texts:
            # SGLang looks for a text in as many last tokens as the tokenizer writes it in; the policy may take more.
            # For an expression it looks at as many as there are characters (0.5.23, `Req._stop_match_tail_len`).
            sampling["stop_regex"] = [re.escape(text) for text in params.stop_texts]
        if bare:
            return request
        if self._wanted.routes:
            request["return_routed_experts"] = True
        if self._wanted.mask:
            request |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
            if self._wanted.violation == "union":
                request["top_logprobs_num"] = 1
        return request


def _seeded(params: SamplingParams, seed: int | None) -> SamplingParams:
    return params if seed == params.seed else replace(params, seed=seed)
