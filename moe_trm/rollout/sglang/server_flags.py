"""Arguments of SGLang that `rollout.server.extra_args` must not have, and why: its rules between settings.

They come last on the server's command line, so they would replace what the launcher sets, without a word. SGLang takes
a unique beginning of an argument for the whole, so beginnings are refused too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from moe_trm.config.choices import wants_routes
from moe_trm.config.problems import Problem
from moe_trm.config.schema import Config, RolloutConfig
from moe_trm.rollout.sglang.route_defects import defects_asked_for

KEY = "rollout.server.extra_args"

SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "--model-path": "model.checkpoint",
        "--model": "model.checkpoint",
        "--host": "rollout.server.host",
        "--port": "rollout.server.port",
        "--device": "rollout.server.device",
        "--dtype": "rollout.server.dtype",
        "--enable-fp32-lm-head": "rollout.server.fp32_head",
        "--enable-deterministic-inference": "rollout.server.deterministic",
        "--tp-size": "rollout.server.tensor_parallel",
        "--tp": "rollout.server.tensor_parallel",
        "--tensor-parallel-size": "rollout.server.tensor_parallel",
        "--max-total-tokens": "rollout.server.max_total_tokens",
        "--max-running-requests": "rollout.server.max_running_requests",
        "--chunked-prefill-size": "rollout.server.chunked_prefill_size",
        "--quantization": "rollout.quantization",
        "--enable-memory-saver": "rollout.colocate",
        "--random-seed": "seed",
        "--api-key": "rollout.api_key",
    }
)
"""Arguments that have a setting of their own: other parts of a run read it and have to agree with the server."""

BREAKS: Mapping[str, str] = MappingProxyType(
    {
        "--config": "it is how the server is given its key",
        "--weight-version": "a server that was restarted would look as if it served the newest weights",
        "--sampling-mask-max-tokens": "masks would have fewer ids than were kept, or samples would be refused",
        "--preferred-sampling-params": "the policy that samples would not be the one that the run records",
        "--json-model-override-args": "the server would compute another model than the learner",
    }
)
"""Arguments with which the records would be incomplete, or would not say what happened."""


def refusals(config: Config) -> Iterator[Problem]:
    """Arguments with which a run would not have what it relies on; none where no server is started."""
    if config.rollout.starts_server:
        yield from _flags(config.rollout)
        if wants_routes(config):
            yield from _routes(config.rollout)


def _flags(rollout: RolloutConfig) -> Iterator[Problem]:
    for argument in rollout.server.extra_args:
        name = argument.partition("=")[0]
        full_name = name if name in SETTINGS or name in BREAKS else _meant(name)
        if full_name in SETTINGS:
            yield Problem(
                KEY,
                "this argument has a setting of its own, which other parts of the run read",
                got=argument,
                expected=f"{SETTINGS[full_name]} in its place",
            )
        elif full_name in BREAKS:
            yield Problem(KEY, f"with this argument {BREAKS[full_name]}", got=argument, expected="no such argument")


def _routes(rollout: RolloutConfig) -> Iterator[Problem]:
    """Options with which the server's routes would be wrong."""
    for defect, words in defects_asked_for(rollout.server.extra_args):
        yield Problem(
            KEY,
            f"the server's routes would be wrong: {defect.what} ({defect.source})",
            got=words,
            expected="a command line without it",
            fix="leave it out, or do without routes: replay.mode=none or R2, and probe.every=0",
        )


def _meant(name: str) -> str:
    """The argument of which `name` is a beginning; a short one may begin many, and SGLang refuses it itself."""
    matches = [flag for flag in (*SETTINGS, *BREAKS) if len(name) > len("--") + 3 and flag.startswith(name)]
    return matches[0] if matches else ""
