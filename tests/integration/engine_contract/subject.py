"""An engine under the contract: a running server, the settings to ask it, and what its answers are computed from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from moe_trm.config.schema import Config
from moe_trm.rollout.build import build_engine
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.process import Server
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.integration.served import PARAMS, VOCAB, check_against_hf, make_push
from tests.unit.rollout.test_scripted_servers import SCRIPTED

KEY = "key-of-the-contract"
T = TypeVar("T")
ENGINES = (SCRIPTED, "sglang", "vllm")


def settings(engine: str, checkpoint: Path, **server: object) -> Config:
    """Of a server in float32 whose records have all that the engine can record."""
    bare = engine == SCRIPTED
    sections = {"replay": {"mode": "none"}, "probe": {"every": 0}, "sampling_mask": {"mode": "off"}}
    rollout = {"top_p": PARAMS.top_p, "temperature": PARAMS.temperature}
    return Config.model_validate(
        {
            "model": {"checkpoint": str(checkpoint)},
            "rollout": {
                "engine": engine,
                "max_attempts": 2,
                "server": {"port": 0, "dtype": "float32", "startup_timeout_s": 1200, **server},
                **({} if bare else rollout),
            },
            **(sections if bare else {"sampling_mask": {"mode": "keep"}, "replay": {"mode": "R3"}}),
        }
    )


@dataclass(frozen=True)
class Subject:
    """A server and two checkpoints of one shape that it can be given."""

    config: Config
    server: Server
    checkpoints: tuple[Path, Path]

    @property
    def computes(self) -> bool:
        """False for the script, whose answers no weights make."""
        return self.config.rollout.engine != SCRIPTED

    @property
    def params(self) -> SamplingParams:
        return PARAMS if self.computes else SamplingParams(max_new_tokens=8, stop_token_ids=(2,), top_k=VOCAB)

    def run(self, work: Callable[[ServerEngine], Awaitable[T]], key: str | None = None, **pipeline: object) -> T:
        """`work` with an engine that is started and closed."""
        url = {"url": self.server.url}
        config = self.config.model_copy(
            update={
                "rollout": self.config.rollout.model_copy(update=url),
                "pipeline": self.config.pipeline.model_copy(update=pipeline),
            }
        )

        async def main() -> T:
            engine = build_engine(config, key or self.server.api_key)
            assert isinstance(engine, ServerEngine)
            try:
                await engine.start()
                return await work(engine)
            finally:
                await engine.close()

        return asyncio.run(main())

    async def push(self, engine: ServerEngine, folder: Path, version: int, which: int = 0) -> None:
        """Weights of one of the checkpoints."""
        await engine.load_weights(make_push(folder, self.checkpoints[which], version))

    async def sample(self, engine: ServerEngine, asked: Sequence[Prompt]) -> list[RolloutRecord]:
        """One record for each prompt, all at once."""
        answers = (engine.generate(p, self.params, sample_id=i, group_id=i) for i, p in enumerate(asked))
        return list(await asyncio.gather(*answers))

    def check(self, record: RolloutRecord, version: int, which: int) -> None:
        """The record is of this version, and of these weights where weights make it."""
        assert set(record.versions.tolist()) == {version}
        if self.computes:
            check_against_hf(record, self.checkpoints[which])
