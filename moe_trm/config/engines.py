"""Rollout engines as settings see them: a table of capabilities, which rules and checks ask instead of names.

Importing this module imports no torch. An engine of the user's own is named by `package.module:Engine` or
`path/to/file.py:Engine` and brings its capabilities along; its code is read when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moe_trm.errors import ConfigError
from moe_trm.methods.load import load_function

KEY = "rollout.engine"
DEFAULT = "sglang"


@dataclass(frozen=True)
class EngineTraits:
    """The capabilities of a rollout engine.

    Attributes:
        has_weights: it samples from weights that the learner pushes. Pushes are proved, evaluations ask it.
        samples_live: it samples anew; else it gives back the recording in `rollout.bundle`.
        records_routes: its records can have the experts of every token.
        records_masks: its records can have the support that each token was sampled from.
        broadcast_receivers: how many receive what a learner rank broadcasts to a server of one rank by
            `sync.method=distributed`: that rank, and where it does not say what it received, a witness beside the
            controller. 0: it takes none.
        broadcast_to_one_rank: it takes broadcasts only where its server has one rank.
        has_servers: it is asked through servers: those of `rollout.url` or `rollout.urls`, else the one of
            `rollout.server`, which the run starts.
        lends_memory: its device memory can be released for the learner between pushes (`rollout.colocate`).
        awaits_weights: it can be asked for samples of weights before it is given them (`expect`).
        scores_tokens: its servers decode greedily and score given tokens, so that pushes can be proved by use
            (`ServerBackend.decoded`, `ServerBackend.prefilled`).
        fixed_order: its servers can compute in an order of sums that the learner repeats (`exact`).
        takes_pictures: its answers can be to prompts with pictures (`task.image_field`).
        packages: distributions that must be installed where the run starts it, each `name` or `name==tested version`.
        rules: `package.module:function` with the rules between settings that only this engine knows: from `Config` to
            `Problem`s. Empty: none.
        model_rules: `package.module:function` that refuses a model which its servers cannot serve, and imports no
            torch. It takes the arguments of `moe_trm.rollout.servers.model_rules.check_served`. Empty: none.
        lowest_temperature: below it the engine samples at another temperature than it was given.
    """

    has_weights: bool = True
    samples_live: bool = True
    records_routes: bool = True
    records_masks: bool = True
    broadcast_receivers: int = 0
    broadcast_to_one_rank: bool = False
    has_servers: bool = False
    lends_memory: bool = True
    awaits_weights: bool = False
    scores_tokens: bool = False
    fixed_order: bool = False
    takes_pictures: bool = False
    packages: tuple[str, ...] = ()
    rules: str = ""
    model_rules: str = ""
    lowest_temperature: float = 0.0


ENGINES: Mapping[str, EngineTraits] = MappingProxyType(
    {
        DEFAULT: EngineTraits(
            broadcast_receivers=2,
            has_servers=True,
            awaits_weights=True,
            scores_tokens=True,
            fixed_order=True,
            takes_pictures=True,
            packages=("sglang==0.5.23",),
            rules="moe_trm.rollout.sglang.server_flags:refusals",
            model_rules="moe_trm.rollout.sglang.model_rules:check_model",
            lowest_temperature=1e-6,  # below, it decodes greedily and reports temperature 1
        ),
        "vllm": EngineTraits(
            broadcast_receivers=1,
            broadcast_to_one_rank=True,
            has_servers=True,
            lends_memory=False,
            awaits_weights=True,
            scores_tokens=True,
            rules="moe_trm.rollout.vllm.rules:refusals",
            model_rules="moe_trm.rollout.vllm.model_rules:check_model",
            lowest_temperature=1e-2,  # takes this in place of less
        ),
        "bundle": EngineTraits(has_weights=False, samples_live=False, takes_pictures=True),
    }
)
"""The engines of this repository. `moe_trm.rollout.build` makes them."""

SERVER_BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        DEFAULT: "moe_trm.rollout.sglang.backend:SglangBackend",
        "vllm": "moe_trm.rollout.vllm.backend:VllmBackend",
    }
)
"""The `ServerBackend` of each that has servers; one of the user's own is named as itself."""

NAMED_PARSERS = "moe_trm.rollout.sglang.agent_parsers"
"""Module with the parsers of answers that `agent.tool_parser` and `agent.reasoning_parser` know by name."""

FIXED_ORDER = "moe_trm_sglang_cpu.fixed_order"
"""Module with the sums of engines that have the trait `fixed_order`, on a CPU: the learner computes with the same."""


LEARNER = "learner"
"""Stands beside engines with servers where weights are evaluated: the learner's own policy answers."""


def short_name(engine: str) -> str:
    """For files and tables: the engine's name, or the class of one of the user's own."""
    return engine.rpartition(":")[2]


def may_answer(by: str) -> bool:
    """True where evaluations can be answered by `by`: an engine with servers, or `LEARNER`. Raises as `traits_of`."""
    return by == LEARNER or traits_of(by).has_servers


def traits_of(engine: str) -> EngineTraits:
    """The capabilities of the engine that `rollout.engine` names.

    Raises:
        ConfigError: no such engine, or one of the user's own that cannot be loaded or has no `traits`.
    """
    if engine in ENGINES:
        return ENGINES[engine]
    expected = f"{', '.join(ENGINES)}, package.module:Engine or path/to/file.py:Engine"
    if ":" not in engine:
        raise ConfigError("no such rollout engine", where=KEY, got=engine, expected=expected)
    traits = getattr(load_function(engine, key=KEY), "traits", None)
    if not isinstance(traits, EngineTraits):
        raise ConfigError(
            "this engine does not say what it can do",
            where=KEY,
            got=f"{engine} with traits={traits!r}",
            expected="an attribute `traits`, an EngineTraits",
            fix="see `An engine of your own` in docs/pipeline.md",
        )
    return traits
