"""Refusal of loss parameters that cannot work."""

from __future__ import annotations

from moe_trm.errors import ConfigError


def require(condition: bool, loss: str, expected: str, **got: float | str | None) -> None:
    """Raise `ConfigError` naming the parameters in `got` unless `condition` holds."""
    if not condition:
        raise ConfigError(
            "loss parameters cannot work",
            where=f"loss {loss}",
            got=", ".join(f"{name}={value}" for name, value in got.items()),
            expected=expected,
        )
