"""An engine that is asked through servers: all that differs from one such engine to another.

Start, restart, requests in flight and lost servers are the same for every one (`process.py`, `watchdog.py`, `fleet.py`
beside this file), and so is the `RolloutEngine` over them (`moe_trm/rollout/server_engine.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_trm.config.choices import server_device, wants_routes
from moe_trm.config.engines import KEY, SERVER_BACKENDS, EngineTraits
from moe_trm.config.schema import Config, ModelConfig, RolloutConfig
from moe_trm.errors import ConfigError, EngineError, SyncError
from moe_trm.methods.load import load_function
from moe_trm.models.hf_config import read_full_config
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.model_rules import check_served
from moe_trm.rollout.servers.question import AnswerFormat, RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.sync.manifest import Share, WeightPush

Array = NDArray[Any]
Digests = Sequence[Mapping[str, str]]
"""By rank of a server the digest of each tensor that it has to report, by the engine's name; of no rank: unknown."""


@dataclass(frozen=True)
class Served:
    """The part of a run's settings that its servers are checked and started with.

    `routes`, `masks`: answers carry the experts and the kept ids of their tokens. `exact`: as `exact` of the run.
    `pictures`: prompts have some, so the whole model is served.
    """

    model: ModelConfig
    rollout: RolloutConfig
    seed: int
    routes: bool
    masks: bool
    exact: bool
    pictures: bool = False

    @classmethod
    def of(cls, config: Config) -> Served:
        """The facts about servers in `config`."""
        return cls(
            config.model,
            config.rollout,
            config.seed,
            routes=wants_routes(config),
            masks=config.keeps_masks,
            exact=config.exact,
            pictures=config.task.has_pictures,
        )


@dataclass(frozen=True)
class Launch:
    """The process of one server.

    `command` has no key, since everyone on the machine can read it. `grace_s`: time in which it may end by itself.
    `leaves`: pattern of shared memory in /dev/shm that its processes leave behind, removed with the server.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    grace_s: float = 0.0
    leaves: str = ""


@dataclass(frozen=True)
class Requirements:
    """Requirements of a run on its servers.

    Attributes:
        wanted: fields of a record.
        dtype: the engine's arithmetic.
        verify: True when weight pushes are proved.
        quantization: to which the engine is meant to round the weights that it is sent.
        run: name of the run in the labels of its weights (`ownership.label_of`).
        tensor_parallel: ranks of a server.
    """

    model: ServedModel
    requested: RequestedFields
    temperature: float
    dtype: str
    verify: bool
    quantization: str | None = None
    run: str = ""
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Delivery:
    """A push on its way to one server.

    `expected`: see `ServerClient.expected_digests`; None: no proof is wanted. `keeping` is entered once the server is
    paused, and left when its weights are proved and it may go on.
    """

    push: WeightPush
    expected: Awaitable[Digests] | None
    keeping: AbstractContextManager[None]


class ServerBackend(AnswerFormat):
    """The dialect of one engine's servers. Made without arguments in every process that needs it, and without state.

    Attributes:
        traits: its capabilities; `has_servers` is set.
        labels_runs: its labels of weights name the run (`ownership.label_of`); else they are bare versions.
        alive_path: of a GET that a server's process answers, whatever its engine does.
        health_path: of a GET that succeeds when the engine generates; 503 while it loads.
        argument_check: a Python program that takes the arguments of `launch` in place of the server's module. It ends
            with an error where the engine refuses them; its last line is the settings that they become, as JSON. Empty:
            none.
    """

    traits: ClassVar[EngineTraits]
    labels_runs: ClassVar[bool] = False
    alive_path: ClassVar[str] = "/health"
    health_path: ClassVar[str] = "/health"
    argument_check: ClassVar[str] = ""

    def check(self, served: Served) -> None:
        """Refuse what its servers cannot serve, from config.json alone (`EngineTraits.model_rules`).

        Raises `ConfigError`, `CheckpointError`.
        """
        checkpoint, rollout = served.model.checkpoint, served.rollout
        cuda = server_device(rollout.server, cuda=torch.cuda.is_available())[0] == "cuda"
        full_config, where = read_full_config(checkpoint), f"{checkpoint}/config.json"
        masks, exact, pictures = served.masks, served.exact, served.pictures
        check_served(full_config, where, rollout, masks=masks, exact=exact, pictures=pictures, cuda=cuda)

    def unpredicted(self, settings: Mapping[str, Any], model: ServedModel) -> str:
        """The reasons why the checksums of a server with these settings are not predicted; empty: they are.

        `settings`: of `argument_check`.
        """
        return ""

    def remark(self, checkpoint: Path) -> str:
        """A difference of the served model from the checkpoint's that a run can bear; empty: none is known.

        Raises `CheckpointError`.
        """
        return ""

    @abstractmethod
    def launch(self, served: Served, port: int, api_key: str, folder: Path) -> AbstractContextManager[Launch]:
        """The server of `rollout.server`, at this port and with this key; left when it is ready or has failed.

        `folder` is for its files: private, and removed with the server. Raises `ConfigError`, `CheckpointError`.
        """

    @abstractmethod
    async def version(self, http: EngineHttp, *, timeout_s: float) -> str:
        """The label of the weights that this server serves. Raises `EngineError`."""

    @abstractmethod
    async def abort(self, http: EngineHttp) -> None:
        """End every answer in progress with what was sampled so far. Raises `EngineError`."""

    def refuses_request(self, status: int, text: str) -> bool:
        """True when an HTTP error is the fault of the one request, e.g. of a context that is too long."""
        return status in (400, 413, 422)

    async def release_memory(self, http: EngineHttp, tags: Sequence[str]) -> None:
        """Release the device memory of `weights` and `kv_cache`, once the server says that it is idle.

        It generates nothing until it was given weights. Asked where `EngineTraits.lends_memory` is set.
        """
        raise self._missing("lends no memory")

    async def resume_memory(self, http: EngineHttp, tag: str) -> None:
        """Take one of them back, the weights first. Nothing else was asked since the release."""
        raise self._missing("lends no memory")

    @abstractmethod
    def client(self, requirements: Requirements) -> ServerClient:
        """The controller's side of a run."""

    async def decoded(self, http: EngineHttp, token_ids: Sequence[int], count: int) -> tuple[Array, Array]:
        """The `count` likeliest tokens after `token_ids`, none of them ending the answer, and their log-probs.

        The log-probs are of decoding itself, at temperature 1, nats. Asked where `EngineTraits.scores_tokens` is set.
        Raises `EngineError`.
        """
        raise self._missing("decodes no fixed tokens")

    async def cached(self, http: EngineHttp, token_ids: Sequence[int]) -> int | None:
        """Of an answer of one token to `token_ids`, tokens whose attention states came from the prefix cache.

        They stay in the cache. None where the engine does not count them. Raises `EngineError`.
        """
        return None

    async def flush(self, http: EngineHttp) -> bool:
        """Empty the prefix cache of a server that generates nothing; False where the engine has no such request.

        Raises `EngineError`.
        """
        return False

    async def prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> Array:
        """`[T - 1]` log-probs of the tokens after the first at temperature 1, nats, by one prefill of all tokens.

        Nothing of the prefix cache is used. Asked where `EngineTraits.scores_tokens` is set. Raises `EngineError`.
        """
        raise self._missing("scores no fixed tokens")

    def writing_states(self, folder: Path) -> Sequence[str]:
        """Arguments with which a server writes the hidden states of every pass into `folder`. Raises `ConfigError`."""
        raise ConfigError("servers of this engine write no hidden states", where=f"config key {KEY}")

    def hidden_states(self, folder: Path, token_ids: Sequence[int], num_layers: int) -> Mapping[str, Tensor]:
        """`[T, D]` that a server so started wrote of the prefill of these tokens, named as by `stream_names`.

        Raises `EngineError`.
        """
        raise self._missing("writes no hidden states")

    async def tokenized(self, http: EngineHttp, text: str) -> tuple[int, ...] | None:
        """The server's ids of a text, without special tokens; None where it does not say. Raises `EngineError`."""
        return None

    async def model_folder(self, http: EngineHttp) -> Path | None:
        """The folder with the config.json that it serves; None where it does not say. Raises `EngineError`."""
        return None

    def _missing(self, ability: str) -> EngineError:
        """The refusal of a request for an ability that the engine's traits deny."""
        return EngineError(f"this engine {ability}", where=type(self).__name__)


