"""The controller's side of a run's SGLang servers: checks at the start, then pushes and their proofs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_trm.errors import EngineError
from moe_trm.rollout.servers.backend import Delivery, Requirements, ServerClient
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.ownership import label_of
from moe_trm.rollout.sglang.broadcast import DistributedPush
from moe_trm.rollout.sglang.checks import ServerCheck
from moe_trm.rollout.sglang.disk_load import load_folder, verified_checksums
from moe_trm.sync.manifest import Share, WeightPush


class SglangClient(ServerClient):
    """See `ServerClient`. The servers of a run compute on one kind of device, whose hash their checksums use."""

    def __init__(self, requirements: Requirements) -> None:
        self._check = ServerCheck(requirements)
        self._dtype, self._verify, self._run = requirements.dtype, requirements.verify, requirements.run
        self._architecture = requirements.model.architecture
        self._devices: dict[str, str] = {}
        self._broadcast: DistributedPush | None = None

    @property
    def _device(self) -> str:
        return next(iter(self._devices.values()), "cpu")

    async def check(self, http: EngineHttp) -> None:
        """See `ServerCheck.run`."""
        self._devices[http.url] = await self._check.run(http)
        if len(devices := {*self._devices.values()}) > 1:
            raise EngineError(
                "the rollout servers compute on different devices", got=sorted(devices), expected="one kind"
            )

    async def check_router(self, http: EngineHttp) -> None:
        """See `ServerCheck.through`."""
        await self._check.through(http)

    def verified(self, push: WeightPush) -> Mapping[str, str]:
        """See `verified_checksums`."""
        return verified_checksums(push, self._dtype, self._device, self._architecture)

    async def load(self, http: EngineHttp, delivery: Delivery) -> None:
        """See `load_folder`."""
        push, label = delivery.push, label_of(delivery.push.version, self._run)
        await load_folder(http, push, delivery.expected, delivery.keeping, label=label)

    async def receive(self, http: EngineHttp, version: int, shares: Sequence[Share]) -> None:
        """See `DistributedPush.load`; the first time the groups are formed."""
        if self._broadcast is None:
            self._broadcast = DistributedPush(http, device=self._device, architecture=self._architecture)
            await self._broadcast.join([share.meeting for share in shares])
        label = label_of(version, self._run)
        await self._broadcast.load(label, shares, dtype=self._dtype, verify=self._verify)

    async def loaded(self, http: EngineHttp) -> None:
        """See `ServerCheck.loaded`."""
        await self._check.loaded(http)

    async def close(self) -> None:
        """Dissolve the groups of broadcasts."""
        if self._broadcast is not None:
            await self._broadcast.close()
