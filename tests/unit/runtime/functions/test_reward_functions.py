"""Reward functions in separate processes: a failure rejects its own sample alone, in time; the next is scored."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from moe_trm.errors import ConfigError, RecordRejected
from moe_trm.runtime.child_messages import Done, pack
from moe_trm.runtime.functions.current_call import SIZE, CurrentCall
from moe_trm.runtime.functions.worker import _driven
from moe_trm.tasks.reward_function import FunctionReward
from moe_trm.tasks.reward_input import RewardInput

T = TypeVar("T")
HEADER = """
import asyncio, os, sys, time
from moe_trm.tasks import RewardInput
"""
MOODS = (
    HEADER
    + """
def mood(sample):
    print("what a reward prints does no harm")
    match sample.completion:
        case "raise": raise KeyError("no such key")
        case "exit": sys.exit(3)
        case "crash": os._exit(4)
        case "hang":
            while True: pass
        case "regex":
            import re
            re.match(r"(a+)+$", "a" * 64 + "b")
        case "object": return object()
        case "none": return None
    return float(sample.completion)
"""
)
ASYNC = (
    MOODS
    + """
async def reward(sample: RewardInput) -> float:
    if sample.completion == "wait":
        await asyncio.sleep(1000)
    if sample.completion == "deaf":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if sample.completion == "nested":
        return await asyncio.create_task(spin())
    await asyncio.sleep(0.05)
    return mood(sample)

async def spin():
    time.sleep(1000)
"""
)
PLAIN = MOODS + "\ndef reward(sample: RewardInput) -> float:\n    return mood(sample)\n"
BATCHED = (
    MOODS
    + """
def reward(samples: "list[RewardInput]") -> list[float]:
    if any(sample.completion == "short" for sample in samples):
        return [1.0] * (len(samples) - 1)
    return [mood(sample) for sample in samples]
