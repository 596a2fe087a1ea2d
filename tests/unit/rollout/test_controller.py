"""The controller with a fake engine: rejections, books, order. The real engine's part is in tests/integration."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from zmq import Socket
from zmq.constants import SocketType
from zmq.sugar.context import Context

from moe_trm.config.engines import EngineTraits
from moe_trm.config.schema import AdvantageConfig, Config
from moe_trm.errors import REFUSED, ControllerError, EngineError
from moe_trm.observe.lines import ProgressLines
from moe_trm.observe.panel import LivePanel
from moe_trm.observe.report.commands import write
from moe_trm.rollout import client as client_module
from moe_trm.rollout.client import RolloutClient
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.service import ControllerReply, ControllerService, Start
from moe_trm.sync.disk import write_shard
from moe_trm.sync.manifest import WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.tasks import RewardInput
from moe_trm.types import SamplingParams, ServerState, TrainBatch
from tests.unit.advantages import of_step
from tests.unit.observe.report.page_reader import PageReader
from tests.unit.records import LAYERS, make_record
from tests.unit.rollout.fake_engine import CONFIG, FakeEngine, FakeTask, controller_with, plan, rows_of


def test_rejected_records_are_counted_and_the_rest_trains() -> None:
    shares = plan(FakeEngine(reject=frozenset({1, 7})))
    metrics = shares[0].metrics
    assert metrics["ledger/issued"] == 16
    assert metrics["records/rejected/route_rows"] == 2
    rewards = metrics.get("records/rejected/reward_error", 0.0)
    assert metrics["ledger/trained"] == len(rows_of(shares)) == 16 - 2 - rewards
    assert metrics["ledger/queued"] == metrics["ledger/in_flight"] == 0
    assert not {1, 7} & {row.record.sample_id for row in rows_of(shares)}


def test_a_step_without_a_record_says_why_the_first_was_rejected() -> None:
    with pytest.raises(ControllerError, match="no record of this step was accepted") as caught:
        plan(FakeEngine(reject=frozenset(range(10_000))))
    for told in ("payload cut short", "route_rows"):
        assert told in str(caught.value)


def test_a_reward_that_raises_rejects_its_record_only() -> None:
    shares = plan(FakeEngine())
    with_bad_token = [i for i in range(16) if 31 in make_record(sample_id=i, num_sampled=3 + i % 5).tokens[4:]]
    assert with_bad_token, "the fixture should contain a token the reward refuses"
    assert shares[0].metrics["records/rejected/reward_error"] == len(with_bad_token)
    assert not set(with_bad_token) & {row.record.sample_id for row in rows_of(shares)}


@pytest.mark.parametrize("lone", [None, "reward", "zero"])
def test_a_sample_whose_group_was_rejected_gets_what_the_setting_says(lone: str | None) -> None:
    """The first sample of each prompt is the only one that is left."""
    config = CONFIG.model_copy(update={"advantage": advantage(name="rloo", lone_sample=lone)})
    shares = plan(FakeEngine(frozenset(i for i in range(99) if i % 4)), config)
    rows, found = rows_of(shares), of_step(shares, config)
    assert len({row.record.group_id for row in rows}) == len(rows) > 1
    assert any(row.record.reward for row in rows)
    for row in rows:
        assert set(found[row.record.row_id]) == {row.record.reward if lone == "reward" else 0.0}


def test_gdpo_whitens_over_the_tokens_of_the_step() -> None:
    class Parts(FakeTask):
        async def reward(self, sample: RewardInput) -> object:
            return {"odd": float(sum(sample.completion_ids) % 2), "long": len(sample.completion_ids) / 10}

    config = CONFIG.model_copy(update={"advantage": advantage(name="gdpo")})

    async def go() -> list[TrainBatch]:
        controller = RolloutController(config, FakeEngine(), Parts(), SamplingParams())
        await controller.load_weights(WeightPush(0, "", ()))
        return await controller.plan(1, data_size=2)

    found = of_step(asyncio.run(go()), config)
    assert len({len(own) for own in found.values()}) > 1
    tokens = np.concatenate([*found.values()])
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.std(ddof=1) == pytest.approx(1, abs=1e-4)


def advantage(**settings: str | None) -> AdvantageConfig:
    return AdvantageConfig.model_validate(settings)


def test_shuffled_rewards_keep_their_values_but_not_their_owners() -> None:
    config = CONFIG.model_copy(update={"task": CONFIG.task.model_copy(update={"shuffle_rewards": True})})
    plain, shuffled = plan(FakeEngine()), plan(FakeEngine(), config)
    rewards = [
        {row.record.sample_id: row.record.reward or 0.0 for row in rows_of(shares)} for shares in (plain, shuffled)
    ]
    assert sorted(rewards[0].values()) == sorted(rewards[1].values())
    assert rewards[0] != rewards[1]


def test_evaluation_counts_unfinished_answers_as_wrong() -> None:
    metrics = asyncio.run(controller_with(FakeEngine()).evaluate())
    assert metrics == {
        "eval/accuracy": 0.5,
        "eval/accuracy_se": pytest.approx((0.5 * 0.5 / 8) ** 0.5),
        "eval/finished_fraction": 0.75,
        "eval/length_mean": 2.0,
        "eval/prompts": 4.0,
    }


def test_a_mean_of_rewards_of_ones_own_is_called_no_accuracy(tmp_path: Path) -> None:
    """Neither by the controller nor by any view of its metrics."""
    task = CONFIG.task.model_copy(update={"reward": "mine.py:reward"})
    metrics = asyncio.run(controller_with(FakeEngine(), CONFIG.model_copy(update={"task": task})).evaluate())
    assert metrics["eval/reward"] == 0.5
    lines, screen = io.StringIO(), io.StringIO()
    ProgressLines(1, lines).write(0, metrics)
    panel = LivePanel("run", 1, Console(file=screen, width=100))
    panel.write(0, metrics)
    panel.close()
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, **metrics}) + "\n")
    page = write([tmp_path]).read_text()
    assert "EVAL REWARD 0.500" in lines.getvalue()
    for told in (*metrics, lines.getvalue(), screen.getvalue(), PageReader(page).text):
        assert "accuracy" not in told.lower()
    assert "0.500" in screen.getvalue()


def test_evaluation_changes_nothing_of_the_samples_around_it() -> None:
    """The same steps with and without evaluations between them, and while the next groups are being made."""

    async def go(config: Config, *, evaluating: bool) -> list[Any]:
        engine = FakeEngine()
        controller = controller_with(engine, config)
        steps = []
        for step in (1, 2, 3):
            await controller.load_weights(WeightPush(step - 1, "", ()))
            if evaluating:
                assert (await controller.evaluate())["eval/accuracy"] == 0.5
            [batch] = await controller.plan(step, data_size=1)
            timed = ("time/", "rollout/tokens_per_s")
            metrics = {name: value for name, value in batch.metrics.items() if not name.startswith(timed)}
            steps.append(
                (
                    [
                        [row.record.sample_id for row in micro.rows]
                        for mini in batch.mini_batches
                        for micro in mini.micro_batches
                    ],
                    metrics,
                )
            )
        await controller.close()
        return steps

    assert asyncio.run(go(CONFIG, evaluating=True)) == asyncio.run(go(CONFIG, evaluating=False))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def connect() -> Iterator[Callable[..., RolloutClient]]:
    """Makes clients and closes their sockets at the end."""
    # Ranks are processes of a run and threads here: msgspec reads a type for the first time without a lock.
    msgspec.msgpack.Decoder(ControllerReply, dec_hook=lambda kind, value: value)
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(RolloutClient(*args, **kwargs))


def serve(engine: FakeEngine, endpoint: str, checkpoint: Path) -> threading.Thread:
    async def go() -> None:
        start = Start(endpoint, "right key", {}, None)
        await ControllerService(controller_with(engine), start, str(checkpoint)).serve()

    thread = threading.Thread(target=lambda: asyncio.run(go()), daemon=True)
    thread.start()
    return thread


def test_ranks_get_their_shares_over_the_socket(
    tmp_path: Path, checkpoint: Path, connect: Callable[..., RolloutClient]
) -> None:
    endpoint, engine = f"ipc://{tmp_path}/s", FakeEngine()
    thread = serve(engine, endpoint, checkpoint)
    clients = [connect(endpoint, "right key", ranks=(rank, 2), data=(rank, 2)) for rank in range(2)]
    directory = tmp_path / "push"
    entries = [
        write_shard(directory / f"shard-{rank}.safetensors", [(f"tensor.{rank}", torch.ones(2))], Rounding("float32"))
        for rank in range(2)
    ]
    pushes = [
        threading.Thread(target=client.push, args=(0, own), kwargs={"directory": str(directory)})
        for client, own in zip(clients, entries, strict=True)
    ]
    for push in pushes:
        push.start()
    for push in pushes:
        push.join(20)
    assert [sorted(entry.name for entry in push.tensors) for push in engine.pushes] == [["tensor.0", "tensor.1"]]
    shares = [client.next_batch(1, LAYERS[:2]) for client in clients]
    ids = [{row.record.sample_id for row in rows_of([share])} for share in shares]
    assert ids[0]
    assert not ids[0] & ids[1]
    for row in rows_of(shares):
        assert row.record.routes.layer_ids == LAYERS[:2]
        row.record.routes.check_tokens(row.record.tokens, row.record.origin)  # the engine bound them to tokens alone
        np.testing.assert_array_equal(
            row.record.routes.experts,
            make_record(sample_id=row.record.sample_id, num_sampled=row.record.num_sampled).routes.experts[:, :2],
        )
    assert clients[0].evaluate(0)["eval/accuracy"] == 0.5
    clients[0]._ask("stop")
    thread.join(10)
    assert not thread.is_alive()


def test_a_rank_that_waits_is_told_of_the_servers_and_of_their_return(
    tmp_path: Path, checkpoint: Path, connect: Callable[..., RolloutClient]
) -> None:
    """Also when the server comes back just before the answer: the last state told is that after it."""
    lost, free = (ServerState("http://one", 1.0, "gone"),), threading.Event()

    class Waiting(FakeEngine):
        traits = EngineTraits(has_servers=True)

        def servers(self) -> tuple[ServerState, ...]:
            return (ServerState("http://one"),) if free.is_set() else lost

        async def load_weights(self, push: WeightPush) -> None:
            await asyncio.to_thread(free.wait, 20)

    told: list[tuple[ServerState, ...]] = []

    def watch(states: tuple[ServerState, ...]) -> None:
        told.append(states)
        if len(told) == 2:
            free.set()

    endpoint = f"ipc://{tmp_path}/s"
    thread = serve(Waiting(), endpoint, checkpoint)
    client = connect(endpoint, "right key", ranks=(0, 1), data=(0, 1), watch=watch)
    entries = write_shard(tmp_path / "push" / "shard-0.safetensors", [("tensor.0", torch.ones(2))], Rounding("float32"))
    client.push(0, entries, directory=str(tmp_path / "push"))
    assert told[:2] == [lost, lost]
    assert told[-1] == (ServerState("http://one"),)
    client._ask("stop")
    thread.join(10)
    assert not thread.is_alive()


class Loading(FakeEngine):
    """Its server loads until it is let, and then works or fails."""

    traits = EngineTraits(has_servers=True)

    def __init__(self, failure: EngineError | None = None) -> None:
        super().__init__()
        self.free, self._failure = threading.Event(), failure

    async def start(self) -> None:
        await asyncio.to_thread(self.free.wait, 60)
        if self._failure is not None:
            raise self._failure

    def servers(self) -> tuple[ServerState, ...]:
        return (ServerState("http://one", awaited_s=1.0, limit_s=9.0),)


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_wait_for_an_engine_that_loads_and_are_told_of_it(
    tmp_path: Path, checkpoint: Path, connect: Callable[..., RolloutClient], fails: bool
) -> None:
    engine, told = Loading(EngineError("another model") if fails else None), list[tuple[ServerState, ...]]()

    def watch(states: tuple[ServerState, ...]) -> None:
        told.append(states)
        engine.free.set()

    endpoint = f"ipc://{tmp_path}/s"
    with pytest.raises(EngineError, match="another model") if fails else nullcontext():
        serving = asyncio.new_event_loop()
        service = ControllerService(controller_with(engine), Start(endpoint, "right key", {}, None), str(checkpoint))
        ended = serving.create_task(service.serve())
        thread = threading.Thread(target=lambda: serving.run_until_complete(asyncio.wait([ended])), daemon=True)
        thread.start()
        client = connect(endpoint, "right key", ranks=(0, 1), data=(0, 1), watch=watch)
        with pytest.raises(ControllerError, match="another model") if fails else nullcontext():
            client.begin()
        if not fails:
            client._ask("stop")
        thread.join(60)
        serving.close()
        ended.result()
    assert told[0] == engine.servers()


@pytest.mark.parametrize(
    ("met", "asked"),
    [(False, False), (True, False), (True, True)],
    ids=["never there", "killed", "killed and asked to stop"],
)
def test_a_rank_whose_controller_is_gone_ends(
    tmp_path: Path, connect: Callable[..., RolloutClient], monkeypatch: pytest.MonkeyPatch, met: bool, asked: bool
) -> None:
    """Only the first rank has the controller as its child and sees it end; the others have their connection.

    One that is asked to stop meanwhile has no patience.
    """
    monkeypatch.setattr(client_module, "FIRST_CONTACT_S", 3600.0 if met else 0.1)
    monkeypatch.setattr(client_module, "LOST_S", 3600.0 if asked else 0.1)
    endpoint = f"ipc://{tmp_path}/s"
    answering: Socket[bytes] = Context.instance().socket(SocketType.ROUTER)
    if met:
        answering.bind(endpoint)

    def hear() -> None:
        if met:
            answering.recv_multipart()
        answering.close()

    client = connect(endpoint, "right key", ranks=(1, 2), data=(1, 2), asked=lambda: asked)
    hearing = threading.Thread(target=hear)
    hearing.start()
    with pytest.raises(ControllerError, match="the controller is gone") as told:
        client.begin()
    assert told.value.may_pass
    hearing.join()


def test_a_wrong_key_is_refused_and_the_service_stays_up(
    tmp_path: Path, checkpoint: Path, connect: Callable[..., RolloutClient]
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    thread = serve(FakeEngine(), endpoint, checkpoint)
    with pytest.raises(ControllerError, match="wrong controller key") as refused:
        connect(endpoint, "guessed key", ranks=(0, 1), data=(0, 1)).evaluate(0)
    assert refused.value.exit_status == REFUSED
    client = connect(endpoint, "right key", ranks=(0, 1), data=(0, 1))
    assert client.evaluate(0)
    client._ask("stop")
    thread.join(10)


def test_a_refused_push_reaches_the_rank_as_an_error(
    tmp_path: Path, checkpoint: Path, connect: Callable[..., RolloutClient]
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    serve(FakeEngine(refuse_push=True), endpoint, checkpoint)
    client = connect(endpoint, "right key", ranks=(0, 1), data=(0, 1))
    (tmp_path / "push").mkdir()
    with pytest.raises(ControllerError, match="SyncError: checksums differ") as refused:
        client.push(0, (), directory=str(tmp_path / "push"))
    assert refused.value.may_pass, "another push may arrive"
    client._ask("stop")
