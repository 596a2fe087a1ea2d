"""The rollout engine that is one or several real SGLang servers, driven over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from moe_trm.config.choices import wants_routes
from moe_trm.config.engines import ENGINES
from moe_trm.config.schema import Config
from moe_trm.errors import EngineError, RecordRejected, SyncError
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.rollout.sglang.broadcast import DistributedPush
from moe_trm.rollout.sglang.checks import ServerCheck
from moe_trm.rollout.sglang.continuation import continued, settled
from moe_trm.rollout.sglang.disk_load import load_folder, verified_checksums
from moe_trm.rollout.sglang.fleet import REISSUES, Fleet
from moe_trm.rollout.sglang.http import EngineHttp
from moe_trm.rollout.sglang.parse import Wanted, parse_turn
from moe_trm.rollout.sglang.remote import RemoteServer
from moe_trm.rollout.sglang.router import Router
from moe_trm.rollout.sglang.seeds import Seeds
from moe_trm.rollout.sglang.served import ServedModel
from moe_trm.rollout.turn import naming
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams, ServerState


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
        self._dtype, self._verify = server.dtype, config.sync.verify
        self._check = ServerCheck(
            self._model,
            self._wanted,
            self.generate_request,
            temperature=rollout.temperature,
            dtype=server.dtype,
            verify=config.sync.verify,
            startup_timeout_s=server.startup_timeout_s,
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
        )
        self._slots = asyncio.Semaphore(rollout.concurrency)
        self._device = "cpu"
        self._push: tuple[WeightPush, Mapping[str, str] | None] | None = None
        self._broadcast: DistributedPush | None = None
        self._shares: tuple[int, Sequence[Share]] | None = None
        self._retracted = 0
        self._seeds = Seeds(config.seed if server.deterministic else None)

    async def start(self) -> None:
        """Wait until every server generates, and check that it is the one that was configured. Raises `EngineError`."""
        devices = await asyncio.gather(*(self._check.run(server.http) for server in self._fleet.servers))
        if len(set(devices)) > 1:
            raise EngineError("the rollout servers compute on different devices", got=devices, expected="one kind")
        self._device = devices[0]
        if self._router is not None:
            await self._router.choose_among(frozenset(server.http.url for server in self._fleet.servers), every=True)
            await self._check.through(self._router.endpoint.http)
        self._fleet.start()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        """Sample one continuation.

        Raises `RecordRejected` for an answer that violates an invariant, `EngineError` for none.
        """
        conversation = Conversation(prompt)
        with naming(f"sample {sample_id}"):
            params = replace(params, seed=self._seeds.of_sample(sample_id))
            conversation.add(await self.turn(prompt.token_ids, params))
            return conversation.record(
                sample_id=sample_id, group_id=group_id, keep_changed=self._wanted.missing == "native"
            )

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        """Sample what comes after `context`; raises as `generate` does.

        A sample that a weight push interrupts is continued from where it was, with the new weights. Each token keeps
        the version that sampled it.
        """
        wanted = replace(self._wanted, routes=False, mask=False) if bare else self._wanted
        params = params if params.seed is not None else replace(params, seed=self._seeds.next())
        so_far: SampledTurn | None = None
        refused = RecordRejected("aborted", "the engine aborted the request every time it was asked")
        for _ in range(params.max_new_tokens + REISSUES):
            tokens = [*context, *(so_far.tokens.tolist() if so_far else ())]
            first_row = start if so_far is None else len(tokens) - 1
            left = params.max_new_tokens - len(tokens) + len(context)
            request = self.generate_request(tokens, replace(params, max_new_tokens=left), bare=bare)
            if first_row and "return_routed_experts" in request:
                request["routed_experts_start_len"] = first_row
            async with self._slots:
                body = await self._fleet.ask(request)
            try:
                piece = parse_turn(body, tokens, self._model, wanted, start=first_row)
            except RecordRejected as rejection:
                unknown = rejection.reason == "version_unknown" and self._push is not None
                if unknown:
                    await self._fleet.fence_restarted()
                elif not (rejection.reason == "aborted" and wanted.partial):  # before its first token
                    raise
                refused = rejection
                continue
            self._retracted += piece.retracted
            so_far = settled(piece if so_far is None else continued(so_far, piece), params)
            if so_far.finish_reason != "abort":
                return so_far
        raise refused

    async def load_weights(self, push: WeightPush) -> None:
        """Make every server load `push` from its folder and prove it; a lost one follows when it is back.

        Raises `SyncError`, `EngineError`.
        """
        expected = (
            await asyncio.to_thread(verified_checksums, push, self._dtype, self._device) if self._verify else None
        )
        self._push = push, expected
        await self._fleet.update(push.version)

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
        answers with routes that an engine short of memory computed again, where routes are asked for.
        """
        retracted = {"rollout/retracted": float(self._retracted)} if self._wanted.routes else {}
        return self._fleet.metrics() | retracted

    def servers(self) -> tuple[ServerState, ...]:
        """State of each server now."""
        return self._fleet.states()

    async def close(self) -> None:
        """Release connections and groups."""
        if self._broadcast is not None:
            await self._broadcast.close()
        await self._fleet.close()

    async def _load(self, server: RemoteServer) -> None:
        """Give one server the newest weights: from their folder, or by the broadcast that is waiting for it."""
        await server.resume_memory("weights")
        if self._shares is not None:
            await self._receive(server, *self._shares)
        elif self._push is not None:
            push, expected = self._push
            await load_folder(server.http, push, expected)
            server.version = push.version
        await server.resume_memory("kv_cache")

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
