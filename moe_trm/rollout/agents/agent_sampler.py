"""Samples made by a user's agent (`rollout.agent`), which talks with the policy by OpenAI's interface.

`agent.rows` says what of a session is trained (`moe_trm.rollout.agents.rows`). Reasons of rejection, besides those of
the engine's answers:

- `rollout_error`: it raised, or its command has another exit status than 0. `rollout_timeout`.
- `rollout_crash`: it ended its process, or a signal did. `rollout_output`: its command printed too much.
- `rollout_type`: its result is no reward. `rollout_nan`: a reward that is not finite.
- `rollout_flood`: it went on with requests that were refused. `rollout_parser`: an answer could not be read.
- `empty_output`: it never got an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from moe_trm.config.schema.agent import AgentRows
from moe_trm.errors import RecordRejected
from moe_trm.rollout.agents.agent_host import AgentHost
from moe_trm.rollout.agents.live_session import LiveSession, Policy
from moe_trm.rollout.agents.rows import SessionRows, session_rows, spoken
from moe_trm.rollout.agents.server import Address, AgentServer
from moe_trm.rollout.sampler import rewarded
from moe_trm.rollout.turn import naming
from moe_trm.runtime.child import Answerer, Refused
from moe_trm.runtime.functions.process import FunctionFailed
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.rewards import read_reward, score
from moe_trm.types import Prompt, RolloutRecord, SamplingParams

log = logging.getLogger(__name__)

ADAPTER = "moe_trm.rollout.agents.agent:adapt"
NUM_LOGGED = 3
"""Rejected rows of each reason that are logged in full; the rest are only counted."""


class AgentSampler:
    """`Sampler` that gives an agent an address, and takes what it made of it.

    Args:
        server: where agents find `policy`.
        task: gives the reward where the agent does not.
        keep_changed: keep samples with an answer during which the weights changed, without the earlier routes.
        rows: what of a session becomes a row; evaluations take the branch of the last answer.
    """

    def __init__(
        self,
        host: AgentHost,
        server: AgentServer,
        policy: Policy,
        task: Task,
        params: SamplingParams,
        *,
        keep_changed: bool,
        rows: AgentRows = "last",
    ) -> None:
        self._host, self._server, self._policy, self._task, self._params = host, server, policy, task, params
        self._keep_changed, self._rows = keep_changed, rows
        self._totals: Counter[str] = Counter()

    async def start(self) -> None:
        """Load the agent and listen. Raises `ConfigError`."""
        try:
            await self._host.start()
            await self._server.start()
        except BaseException:
            await self.close()
            raise

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """See `Sampler.sample`."""
        with naming(f"sample {sample_id}"):
            return await self._make(prompt, self._params, sample_id=sample_id, group_id=group_id, bare=False)

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        """See `Sampler.answer`."""
        with naming(f"prompt {prompt.prompt_id}"):
            return await self._make(prompt, params, sample_id=-1, group_id=-1, bare=True)

    def metrics(self) -> dict[str, float]:
        """Totals since the run began, of training samples, also of those that were rejected.

        | metric | of |
        |---|---|
        | `agent/sessions` | samples begun |
        | `agent/requests` | requests answered |
        | `agent/refused` | requests refused: limits, parameters, malformed bodies |
        | `agent/overridden` | answers with sampling parameters of the run instead of the request's |
        | `agent/continued` | requests that go on behind sampled ids |
        | `agent/rewritten` | of these, with an answer that the chat template would write in another form |
        | `agent/cut` | requests of which the chat template changes earlier text: a new branch |
        | `agent/thinking_dropped` | requests with an answer whose thinking the client left out: a new branch |
        | `agent/thinking_edited` | the same with another thinking |
        | `agent/branches` | branches |
        | `agent/rows` | rows of accepted samples |
        | `agent/rejected_rows/<reason>` | rows that were rejected, of samples with others |
        | `agent/left_out_tokens` | sampled tokens of accepted samples that no row trains |
        """
        totals = self._totals
        return {
            "agent/sessions": float(totals["sessions"]),
            "agent/requests": float(totals["requests"]),
            "agent/refused": float(totals["refused"]),
            "agent/overridden": float(totals["overridden"]),
            "agent/continued": float(totals["continued"]),
            "agent/rewritten": float(totals["rewritten"]),
            "agent/cut": float(totals["cut"]),
            "agent/thinking_dropped": float(totals["thinking_dropped"]),
            "agent/thinking_edited": float(totals["thinking_edited"]),
            "agent/branches": float(totals["branches"]),
            "agent/rows": float(totals["rows"]),
            "agent/left_out_tokens": float(totals["left_out_tokens"]),
            **{f"agent/{name}": float(n) for name, n in sorted(totals.items()) if name.startswith("rejected_rows/")},
        }

    async def close(self) -> None:
        """End the agent's process and stop listening."""
        await self._host.close()
        await self._server.close()

    async def _make(
        self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int, bare: bool
    ) -> RolloutRecord:
        session = LiveSession(self._policy, params, bare=bare)
        address = self._server.open(session)
        try:
            returned = await self._run(prompt, session, address)
        finally:
            self._server.end(address)
            if session.failure.done():
                session.failure.exception()
            if not bare:
                self._count(session)
        if not session.tree.nodes:
            raise RecordRejected("empty_output", "the agent got no answer", got=0, expected="at least 1 answer")
        leaf = session.tree.nodes[-1]
        finish_reason = "length" if session.ended else leaf.turn.finish_reason
        rows = session_rows(
            session.tree,
            "last" if bare else self._rows,
            prompt_id=prompt.prompt_id,
            sample_id=sample_id,
            group_id=group_id,
            keep_changed=self._keep_changed,
            finish_reason=finish_reason,
        )
        if returned is None:
            first_prompt = replace(prompt, token_ids=leaf.path()[0].context.added)
            reward = await score(self._task, first_prompt, spoken(leaf, prompt.prompt_id, finish_reason))
        else:
            reward = read_reward(
                returned, self._task.reward_weights, prompt.prompt_id, prefix="rollout", place=self._host.place
            )
        if not bare:
            self._count_rows(rows)
        return rewarded(rows.sample, reward, prompt)

    async def _run(self, prompt: Prompt, session: LiveSession, address: Address) -> Any:
        """The agent's result. A fault of the engine ends the call, whatever the agent makes of it."""

        def begin() -> Answerer:
            session.restart()
            return _nothing_to_ask

        payload = {"base_url": address.base_url, "api_key": address.api_key, "prompt": _row(prompt)}
        call = asyncio.ensure_future(self._host.call(payload, begin))
        try:
            await asyncio.wait({call, session.failure}, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            return await call
        except FunctionFailed as failure:
            if session.ended and failure.reason == "error" and session.tree.nodes:
                # The error of a limit. The sample is kept as it is, as unfinished.
                return None
            raise RecordRejected(
                f"rollout_{failure.reason}",
                "the agent failed",
                got=failure.what,
                expected="a sample in time",
                fix="rollout.function_timeout_s bounds one call; the controller's log has what functions print",
            ) from failure
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def _count(self, session: LiveSession) -> None:
        tree = session.tree
        self._totals.update(session.counts)
        self._totals.update(tree.counts)
        self._totals["sessions"] += 1
        self._totals["branches"] += len(tree.leaves())

    def _count_rows(self, rows: SessionRows) -> None:
        self._totals.update(rows.counts)
        for rejection in rows.rejections:
            if self._totals[f"rejected_rows/{rejection.reason}"] <= NUM_LOGGED:
                log.warning("a row of sample %d rejected as %s: %s", rows.sample.sample_id, rejection.reason, rejection)


async def _nothing_to_ask(op: str, arguments: Mapping[str, Any]) -> NoReturn:
    raise Refused("usage", "an agent asks over its address")


def _row(prompt: Prompt) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "text": prompt.text,
        "messages": prompt.messages or [{"role": "user", "content": prompt.text}],
        "answer": prompt.answer,
        "extra": prompt.extra,
    }
