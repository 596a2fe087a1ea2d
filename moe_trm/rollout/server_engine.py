"""The rollout engine that is one or several servers, driven over HTTP.

Which engine they run is the business of its `ServerBackend`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from moe_trm.config.choices import wants_routes
from moe_trm.config.schema import Config
from moe_trm.errors import EngineError, RecordRejected, SyncError
from moe_trm.rollout.servers.backend import Delivery, Digests, Requirements, backend_of
from moe_trm.rollout.servers.continuation import continued, settled
from moe_trm.rollout.servers.fleet import REISSUES, Fleet
from moe_trm.rollout.servers.http import AnswerTooLong, EngineHttp
from moe_trm.rollout.servers.loan import Loan
from moe_trm.rollout.servers.ownership import Lease
from moe_trm.rollout.servers.question import Question, RequestedFields
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.rollout.servers.router import Router
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.servers.use_proof import Bounds, UseProof, bounds_of
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.rollout.turn import naming
from moe_trm.sync.manifest import ScoredText, Share, WeightPush
from moe_trm.sync.tensors import num_bytes
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams, ServerState
from routing import RouteRecord

KEPT_PUSH_BYTES = 1 << 30
"""Largest push for which the servers keep samples while they load it: the load counts to `rollout.timeout_s`."""


class ServerEngine:
    """`RolloutEngine` over HTTP: one request per answer, or several where weight pushes interrupt it; many in flight.

    Of `config`, the sections `model`, `rollout`, `sampling_mask`, `replay`, `probe`, `pipeline` and `sync` are read,
    here only. Raises `CheckpointError` for an unreadable `model.checkpoint`, `ConfigError` for an engine without
    servers.
    """

    def __init__(self, config: Config, api_key: str | None) -> None:
        rollout, server = config.rollout, config.rollout.server
        self._backend, self.traits = backend_of(rollout.engine), rollout.traits
        self._checkpoint = config.model.checkpoint
        self._model = ServedModel.from_checkpoint(Path(self._checkpoint), pictures=config.task.has_pictures)
        self._requested = RequestedFields(
            routes=wants_routes(config),
            mask=config.keeps_masks,
            violation=config.sampling_mask.violation,
            missing=config.replay.missing,
            partial=config.pipeline.partial == "interrupt",
        )
        self._run = secrets.token_hex(4) if self._backend.labels_runs else ""
        self._lease, self._api_key = Lease(), api_key
        self._client = self._backend.client(
            Requirements(
                self._model,
                self._requested,
                rollout.temperature,
                server.dtype,
                config.sync.verify,
                rollout.quantization,
                self._run,
                server.tensor_parallel,
            )
        )
        bounds = Bounds(0.0, 0.0) if config.exact else bounds_of(server.dtype, config.learner.dtype)
        self._use = UseProof(self._backend, bounds)
        self._verify, self._loads_s = config.sync.verify, server.startup_timeout_s

        def connect(url: str) -> EngineHttp:
            return EngineHttp(url, api_key, timeout_s=rollout.timeout_s, max_attempts=rollout.max_attempts)

        self._router = Router(connect(rollout.router), api_key) if rollout.router else None
        endpoint = self._router.endpoint if self._router is not None else None
        self._fleet = Fleet(
            [
                RemoteServer(connect(url), self._backend, endpoint, run=self._run, loan=Loan(url, api_key))
                for url in rollout.addresses
            ],
            self._load,
            interrupt=self._requested.partial,
            patience_s=rollout.recovery_timeout_s,
            router=self._router,
            rolling=config.pipeline.rolling_push,
        )
        self._slots = asyncio.Semaphore(rollout.concurrency)
        self._push: tuple[WeightPush, Awaitable[Digests] | None] | None = None
        self._shares: tuple[int, Sequence[Share]] | None = None
        self._retracted = 0
        repeats = server.deterministic or (config.exact and server.device == "cuda")
        self._seeds = Seeds(config.seed if repeats else None)

    async def start(self) -> None:
        """Wait until every server generates, and check that it is the one that was configured, and this run's alone.

        Raises `EngineError`.
        """
        servers = self._fleet.servers
        await asyncio.gather(*(server.started(self._loads_s) for server in servers))
        for server in servers:
            await self._lease.take(server.http.url, self._api_key)
        await asyncio.gather(*(self._client.check(server.http) for server in servers))
        if self._router is not None:
            await self._router.started(self._loads_s)
            await self._router.choose_among(frozenset(server.http.url for server in servers), every=True)
            await self._client.check_router(self._router.endpoint.http)
        self._fleet.start()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        """Sample one continuation.

        Raises `RecordRejected` for an answer that violates an invariant, `EngineError` for none.
        """
        keep_changed = self._requested.missing == "native"
        params = _seeded(params, self._seeds.of_sample(sample_id))
        conversation = Conversation(prompt)
        with naming(f"sample {sample_id}"):
            conversation.add(await self.turn(prompt.token_ids, params, pictures=prompt.pictures))
            return conversation.record(sample_id=sample_id, group_id=group_id, keep_changed=keep_changed)

    async def turn(
        self,
        context: Sequence[int],
        params: SamplingParams,
        *,
        start: int = 0,
        bare: bool = False,
        pictures: tuple[bytes, ...] = (),
    ) -> SampledTurn:
        """Sample what comes after `context`; raises as `generate` does.

        A sample that a weight push interrupts is continued from where it was, with the new weights. Each token keeps
        the version that sampled it.
        """
        params = params if params.seed is not None else _seeded(params, self._seeds.next())
        so_far: SampledTurn | None = None
        refused = RecordRejected("aborted", "the engine aborted the request every time it was asked")
        for _ in range(params.max_new_tokens + REISSUES):
            tokens = [*context, *(so_far.tokens.tolist() if so_far else ())]
            first_row = start if so_far is None else len(tokens) - 1
            left = params.max_new_tokens - len(tokens) + len(context)
            asked = params if so_far is None else replace(params, max_new_tokens=left)
            question = self.question(tokens, asked, start=first_row, bare=bare)
            if pictures:
                question = replace(question, pictures=pictures, image=self._model.image)
            try:
                answer = await self._read(question)
            except RecordRejected as rejection:
                self._retracted += rejection.reason == "retracted"
                unknown = rejection.reason == "version_unknown" and self._push is not None
                if unknown:
                    await self._fleet.fence_restarted()
                elif not (rejection.reason == "aborted" and self._requested.partial):  # before its first token
                    raise
                refused = rejection
                continue
            self._retracted += answer.retracted
            so_far = settled(answer if so_far is None else continued(so_far, answer), params)
            if so_far.finish_reason != "abort":
                return so_far
        raise refused

    async def _read(self, question: Question) -> SampledTurn:
        """The checked answer to one request, or to one of those that are made because it fails.

        Each has an id of its own: the engine may still work on the one before. A router may give it another.
        """
        attempts = itertools.count()
        if self._router is None:
            question = replace(question, request_id=secrets.token_hex(8))

        def request() -> dict[str, object]:
            begin = question.request_id
            return self._backend.request(replace(question, request_id=begin and f"{begin}-{next(attempts)}"))

        try:
            async with self._slots:
                body, server = await self._fleet.ask(request)
        except AnswerTooLong as error:
            raise RecordRejected(
                "too_long", error.what, where=error.where, got=error.got, expected=error.expected
            ) from error
        return replace(self._backend.parse(body, question, self._model), server=server)

    def question(
        self, token_ids: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> Question:
        """One answer as this run asks for it; `start`, `bare`: see `RolloutEngine.turn`."""
        requested = replace(self._requested, routes=False, mask=False) if bare else self._requested
        return Question(tuple(token_ids), params, requested, start)

    def expect(self, version: int) -> None:
        """See `RolloutEngine.expect`."""
        self._fleet.expect(version)

    async def load_weights(self, push: WeightPush) -> None:
        """Make every server load `push` from its folder and prove it; a lost one follows when it is back.

        Raises `SyncError`, `EngineError`.
        """
        self._check_provable(push.texts)
        self._requested = replace(self._requested, run=self._run)  # answers of other weights are refused from here
        verifying = asyncio.ensure_future(self._expected_digests(push)) if self._verify else None
        if verifying is not None and not self._fleet.expects(push.version):
            await verifying  # the servers go on meanwhile
        self._push = push, verifying
        self._use.begin(push.texts)
        try:
            await self._fleet.update(push.version)
        finally:
            if verifying is not None:
                await verifying  # damaged files are the cause of whatever a server says of them

    def _check_provable(self, texts: Sequence[ScoredText]) -> None:
        """Raise `SyncError` where nothing would prove a push with these texts of a proof by use."""
        if self._verify and not self._client.proves_tensors and not texts:
            raise SyncError(
                "nothing would prove this push: the server's checksums are not predicted (the log says why), and there "
                "are no texts for a proof by use",
                got="no texts: sync.prove_every=0, or there is no learner",
                expected="texts, which every push of a run brings that is proved by use",
                fix="Set sync.prove_every=1 in a run, or sync.verify=false and accept unproved weights.",
            )

    async def _expected_digests(self, push: WeightPush) -> Digests:
        return await asyncio.to_thread(self._client.expected_digests, push)

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        """Lead the server through a broadcast from the learner ranks and witness it. Raises `SyncError`."""
        self._check_provable(shares[0].texts)
        self._requested = replace(self._requested, run=self._run)
        self._shares = version, shares
        self._use.begin(shares[0].texts)
        await self._fleet.update(version)

    async def prefilled(self, token_ids: Sequence[int], version: int) -> tuple[np.ndarray, RouteRecord]:
        """See `PrefillEngine`."""
        refused = EngineError("no rollout server has these weights", got=self._fleet.states(), expected=version)
        server = self._fleet.serving(version)
        if server is None:
            raise refused
        logprobs = await self._backend.prefilled(server.http, token_ids)
        # One more token is sampled after all but the last: its routes are those of the text.
        params = _seeded(SamplingParams(max_new_tokens=1), self._seeds.of_sample(-1))
        answer = await self.turn(token_ids[:-1], params)
        if answer.routes is None or server.version != version or (answer.versions != version).any():
            raise refused
        return logprobs, answer.routes

    async def release_memory(self) -> None:
        """See `Fleet.lend_memory`. Each server takes its memory back before the next load."""
        await self._fleet.lend_memory()

    def metrics(self) -> dict[str, float]:
        """Now: `rollout/servers` in service and `rollout/servers_lost`. The others are totals since the start.

        `rollout/reissued`: samples asked for again; `rollout/losses` and `rollout/recoveries`: times that a server was
        lost and came back; `rollout/lost_s`: seconds that servers were out of service, added up; `rollout/retracted`:
        answers with routes that an engine short of memory computed again, where routes are asked for.
        `weights/unpredicted`: 1 where pushes are proved by use alone. Also what `UseProof.metrics` says.
        """
        retracted = {"rollout/retracted": float(self._retracted)} if self._requested.routes else {}
        unpredicted = {"weights/unpredicted": 1.0} if self._verify and not self._client.proves_tensors else {}
        return self._fleet.metrics() | self._use.metrics() | unpredicted | retracted

    def servers(self) -> tuple[ServerState, ...]:
        """State of each server now."""
        return self._fleet.states()

    async def close(self) -> None:
        """Release connections and groups."""
        try:
            if not any(server.is_released for server in self._fleet.servers):
                await self._client.close()
            await self._fleet.close()
        finally:
            self._lease.release()

    async def _load(self, server: RemoteServer) -> None:
        """Give one server the newest weights, and prove them: by checksum, and by use where that is due."""
        needs_proof = self._use.due(new=server.version is None)
        if needs_proof and server.version is not None and not server.released:
            await self._use.remember(server.http)
        version = await self._give(server, keeps=not needs_proof)
        if needs_proof:
            # A broadcast leaves no copy to give it again.
            again = (lambda: self._give(server, keeps=False)) if self._shares is None else None
            await self._use.prove(server.http, again)
        server.version = version

    async def _give(self, server: RemoteServer, *, keeps: bool) -> int | None:
        """Give one server the newest weights: from their folder, or by the broadcast that is waiting for it.

        `keeps`: samples may wait in it. It would go on with them before the weights are proved by use.
        """
        version = server.version
        await server.resume_memory()
        if self._shares is not None:
            version = self._shares[0]
            await self._receive(server, *self._shares)
        elif self._push is not None:
            push, expected = self._push
            version = push.version
            small = keeps and sum(map(num_bytes, push.tensors)) <= KEPT_PUSH_BYTES
            keeping = self._fleet.keeping(server) if small else nullcontext()
            await self._client.load(server.http, Delivery(push, expected, keeping))
        await self._client.loaded(server.http)
        return version

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
        await self._client.receive(server.http, version, shares)


def _seeded(params: SamplingParams, seed: int | None) -> SamplingParams:
    return params if seed == params.seed else replace(params, seed=seed)


class Seeds:
    """A seed for each answer of a run, made from the run's `seed`; with None, answers have none and the server draws.

    Without them, a server that samples deterministically would give all samples of a group the same answer.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed, self._asked = seed, itertools.count()

    def of_sample(self, sample_id: int) -> int | None:
        """The seed of a sample, a function of the run's seed and its number alone."""
        return None if self._seed is None else self._made(f"sample-{sample_id}")

    def next(self) -> int | None:
        """The seed of an answer that no number names: a turn of a dialogue, or an evaluation."""
        return None if self._seed is None else self._made(f"answer-{next(self._asked)}")

    def _made(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}-{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)
