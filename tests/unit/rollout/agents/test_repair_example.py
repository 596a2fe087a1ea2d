"""The example of repairs: samples in sandboxes, among them some whose policy does what it should not."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_trm.config.schema import TaskConfig
from moe_trm.models.tiny.checkpoint import make_checkpoint
from moe_trm.rollout.agents.command_host import CommandHost
from moe_trm.rollout.agents.live_session import LiveSession, Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.agents.tree import SessionTree
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.tasks.build import build_task
from tests.unit.conftest import SMALL
from tests.unit.rollout.agents.served import PARAMS, TOKENS
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.test_tree import check_record

EXAMPLE = Path(__file__).parents[4] / "examples" / "repair"
ROW = next(json.loads(line) for line in (EXAMPLE / "repairs.jsonl").read_text().splitlines())
# Handed over as text: under root, a sandbox's user may not be able to read the checkout.
AGENT = ["python3", "-c", (EXAMPLE / "agent.py").read_text(), "{task}"]
REPAIR = "sed -i s/sum.-PRICES/sum\\(PRICES/ shop.py"
MARK = "moe-trm-left-the-sandbox"
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/")
DEEDS: dict[str, tuple[list[str], float]] = {
    "repairs": (["cat *.py", REPAIR, "python3 -m unittest -q"], 1.0),
    "gives up": ([], 0.0),
    "hangs": (["trap '' TERM INT; (while :; do sleep 1; done) & while :; do sleep 1; done"], 0.0),
    "fills the disk": (["head -c 1G /dev/zero > one; i=0; while head -c 8M /dev/zero > $i; do i=$((i+1)); done"], 0.0),
    "forks without end": (["f() { f | f & }; f; sleep 1; f"], 0.0),
    "kills its parent": (["kill -9 $PPID; kill -9 1; kill -9 -1", REPAIR], 0.0),
    "kills the first process": (["kill -9 1; kill -INT 1; kill -TERM 1", REPAIR], 1.0),
    "takes memory": (["python3 -c 'bytearray(4 << 30)' || echo none", REPAIR], 1.0),
    "looks for the reward": (
        ["for f in $(find / -xdev -name reward.json 2>/dev/null) $MOE_TRM_REWARD; do echo 1 > $f; done"],
        0.0,
    ),
    "writes elsewhere": ([*(f"echo > {place}/{MARK}" for place in PLACES), REPAIR], 1.0),
    "changes the test": (["echo > test_it.py; ln -sf /etc/passwd test_it.py"], 0.0),
    # It does nothing until the test is written again, which is after the agent.
    "leaves a program": (
        ["rm test_it.py; (until [ -e test_it.py ]; do sleep .01; done; echo > shop.py) >/dev/null 2>&1 &", REPAIR],
        1.0,
    ),
}
ENDED = ("hangs", "forks without end")
"""These are worth nothing, however soon they are ended. The others have time, whatever else the machine does."""
SOON, LATER = ("--seconds", "4"), ("--seconds", "400", "--test-seconds", "200")


def needs_namespaces() -> None:
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    command = ["unshare", "--net", "--pid", "--mount", "--ipc", "--mount-proc", "--fork", *user, "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is missing")
    if done.returncode:
        pytest.skip(f"namespaces cannot be made here: {done.stderr.strip()}")


def policy() -> Policy:
    """Writes the commands of the deed that the task names, one in each answer."""

    def speak(context: Sequence[int]) -> list[int]:
        text = TOKENS.decode_all(context)
        deed = text.partition("Deed: ")[2].partition(".")[0]
        commands = DEEDS[deed][0]
        place = text.count("exit status") + text.count("ended after")
        said = f"```sh\n{commands[place]}\n```" if place < len(commands) else "Done."
        return [*TOKENS.encode_plain(said), TOKENS.stop_token_ids[0]]

    return Policy(SpeakingEngine(speak), TOKENS, AnswerReader(), Limits(12, 50_000))


def samples(deeds: Sequence[str], most_at_once: int) -> list[tuple[Any, SessionTree]]:
    """Reward and conversation of one sample for each deed, all at the same time."""

    async def go() -> list[tuple[Any, SessionTree]]:
        program = [sys.executable, str(EXAMPLE / "sample.py")]
        soon, later = (
            CommandHost(
                [*program, *options, "--", *AGENT],
                limit_s=900.0,
                most_at_once=most_at_once,
                max_output_bytes=1 << 20,
            )
            for options in (SOON, LATER)
        )
        server = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 20)
        await soon.start()
        await later.start()
        await server.start()
        shared = policy()

        async def sample(deed: str) -> tuple[Any, SessionTree]:
            session = LiveSession(shared, replace(PARAMS, max_new_tokens=4000), bare=False)
            address = server.open(session)
            text = f"{ROW['prompt']} Deed: {deed}."
            prompt: Mapping[str, Any] = {"prompt_id": deed, "text": text, "messages": [], "answer": "", "extra": ROW}
            payload = {"base_url": address.base_url, "api_key": address.api_key, "prompt": prompt}
            host = soon if deed in ENDED else later
            try:
                return await host.call(payload, lambda: nothing), session.tree
            finally:
                server.end(address)

        try:
            return await asyncio.gather(*map(sample, deeds))
        finally:
            await soon.close()
            await later.close()
            await server.close()

    async def nothing(op: str, arguments: Mapping[str, Any]) -> None:
        raise AssertionError(op)

    return asyncio.run(asyncio.wait_for(go(), 1000))


def check(results: Sequence[tuple[Any, SessionTree]], deeds: Sequence[str]) -> None:
    rewards = [reward for reward, _ in results]
    assert dict(zip(deeds, rewards, strict=True)) == {deed: DEEDS[deed][1] for deed in deeds}
    for deed, (_, tree) in zip(deeds, results, strict=True):
        # On a busy machine four seconds may end an agent before it has asked.
        assert tree.nodes or deed in ENDED
        for leaf in tree.leaves():
            check_record(leaf)
    assert not any(AGENT[2] in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    assert not [place for place in PLACES if (Path(place) / MARK).exists()]


@pytest.mark.long
def test_what_a_policy_does_costs_its_own_sample_only() -> None:
    needs_namespaces()
    check(samples([*DEEDS], 6), [*DEEDS])


def passes(row: Mapping[str, Any], command: str) -> bool:
    """True if the test of a row passes after a command; else it has to fail, not to break."""
    with tempfile.TemporaryDirectory() as folder:
        for file, text in row["files"].items():
            (Path(folder) / file).write_text(text)
        subprocess.run(["sh", "-c", command], cwd=folder, check=True)
        done = subprocess.run(row["test"], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) != ("AssertionError" in done.stderr), done.stderr
    return done.returncode == 0


def test_the_rows_fail_until_they_are_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, seed=0, shape=SMALL)
    files = {"prompts": f"{EXAMPLE}/repairs.jsonl", "eval_prompts": f"{EXAMPLE}/heldout.jsonl"}
    build_task(TaskConfig.model_validate({"name": "jsonl", **files}), str(tmp_path), 0)
    monkeypatch.syspath_prepend(EXAMPLE)
    start = runpy.run_path(f"{EXAMPLE}/start.py")
    monkeypatch.delitem(sys.modules, "agent")
    rows = [json.loads(line) for path in files.values() for line in Path(path).read_text().splitlines()]
    assert {row["id"] for row in rows} == {*start["REPAIRS"], "counts"}
    for row in rows:
        assert not passes(row, start["NO_REPAIR"])
        assert row["id"] == "counts" or passes(row, start["REPAIRS"][row["id"]])


@pytest.mark.slow
def test_sixty_four_at_once() -> None:
    needs_namespaces()
    deeds = [deed for deed in DEEDS if deed != "forks without end"]
    mixed = (deeds * 8)[:64]
    results = samples(mixed, 64)
    assert [(deed, reward) for deed, (reward, _) in zip(mixed, results, strict=True)] == [
        (deed, DEEDS[deed][1]) for deed in mixed
    ]
