"""The controller's side of a run's vLLM servers: checks at the start, then pushes and their proofs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from packaging.version import Version

from moe_trm.errors import EngineError, EngineLost, RecordRejected, SyncError
from moe_trm.rollout.servers.backend import Delivery, Digests, Requirements, ServerClient
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.ownership import label_of
from moe_trm.rollout.servers.question import Question, RequestedFields
from moe_trm.rollout.vllm.parse import parse_turn
from moe_trm.rollout.vllm.request import generate_request
from moe_trm.sync.distributed import buckets_of
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.types import SamplingParams

WEIGHTS = "/moe_trm/weights"
ROUTES_SINCE = Version("0.30.0")
"""The first release whose routes were compared with those of transformers; docs/engines.md lists defects before it."""
PROBED = (1, 2, 3)
"""Context of the probe of log-probs. An id alone may be that of padding, after which all ids are equally likely."""
PROBED_IDS = 2
"""Ids that the probe of log-probs keeps."""


class VllmClient(ServerClient):
    """See `ServerClient`. The proof of a push is the digest of every tensor that each worker read."""

    def __init__(self, requirements: Requirements) -> None:
        self._needs, self._joined = requirements, False

    async def check(self, http: EngineHttp) -> None:
        """Compare what the server was started with, and look at the log-probs of one answer. Raises `EngineError`."""
        try:
            served = await http.get(WEIGHTS)
        except EngineLost:
            raise
        except EngineError as error:
            raise EngineError(
                "this is no vLLM server with packages/vllm_worker, or it has another key",
                where=http.url,
                got=error.got,
                expected=f"an answer to {WEIGHTS}",
                fix="docs/engines.md has its command line.",
            ) from error
        model, fields = self._needs.model, self._needs.requested
        if fields.routes and Version(served.get("release", "0")) < ROUTES_SINCE:
            raise EngineError(
                "the routes of this release of vLLM are not those of the forwards that sampled, in some settings",
                where=http.url,
                got=served.get("release"),
                expected=f"{ROUTES_SINCE} or newer",
                fix="docs/engines.md lists the defects. Or train without routes: replay.mode=none and probe.every=0.",
            )
        if model.architecture not in served["architectures"]:
            raise _mismatch(http, "architecture", served["architectures"], model.architecture)
        expected = {
            "vocab_size": model.vocab_size,
            "dtype": self._needs.dtype,
            "quantization": None,
            "logprobs_mode": "processed_logprobs",
            "tensor_parallel": self._needs.tensor_parallel,
            **({"returns_routes": True} if fields.routes else {}),
        }
        for name, value in expected.items():
            if served.get(name) != value:
                raise _mismatch(http, name, served.get(name), value)
        await self._probe(http)

    async def _probe(self, http: EngineHttp) -> None:
        """Sample one token of two kept ids: their probabilities add up to one, if they are those that were sampled."""
        params = SamplingParams(temperature=self._needs.temperature, top_k=PROBED_IDS, max_new_tokens=1)
        question = Question(PROBED, params, RequestedFields(routes=self._needs.requested.routes, mask=True))
        answer = await http.request("POST", "/inference/v1/generate", generate_request(question))
        try:
            parse_turn(answer, question, self._needs.model)
        except RecordRejected as rejection:
            # Before the first push the server's weights carry no version number; that is looked at last.
            if rejection.reason != "version_unknown":
                raise _mismatch(
                    http, f"answer to a probe ({rejection.reason})", rejection.got, rejection.expected
                ) from rejection

    def expected_digests(self, push: WeightPush) -> Digests:
        """The digests of the learner's memory: each worker digests all of the bytes, so no file is read here."""
        return [{entry.name: entry.digest for entry in push.tensors}]

    async def load(self, http: EngineHttp, delivery: Delivery) -> None:
        """Load the folder once nothing is sampled; samples that come meanwhile wait at the server's door."""
        push = delivery.push
        with loading(push.directory):
            # A sample that is kept for the new weights must not be let in before they are on their way.
            await http.post("/moe_trm/hold", {})
            with delivery.keeping:
                workers = await self._push(http, push.version, {"folder": push.directory})
                if delivery.expected is not None:
                    [expected] = await delivery.expected
                    _compare(workers, expected, push.directory)

    async def receive(self, http: EngineHttp, version: int, shares: Sequence[Share]) -> None:
        """The same from the broadcasts of the learner ranks, with which the worker forms groups the first time."""
        buckets = [
            (share.meeting.group, [(entry.name, entry.dtype, entry.shape) for entry in bucket])
            for share in shares
            for bucket in buckets_of(share)
        ]
        with loading("sync.method=distributed"):
            if not self._joined:
                meetings = [(share.meeting.group, share.meeting.address, share.meeting.port) for share in shares]
                await http.post("/moe_trm/join", {"meetings": meetings})
                self._joined = True
            workers = await self._push(http, version, {"buckets": buckets})
        _compare(workers, {entry.name: entry.digest for share in shares for entry in share.entries}, "broadcast")

    async def _push(self, http: EngineHttp, version: int, weights: Mapping[str, object]) -> list[dict[str, str]]:
        """The tensors that each worker read, with their digests."""
        label = label_of(version, self._needs.run)
        reply = await http.post(WEIGHTS, {**weights, "version": label})
        if reply["version"] != label:
            raise SyncError("the server labels its weights with another version", got=reply["version"], expected=label)
        return list(reply["workers"])


@contextmanager
def loading(where: str) -> Iterator[None]:
    """Make a refusal of the server the failure of a push; a server that is gone stays `EngineLost`."""
    try:
        yield
    except EngineLost:
        raise
    except EngineError as error:
        raise SyncError("the server did not load the push", where=where, got=error.got, fix=error.fix) from error


def _compare(workers: list[dict[str, str]], expected: Mapping[str, str], folder: str) -> None:
    """Raise `SyncError` naming tensors unless every worker read exactly the tensors behind `expected`."""
    if not workers:
        raise SyncError("no worker says what it read", where=folder, expected="one digest per tensor")
    for number, digests in enumerate(workers):
        wrong = sorted(name for name in {*digests, *expected} if digests.get(name) != expected.get(name))
        if wrong:
            raise SyncError(
                "the server read other tensors than the learner wrote",
                where=f"{folder}, worker {number}",
                got=", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""),
                expected=f"{len(expected)} tensors with the digests of the manifest",
                fix="Look for damaged storage, a full disk, or another writer of this folder; then push again.",
            )


def _mismatch(http: EngineHttp, what: str, got: Any, expected: object) -> EngineError:
    return EngineError(
        f"the vLLM server is not the configured one: {what} differs",
        where=http.url,
        got=got,
        expected=expected,
        fix="Start it from the same configuration, `python -m launch.rollout CONFIG`, or as docs/engines.md says.",
    )
