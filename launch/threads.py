"""Threads of the processes on a CPU: one each, since engine and learner share the cores by processes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Two threads on busy cores turn one-second steps into minutes.
SINGLE_THREAD: Mapping[str, str] = MappingProxyType({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
"""Environment, to be set before torch is imported."""
