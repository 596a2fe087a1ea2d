"""The controller's side of a run's SGLang servers: checks at the start, then pushes and their proofs."""

from __future__ import annotations

from collections.abc import Sequence

from moe_trm.errors import EngineError
from moe_trm.rollout.servers.backend import Delivery, Digests, Requirements, ServerClient
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.ownership import label_of
from moe_trm.rollout.sglang.broadcast import DistributedPush
from moe_trm.rollout.sglang.checks import ServerCheck
from moe_trm.rollout.sglang.disk_load import load_folder, verified_checksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.sync.manifest import Share, WeightPush


class SglangClient(ServerClient):
    """See `ServerClient`. The servers of a run hold their tensors in one way."""

    def __init__(self, requirements: Requirements) -> None:
        self._check = ServerCheck(requirements)
        self._run, self._num_ranks = requirements.run, requirements.tensor_parallel
        self._shapes: dict[str, EngineShape | None] = {}
        self._broadcast: DistributedPush | None = None

    @property
    def _shape(self) -> EngineShape | None:
        return next(iter(self._shapes.values()), None)

    @property
    def proves_tensors(self) -> bool:
        """See `ServerClient`."""
        return self._shape is not None or not self._shapes

    async def check(self, http: EngineHttp) -> None:
        """See `ServerCheck.run`."""
        self._shapes[http.url] = await self._check.run(http)
        if len({*self._shapes.values()}) > 1:
            raise EngineError(
                "the rollout servers hold their tensors in different ways",
                got=self._shapes,
                expected="one kind of device, and as many ranks with the same shares of them",
            )

    async def check_router(self, http: EngineHttp) -> None:
        """See `ServerCheck.through`."""
        await self._check.through(http)

    def expected_digests(self, push: WeightPush) -> Digests:
        """See `verified_checksums`."""
        return verified_checksums(push, self._shape)

    async def load(self, http: EngineHttp, delivery: Delivery) -> None:
        """See `load_folder`."""
        push, label = delivery.push, label_of(delivery.push.version, self._run)
        await load_folder(http, push, delivery.expected, delivery.keeping, label=label)

    async def receive(self, http: EngineHttp, version: int, shares: Sequence[Share]) -> None:
        """See `DistributedPush.load`; the first time the groups are formed."""
        if self._broadcast is None:
            self._broadcast = DistributedPush(http, self._num_ranks)
            await self._broadcast.join([share.meeting for share in shares])
        label = label_of(version, self._run)
        await self._broadcast.load(label, shares, self._shape)

    async def loaded(self, http: EngineHttp) -> None:
        """See `ServerCheck.loaded`."""
        await self._check.loaded(http)

    async def close(self) -> None:
        """Dissolve the groups of broadcasts."""
        if self._broadcast is not None:
            await self._broadcast.close()
