"""SGLang's own router in front of the servers: it chooses a server for each sample, from a list that it gets.

Only samples go through it. Weights, proofs and health are matters of each server: a request that a load balancer gives
to one of them reaches no other.

Source: smg 1.13.0 (the former sglang-router), `GET`, `POST` and `DELETE /workers`; both names have the same interface.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from moe_trm.errors import EngineLost
from moe_trm.rollout.servers.arrival import Arrival
from moe_trm.rollout.servers.endpoint import Endpoint
from moe_trm.rollout.servers.http import EngineHttp, HttpStatusError, parsed
from moe_trm.runtime.patience import patient

POLL_S = 0.05
"""Pause between two looks at what the router made of an order, which it only queues."""
ORDER_S = 5.0
"""Longest wait for it."""
ANSWER_S = 10.0
"""Longest time in which a router that is there answers for itself."""
DONE_ALREADY = (404, 409)
"""It is not on the list any more; it is on the list, or is being taken off."""

log = logging.getLogger(__name__)


class Router:
    """Keeps a router's list of servers equal to those that may sample. Not thread-safe: one event loop owns it.

    `api_key` is the servers', which the router needs for its own questions. Samples are asked for at `endpoint`.
    """

    def __init__(self, http: EngineHttp, api_key: str | None) -> None:
        self.endpoint = Endpoint(http)
        self._http, self._api_key = http, api_key
        self._reported_urls: frozenset[str] | None = None
        self._lost_at: float | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def lost_s(self) -> float:
        """Seconds for which it has not been there, or has not obeyed."""
        return 0.0 if self._lost_at is None else _clock() - self._lost_at

    async def started(self, limit_s: float) -> None:
        """Return when it answers; it may be on its way for `limit_s`. Raises `EngineLost`."""
        await Arrival(self._http.url, limit_s).of(self._listed)

    def forget(self) -> None:
        """Look again before the next sample: the router may have been started again, or told otherwise."""
        self._reported_urls = None

    async def give_up_if_stuck(self) -> None:
        """Samples that a router holds which does not even say whom it knows are given up, to be asked for again."""
        try:
            await self._listed()
        except EngineLost as error:
            log.warning("router %s: %s (%s)", self._http.url, error.what, error.got)
            self.endpoint.give_up()

    async def choose_among(self, urls: frozenset[str], *, every: bool = False) -> None:
        """Wait until the router gives samples to one of these servers (`every`: to each) and to no other. It adds the
        rest later.

        Raises `EngineLost` when the router does not answer or does not obey.
        """
        async with self._one_at_a_time:
            if urls == self._reported_urls:
                return
            self._lost_at = _clock() if self._lost_at is None else self._lost_at
            await self._tell(urls, every)
            self._reported_urls, self._lost_at = urls, None

    async def _tell(self, urls: frozenset[str], every: bool) -> None:
        deadline = _clock() + patient(ORDER_S)
        while True:
            listed = await self._listed()
            able = {url for url, worker in listed.items() if _takes_samples(worker)}
            for url in able - urls:
                await self._order("DELETE", f"/workers/{listed[url]['id']}")
            for url in urls - set(listed):
                await self._order("POST", "/workers", {"url": url, "api_key": self._api_key})
            if able == urls or (able and able <= urls and not every):
                return
            if _clock() > deadline:
                raise EngineLost(
                    "the router does not choose among the servers that it was given",
                    where=self._http.url,
                    got=sorted(able),
                    expected=sorted(urls),
                    fix="Its log tells why; it must not discover servers by itself.",
                )
            await asyncio.sleep(POLL_S)

    async def _listed(self) -> dict[str, dict[str, Any]]:
        try:
            answer = parsed(await self._http.request("GET", "/workers", timeout_s=patient(ANSWER_S)), self._http.url)
        except EngineLost as error:
            raise EngineLost(
                "the router is not there",
                where=self._http.url,
                got=error.got,
                expected="SGLang's router",
                fix=(
                    "Start it with `python -m launch.router CONFIG` and correct rollout.router, or leave "
                    "rollout.router out."
                ),
            ) from error
        return {str(worker["url"]).rstrip("/"): worker for worker in answer["workers"]}

    async def _order(self, method: str, path: str, body: dict[str, object] | None = None) -> None:
        log.info("router %s: %s %s", self._http.url, method, body["url"] if body else path)
        try:
            await self._http.request(method, path, body, timeout_s=patient(ANSWER_S))
        except HttpStatusError as error:
            if error.status not in DONE_ALREADY:
                raise


def _takes_samples(worker: dict[str, Any]) -> bool:
    return bool(worker["is_healthy"]) and worker.get("status", "ready") == "ready"


def _clock() -> float:
    return asyncio.get_running_loop().time()
