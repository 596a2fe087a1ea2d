"""Servers that die, hang, fail and come back: choice of server, repeated requests, weights to prove first."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, patch

import pytest

from moe_trm.errors import EngineError, EngineLost, RecordRejected, SyncError
from moe_trm.rollout.servers import fleet as fleet_module
from moe_trm.rollout.servers.fleet import LATE_LOADS
from moe_trm.rollout.servers.http import HttpStatusError
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.rollout.servers.use_proof import ServerUnfit
from tests.unit.rollout.fake_servers import both_serve, in_loop, running
from tests.unit.rollout.local_app import body_from

pytestmark = pytest.mark.usefixtures("in_a_hurry")


@in_loop
async def test_the_least_loaded_server_is_asked() -> None:
    async with running(2) as (fleet, fakes, _):
        for fake in fakes:
            fake.free.clear()
        asks = [asyncio.ensure_future(body_from(fleet)) for _ in range(6)]
        await asyncio.sleep(0.05)
        assert [server.in_flight for server in fleet.servers] == [3, 3]
        for fake in fakes:
            fake.free.set()
        assert sorted(await asyncio.gather(*asks)) == [b"a 1"] * 3 + [b"b 1"] * 3


@in_loop
async def test_what_a_dead_server_owed_is_asked_elsewhere() -> None:
    async with running(2) as (fleet, fakes, _):
        fakes[0].free.clear()
        asks = [asyncio.ensure_future(body_from(fleet)) for _ in range(4)]
        await asyncio.sleep(0.05)
        await fakes[0].stop()
        assert await asyncio.gather(*asks) == [b"b 1"] * 4
        assert fleet.metrics()["rollout/servers"] == 1
        assert fleet.metrics()["rollout/reissued"] == 2
        fakes[0].free.set()


@in_loop
async def test_a_server_that_hangs_is_noticed_and_what_it_owed_is_asked_elsewhere() -> None:
    async with running(2) as (fleet, fakes, _):
        fakes[1].free.clear()
        asks = [asyncio.ensure_future(body_from(fleet)) for _ in range(4)]
        assert await asyncio.gather(*asks) == [b"a 1"] * 4
        fakes[1].free.set()
        await both_serve(fleet)
        assert fleet.metrics()["rollout/recoveries"] == 1


@in_loop
async def test_a_restarted_server_samples_only_after_it_was_given_the_newest_weights() -> None:
    async with running(1) as (fleet, fakes, newest):
        newest["version"] = 2
        await fleet.update(2)
        fakes[0].free.clear()
        ask = asyncio.ensure_future(body_from(fleet))
        await asyncio.sleep(0.05)
        await fakes[0].stop()
        fakes[0].label = "default"
        fakes[0].free.set()
        await asyncio.sleep(0.3)
        assert not ask.done()
        await fakes[0].start(fakes[0].port)
        assert await ask == b"a 2"


@in_loop
async def test_of_several_servers_an_answer_names_the_one_that_gave_it() -> None:
    async with running(2) as (fleet, _, _):
        answers = await asyncio.gather(*(fleet.ask({}) for _ in range(4)))
        assert sorted(answers) == [(b"a 1", 0), (b"a 1", 0), (b"b 1", 1), (b"b 1", 1)]
    async with running(1) as (fleet, _, _):
        assert await fleet.ask({}) == (b"a 1", None)


@in_loop
async def test_a_server_that_was_restarted_while_idle_is_given_its_weights_before_it_is_asked_again() -> None:
    async with running(1) as (fleet, fakes, _):
        fakes[0].label = "default"
        assert await body_from(fleet) == b"a default"
        await fleet.fence_restarted()
        assert await body_from(fleet) == b"a 1"
        await fleet.fence_restarted()
        assert fleet.metrics()["rollout/recoveries"] == 1


@in_loop
async def test_a_server_that_hangs_while_it_is_given_weights_holds_nobody_up() -> None:
    async with running(2) as (fleet, fakes, newest):
        load = fleet._load

        async def hanging(server: RemoteServer) -> None:
            if server is fleet.servers[0]:
                await fakes[0].free.wait()
            await load(server)

        fleet._load = hanging
        fakes[0].free.clear()
        newest["version"] = 2
        await fleet.update(2)
        assert fleet.metrics()["rollout/servers"] == 1
        assert await body_from(fleet) == b"b 2"
        fakes[0].free.set()
        await both_serve(fleet)
        assert fakes[0].label == "2"


@in_loop
async def test_a_storm_of_errors_passes_without_a_sample_lost() -> None:
    async with running(1) as (fleet, fakes, _):
        fakes[0].fails = True
        asks = [asyncio.ensure_future(body_from(fleet)) for _ in range(5)]
        await asyncio.sleep(0.1)
        fakes[0].fails = False
        assert await asyncio.gather(*asks) == [b"a 1"] * 5


@in_loop
async def test_a_sample_that_fails_on_every_server_is_rejected_and_not_asked_for_ever() -> None:
    async with running(1) as (fleet, fakes, _):
        fakes[0].fails = True
        with pytest.raises(RecordRejected) as caught:
            await body_from(fleet)
        assert caught.value.reason == "engine_failed"
        assert fakes[0].asked == fleet_module.REISSUES + 1


@in_loop
async def test_a_request_that_a_server_refuses_costs_its_own_sample_at_once() -> None:
    """With masks SGLang answers 500 to what is too long."""
    async with running(1) as (fleet, fakes, _):
        assert await body_from(fleet) == b"a 1"
        fakes[0].fails, refused = True, "Requested token count exceeds the model's maximum context length of 8 tokens."
        for fakes[0].status, fakes[0].says in ((400, "no"), (413, ""), (400, refused), (500, refused)):
            asked = fakes[0].asked
            with pytest.raises(RecordRejected) as caught:
                await body_from(fleet)
            assert (caught.value.reason, fakes[0].asked) == ("refused", asked + 1)
            assert fakes[0].says in str(caught.value)
        fakes[0].status, fakes[0].says = 401, ""
        with pytest.raises(HttpStatusError, match="same key"):
            await body_from(fleet)
        assert fleet.metrics()["rollout/losses"] == 0


@in_loop
async def test_a_server_that_refuses_every_request_ends_the_run() -> None:
    async with running(1) as (fleet, fakes, _):
        fakes[0].fails, fakes[0].status = True, 400
        asks = [body_from(fleet) for _ in range(fleet_module.MOST_REFUSED + 1)]
        outcomes = await asyncio.gather(*asks, return_exceptions=True)
        assert sum(isinstance(outcome, HttpStatusError) for outcome in outcomes) == 2


@in_loop
async def test_a_server_is_out_of_service_when_it_is_silent_twice_in_turn() -> None:
    async with running(1) as (fleet, _, _):
        fleet._watch.cancel()
        server, answers = fleet.servers[0], [False, True, False, False]
        server.updating = True
        fenced = []
        with patch.object(server, "alive", AsyncMock(side_effect=answers)):
            for _ in answers:
                await fleet._look(server)
                fenced.append(server.fenced)
        assert fenced == [False, False, False, True]


@in_loop
async def test_a_page_of_somebody_else_is_no_answer_of_a_server() -> None:
    """As from a proxy before a server that is away: status 200, and HTML. Whoever asks again finds the server."""
    async with running(1) as (fleet, fakes, _):
        fakes[0].label = "x"
        http = fleet.servers[0].http
        with patch.object(http, "request", AsyncMock(return_value=b"<html>")):
            with pytest.raises(EngineLost, match="something else"):
                await fleet.servers[0].serves_proved(1.0)
            for ask in (http.get("/x"), http.post("/x", {})):
                with pytest.raises(EngineLost, match="something else"):
                    await ask
        assert not await fleet.servers[0].serves_proved(1.0)


@in_loop
async def test_a_sample_that_is_not_finished_in_time_is_tried_twice() -> None:
    async with running(1, timeout_s=0.1) as (fleet, fakes, _):
        fakes[0].slow = True
        with pytest.raises(RecordRejected) as caught:
            await body_from(fleet)
        assert caught.value.reason == "engine_failed"
        assert fakes[0].asked == 2
        assert fleet.metrics()["rollout/servers"] == 1


@in_loop
async def test_the_run_is_given_up_when_no_server_comes_back() -> None:
    async with running(1, patience_s=0.3) as (fleet, fakes, _):
        await fakes[0].stop()
        with pytest.raises(EngineError, match="no rollout server came back"):
            await body_from(fleet)


@in_loop
async def test_wrong_weights_end_the_run_also_on_a_server_that_came_back() -> None:
    async with running(1) as (fleet, fakes, _):

        async def load_wrong(server: RemoteServer) -> None:
            raise SyncError("checksums differ")

        fleet._load = load_wrong
        await fakes[0].stop()
        fakes[0].label = "default"
        ask = asyncio.ensure_future(body_from(fleet))
        await asyncio.sleep(0.1)
        await fakes[0].start(fakes[0].port)
        with pytest.raises(SyncError, match="checksums differ"):
            await ask


@in_loop
async def test_a_server_that_computes_with_other_weights_is_left_out_for_good_and_the_last_one_ends_the_run() -> None:
    async with running(2) as (fleet, fakes, newest):
        newest |= {"version": 2, fakes[0].url: "unfit"}
        await fleet.update(2)
        assert [await body_from(fleet) for _ in range(3)] == [b"b 2"] * 3
        newest.pop(fakes[0].url)
        await asyncio.sleep(0.2)
        assert fleet.servers[0].fenced
        assert (fleet.lost, fleet.recovered) == (1, 0)
        assert "stale" in fleet.states()[0].why
        newest |= {"version": 3, fakes[1].url: "unfit"}
        with pytest.raises(ServerUnfit, match="other weights"):
            await fleet.update(3)


@in_loop
async def test_a_server_that_comes_back_with_other_weights_is_left_out_and_the_last_one_ends_the_run() -> None:
    async with running(1) as (fleet, fakes, newest):
        newest[fakes[0].url] = "unfit"
        fakes[0].label = "default"
        await fleet.fence_restarted()
        with pytest.raises(ServerUnfit, match="other weights"):
            await body_from(fleet)


@in_loop
async def test_a_server_that_comes_back_too_late_for_its_push_is_given_the_next_one() -> None:
    """Its files are deleted meanwhile, which is no fault of the weights. Another server samples all the time."""
    async with running(2) as (fleet, fakes, newest):
        load, begun, deleted = fleet._load, asyncio.Event(), asyncio.Event()

        async def slow(server: RemoteServer) -> None:
            if server.http.url == fakes[0].url and not deleted.is_set():
                begun.set()
                await deleted.wait()
                raise SyncError("the engine did not load the push")
            await load(server)

        fleet._load = slow
        fakes[0].label = "default"
        await fleet.fence_restarted()
        await begun.wait()
        newest["version"] = 2
        await fleet.update(2)
        assert await body_from(fleet) == b"b 2"
        deleted.set()
        await both_serve(fleet)
        assert fakes[0].label == "2"


@pytest.mark.parametrize("deleted", [True, False])
def test_a_server_that_never_catches_up_with_pushes_leaves_the_fleet_after_three(deleted: bool) -> None:
    """Its files are deleted before it has loaded them, or it loads what is no longer the newest."""

    async def work() -> None:
        async with running(2) as (fleet, fakes, newest):
            load, loads = fleet._load, [0]

            async def slow(server: RemoteServer) -> None:
                if server.http.url != fakes[0].url:
                    await load(server)
                    return
                loads[0] += 1
                version = newest["version"]
                newest["version"] = version + 1
                await fleet.update(version + 1)
                if deleted:
                    raise SyncError("the engine did not load the push")
                server.version = version

            fleet._load = slow
            fakes[0].label = "default"
            await fleet.fence_restarted()
            while fleet.servers[0] not in fleet._unfit:
                await asyncio.sleep(0.02)
            assert loads == [LATE_LOADS]
            assert "too slow for the weight pushes" in fleet.states()[0].why
            assert await body_from(fleet) == b"b 4"

    in_loop(work)()


@in_loop
async def test_a_push_waits_for_what_runs_or_ends_it() -> None:
    for interrupt in (False, True):
        async with running(1, interrupt=interrupt) as (fleet, fakes, newest):
            fakes[0].slow = True
            ask = asyncio.ensure_future(body_from(fleet))
            await asyncio.sleep(0.05)
            newest["version"] = 2
            push = asyncio.ensure_future(fleet.update(2))
            await asyncio.sleep(0.1)
            assert push.done() is interrupt
            fakes[0].aborted.set()
            await push
            assert await ask == b"a 1"


@in_loop
async def test_servers_that_load_in_turn_go_on_under_the_version_before() -> None:
    """While the first drains and loads, the second answers with its old weights; then it is its own turn."""
    async with running(2, rolling=True) as (fleet, _, newest):
        load, may_load = fleet._load, asyncio.Event()

        async def patient(server: RemoteServer) -> None:
            await may_load.wait()
            await load(server)

        fleet._load = patient
        newest["version"] = 2
        update = asyncio.ensure_future(fleet.update(2))
        await asyncio.sleep(0.05)
        assert [server.updating for server in fleet.servers] == [True, False]
        assert [await body_from(fleet) for _ in range(3)] == [b"b 1"] * 3
        await fleet.fence_restarted()  # a server whose turn has not come is not one that was restarted
        may_load.set()
        await update
        assert [server.version for server in fleet.servers] == [2, 2]
        assert {await body_from(fleet) for _ in range(4)} <= {b"a 2", b"b 2"}
        assert fleet.metrics()["rollout/losses"] == 0


@in_loop
async def test_a_server_that_dies_before_its_turn_is_given_the_newest_weights_when_it_is_back() -> None:
    async with running(2, rolling=True) as (fleet, fakes, newest):
        load, may_load = fleet._load, asyncio.Event()

        async def patient(server: RemoteServer) -> None:
            if server is fleet.servers[0]:
                await may_load.wait()
            await load(server)

        fleet._load = patient
        newest["version"] = 2
        update = asyncio.ensure_future(fleet.update(2))
        await asyncio.sleep(0.05)
        await fakes[1].stop()
        fakes[1].label = "default"
        ask = asyncio.ensure_future(body_from(fleet))
        await asyncio.sleep(0.1)
        may_load.set()
        assert await ask == b"a 2"
        await update
        await fakes[1].start(fakes[1].port)
        await both_serve(fleet)
        assert [fake.label for fake in fakes] == ["2", "2"]