class ServerClient(ABC):
    """Proofs that the servers of one run are the configured ones and serve its weights. One event loop owns it.

    `proves_tensors`: what servers report of a push is compared; else every push has to be proved by use. Known once
    they are checked.
    """

    @property
    def proves_tensors(self) -> bool:
        return True

    @abstractmethod
    async def check(self, http: EngineHttp) -> None:
        """Check a server that generates: the checkpoint, and the features that the run wants. Raises `EngineError`."""

    async def check_router(self, http: EngineHttp) -> None:
        """Check that a router hands on every field of a request. Raises `EngineError`."""
        raise ConfigError("servers of this engine have no router", where="config key rollout.router", expected="none")

    @abstractmethod
    def expected_digests(self, push: WeightPush) -> Digests:
        """The digests that a server which loaded `push` must report. Runs in a thread, while servers go on.

        Raises `SyncError` where files of the push are not those of the learner's memory.
        """

    @abstractmethod
    async def load(self, http: EngineHttp, delivery: Delivery) -> None:
        """Make one server serve a push, with an empty prefix cache, and prove it.

        Raises `SyncError`; `EngineLost` where it cannot be reached.
        """

    async def receive(self, http: EngineHttp, version: int, shares: Sequence[Share]) -> None:
        """As `load`, by a broadcast of the learner ranks.

        Asked where the engine has `EngineTraits.broadcast_receivers`.
        """
        raise SyncError("this engine takes no broadcasts", where=http.url)

    async def loaded(self, http: EngineHttp) -> None:  # noqa: B027 (most servers begin with the checkpoint's weights)
        """Check what shows only once the server has the weights of the run. Raises `EngineError`."""

    async def close(self) -> None:  # noqa: B027
        """Leave what it has joined."""


def backend_of(engine: str) -> ServerBackend:
    """The backend of the engine that `rollout.engine` names.

    Raises `ConfigError` for one that cannot be loaded or is asked through no servers.
    """
    made = load_function(SERVER_BACKENDS.get(engine, engine), key=KEY)
    try:
        backend = made()
    except TypeError as error:
        raise _no_backend(engine, str(error)) from error
    if not isinstance(backend, ServerBackend):
        raise _no_backend(engine, type(backend).__name__)
    return backend


def _no_backend(engine: str, got: str) -> ConfigError:
    return ConfigError(
        "this engine says that it has servers, and does not say how they are asked",
        where=f"config key {KEY}",
        got=f"{engine}: {got}",
        expected="a ServerBackend of moe_trm/rollout/servers/backend.py, made without arguments",
        fix="see `An engine of your own` in docs/pipeline.md",
    )
