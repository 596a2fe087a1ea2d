"""The controller's side of a rollout engine: one protocol over engine-neutral types.

The types are in `moe_trm.types` and `moe_trm.sync.manifest`.
Implementations: `sglang` (real servers), `bundle` (a recorded run), and engines of the user's own (docs/pipeline.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moe_trm.config.engines import EngineTraits
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams, ServerState


class RolloutEngine(Protocol):
    """One policy that samples, at one weight version at a time."""

    @property
    def traits(self) -> EngineTraits:
        """Its capabilities: a class attribute, since settings are judged by them before there is an engine."""

    async def start(self) -> None:
        """Wait until the engine answers and check that it serves the expected model. Raises `EngineError`."""

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        """Sample one continuation and return what really happened.

        Raises `RecordRejected` (reason and place) when the response violates an invariant, and `EngineError` when there
        is none.
        """

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        """Sample the continuation of `context`, which may hold earlier answers and the text between them.

        `start`: first row of the routes to return; those before it are known from earlier turns. `bare`: without routes
        and masks. Engines of runs with `task.image_field` also take `pictures`, those of the prompt (`ServerEngine`).
        Raises as `generate` does.
        """

    def expect(self, version: int) -> None:
        """Let samples that are asked for from now on wait for the weights of `version`, which come next.

        Called where `EngineTraits.awaits_weights` is set and nothing is in flight.
        """

    async def load_weights(self, push: WeightPush) -> None:
        """Make the engine serve `push.version`, and flush its prefix cache.

        The engine's own checksums verify the weights. Raises `SyncError`.
        """

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        """As `load_weights`, by broadcast: every sender of `shares` waits or sends meanwhile. Raises `SyncError`."""

    async def release_memory(self) -> None:
        """Give the device memory to the learner until the next weights come; nothing may be in flight."""

    def metrics(self) -> dict[str, float]:
        """Totals of events since the run began, such as servers lost."""

    def servers(self) -> tuple[ServerState, ...]:
        """State of each rollout server now; asked where `EngineTraits.has_servers` is set."""
        return ()

    async def close(self) -> None:
        """Release connections."""
