"""Check that the functions a configuration names can be loaded and called, before anything else is started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from moe_trm.functions.host import FunctionHost


def check_functions(named: Mapping[str, tuple[str, str]]) -> None:
    """Load each function once, in a separate process that ends at once.

    Args:
        named: by configuration key, the name of the function and of its adapter.

    Raises:
        ConfigError: one cannot be loaded, or has the wrong signature.
    """
    if named:
        asyncio.run(_check(named))


async def _check(named: Mapping[str, tuple[str, str]]) -> None:
    for key, (function, adapter) in named.items():
        host = FunctionHost(function, adapter=adapter, key=key, limit_s=1.0)
        try:
            await host.start()
        finally:
            await host.close()
