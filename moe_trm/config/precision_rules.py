"""Rules between the arithmetic of the rollout and that of the learner. See `moe_trm.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import Config


def refusals(config: Config) -> Iterator[Problem]:
    """Why these settings cannot work."""
    server = config.rollout.server
    if server.quantization is None or config.rollout.engine == "bundle":
        return
    if server.device == "cpu":
        yield Problem(
            "rollout.server.quantization",
            "SGLang's quantised kernels need CUDA",
            got=f"{server.quantization} with rollout.server.device=cpu",
            expected="none on a CPU",
        )
    if config.sync.verify:
        yield Problem(
            "sync.verify",
            "the engine's checksums are those of the weights it rounded, not of those that were sent",
            got=f"true with rollout.server.quantization={server.quantization}",
            expected="false",
            fix="set sync.verify=false; whether pushes arrive then shows in engine/k3_kl alone",
        )


def surprises(config: Config) -> Iterator[str]:
    """What does not do what it seems to."""
    method = config.rollout.server.quantization
    if method is None:
        return
    bare = "" if config.correction.rules or config.correction.preset else "; no correction is set"
    yield (
        f"rollout.server.quantization={method}: the rollout is a behaviour policy of its own, with rounded weights; "
        f"engine/* measures it against the learner's policy{bare}"
    )
