"""torchrun without its traceback, where the ranks of `launch.train` refused to start and said why.

torchrun raises when a rank fails, and Python prints pages of its own files under our message. It loads whatever is
registered as `torchrun.handlers` (pyproject.toml), which is its door for rendezvous backends. `quiet_refusals` comes
in there. It gives back torchrun's own c10d backend, under the name `moe-trm`, and leaves a hook for uncaught errors.
The hook keeps silent on a refusal of `launch.train`, and hands on everything else. The exit status stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from moe_trm.errors import REFUSED

OURS = "launch.train"


def quiet_refusals() -> Callable[[Any], Any]:
    """Leave the hook in this process, and return a backend, as torchrun wants."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not is_refusal(error):
            before(kind, error, trace)

    sys.excepthook = hook
    return _c10d


def is_refusal(error: BaseException) -> bool:
    """True for torchrun's error about ranks of `launch.train` of which one refused."""
    failures = getattr(error, "failures", None)
    if type(error).__name__ != "ChildFailedError" or getattr(error, "name", "") != OURS or not failures:
        return False
    return any(failure.exitcode == REFUSED for failure in failures.values())


def _c10d(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)
