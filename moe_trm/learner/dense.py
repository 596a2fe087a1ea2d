"""Routes and routers of a model that has none: refused in every learner. Imports no torch."""

from __future__ import annotations

from moe_trm.config.schema import LossConfig, ReplayMode
from moe_trm.errors import ConfigError


def check_routes(
    replay: tuple[ReplayMode, str], loss: LossConfig, probe_every: int, architecture: str, *, is_moe: bool
) -> None:
    """Refuse replay, probes and losses of routers of a dense model with `ConfigError`, which names `architecture`.

    `replay`: its mode, and why.
    """
    if is_moe:
        return
    mode, reason = replay
    if mode != "none":
        raise ConfigError(
            "routing replay needs a mixture of experts",
            where="replay.mode",
            got=f"{mode} ({reason}) with {architecture}, which has no MoE layer",
            expected="none",
            fix="Set replay.mode=none or use a MoE checkpoint.",
        )
    for key, coef in loss.router_coefs.items():
        raise ConfigError(
            "a loss of routers needs a mixture of experts",
            where=key,
            got=f"{coef} with {architecture}, which has no MoE layer",
            expected=0,
            fix=f"Set {key}=0 or use a MoE checkpoint.",
        )
    if probe_every:
        raise ConfigError(
            "a probe compares the routes of both engines, which needs a mixture of experts",
            where="probe.every",
            got=f"{probe_every} with {architecture}, which has no MoE layer",
            expected=0,
            fix="Set probe.every=0 or use a MoE checkpoint.",
        )