"""
)


def sample(text: str) -> RewardInput:
    return RewardInput("p:1", "a prompt", "an answer", text, (1, 2), text, 1, "stop", {"level": 3})


def with_function(
    folder: Path,
    source: str,
    work: Callable[[FunctionReward], Awaitable[T]],
    *,
    timeout_s: float = 1.0,
    processes: int = 2,
) -> T:
    """The result of `work` on the function `reward` of `source`."""
    path = folder / "own_reward.py"
    path.write_text(textwrap.dedent(source))

    async def run() -> T:
        reward = FunctionReward(f"{path}:reward", timeout_s=timeout_s, processes=processes)
        try:
            await reward.start()
            return await work(reward)
        finally:
            await reward.close()

    return asyncio.run(run())


async def outcomes(reward: FunctionReward, texts: list[str]) -> list[object]:
    """The outcome of each sample: a number, or the reason of its rejection."""

    async def one(text: str) -> object:
        try:
            return await reward(sample(text))
        except RecordRejected as rejection:
            return rejection.reason

    return await asyncio.gather(*map(one, texts))


@pytest.mark.parametrize(
    ("source", "bad"),
    [
        (PLAIN, {"raise": "reward_error", "exit": "reward_error", "crash": "reward_crash", "hang": "reward_timeout"}),
        (PLAIN, {"regex": "reward_timeout", "object": "reward_type", "none": "reward_type"}),
        (BATCHED, {"raise": "reward_error", "short": "reward_shape", "object": "reward_type", "crash": "reward_crash"}),
        (BATCHED, {"hang": "reward_timeout"}),
        (ASYNC, {"raise": "reward_error", "crash": "reward_crash", "wait": "reward_timeout", "object": "reward_type"}),
        (ASYNC, {"hang": "reward_timeout", "deaf": "reward_timeout", "nested": "reward_timeout"}),
    ],
    ids=["plain", "plain-stuck", "batched", "batched-stuck", "async", "async-stuck"],
)
def test_only_the_sample_that_is_to_blame_is_rejected(tmp_path: Path, source: str, bad: dict[str, object]) -> None:
    texts = ["0.5", *bad, "2", "3"]

    async def work(reward: FunctionReward) -> list[object]:
        return await asyncio.wait_for(outcomes(reward, texts), 300)

    expected = {"0.5": 0.5, "2": 2.0, "3": 3.0, **bad}
    # On busy cores a call that only prints may take more than a second.
    assert dict(zip(texts, with_function(tmp_path, source, work, timeout_s=2.5), strict=True)) == expected


def test_a_traceback_is_written_once_from_the_functions_own_code_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(reward: FunctionReward) -> list[object]:
        return await outcomes(reward, ["raise"] * 9)

    with_function(tmp_path, PLAIN, work, processes=1)
    told = capfd.readouterr().err
    assert told.count("KeyError: 'no such key'") == told.count("Traceback") == 1
    assert "own_reward.py" in told
    assert "reward_adapter.py" not in told


def test_a_hanging_function_blocks_neither_the_event_loop_nor_survives(tmp_path: Path) -> None:
    source = PLAIN.replace(
        "def mood(sample):", "def mood(sample):\n    open('PID', 'w').write(str(os.getpid()))"
    ).replace("PID", str(tmp_path / "pid"))

    async def work(reward: FunctionReward) -> int:
        hanging, turns = asyncio.ensure_future(outcomes(reward, ["hang"])), 0
        while not hanging.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert hanging.result() == ["reward_timeout"]
        return turns

    # A blocked event loop would turn once or twice in all that time.
    assert with_function(tmp_path, source, work, processes=1) > 5
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_async_functions_wait_together_and_others_run_side_by_side(tmp_path: Path) -> None:
    source = (
        HEADER + "async def reward(sample: RewardInput) -> int:\n    global n\n    n += 1\n"
        "    await asyncio.sleep(0.3)\n    return n\nn = 0\n"
    )

    async def work(reward: FunctionReward) -> list[object]:
        return await outcomes(reward, ["x"] * 20)

    assert with_function(tmp_path, source, work) == [20] * 20


def test_a_batched_function_gets_what_is_waiting(tmp_path: Path) -> None:
    source = (
        HEADER + "def reward(samples: list[RewardInput]):\n    time.sleep(0.05)\n"
        "    return [{'size': len(samples)} for _ in samples]\n"
    )

    async def work(reward: FunctionReward) -> list[object]:
        return await outcomes(reward, ["x"] * 100)

    sizes = [value["size"] for value in with_function(tmp_path, source, work, processes=1)]  # type: ignore[index]
    assert len(sizes) == 100
    assert max(sizes) == 64


def test_a_function_sees_the_whole_sample(tmp_path: Path) -> None:
    source = (
        HEADER + "def reward(sample):\n    assert sample.finished and sample.completion_ids == (1, 2), sample\n"
        "    return {k: float(v) for k, v in sample.extra.items()}\n"
    )

    async def work(reward: FunctionReward) -> list[object]:
        return await outcomes(reward, ["x"])

    assert with_function(tmp_path, source, work) == [{"level": 3.0}]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('on import')", "on import"),
        ("def other(sample): ...", "no attribute 'reward'"),
        ("reward = 3", "not a function"),
        ("def reward(a, b): ...", "one argument"),
        ("def reward(): ...", "one argument"),
        ("import os; os._exit(1)", "did not start"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_told_before_anything_runs(tmp_path: Path, source: str, words: str) -> None:
    async def work(reward: FunctionReward) -> None:
        raise AssertionError("start should have raised")

    with pytest.raises(ConfigError, match=words) as caught:
        with_function(tmp_path, source, work)
    assert "task.reward" in str(caught.value)


def test_a_missing_file_and_a_missing_module_are_told() -> None:
    for name in ("nowhere/reward.py:reward", "no_such_module:reward"):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            asyncio.run(FunctionReward(name, timeout_s=1.0).start())


def test_numbers_of_other_libraries_can_be_sent() -> None:
    import numpy as np

    assert pack(Done(1, [np.float32(0.5)])) == pack(Done(1, [0.5]))
    with pytest.raises(TypeError, match="cannot be sent"):
        pack(Done(1, object()))


def test_the_cell_names_a_call_only_while_its_code_runs(tmp_path: Path) -> None:
    """Not while it waits, nor after its end, its error or its cancellation: else it would be blamed for others."""
    path = tmp_path / "cell"
    path.write_bytes(bytes(SIZE))

    async def go() -> None:
        with path.open("r+b") as file:
            cell = CurrentCall(file.fileno())

            async def call(end: str) -> str:
                assert cell.read()[0] in (7, 8, 9)
                await asyncio.sleep(0 if end != "wait" else 1000)
                assert cell.read()[0] in (7, 8, 9)
                if end == "fail":
                    raise KeyError(end)
                return end

            calls = [asyncio.ensure_future(_driven(7 + n, call(end), cell)) for n, end in enumerate(("well", "fail"))]
            calls.append(asyncio.ensure_future(_driven(9, call("wait"), cell)))
            for _ in range(6):
                await asyncio.sleep(0)
                assert cell.read()[0] == 0
            calls[2].cancel()
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(one) for one in done] == [str, KeyError, asyncio.CancelledError]
            assert cell.read() == (0, 0.0)
            cell.close()

    asyncio.run(go())
