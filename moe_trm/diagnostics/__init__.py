"""Diagnostics of the mismatch: its size, its sources, and the rows that its correction rejects."""

from __future__ import annotations

from moe_trm.diagnostics.by_turn import by_age, by_place, by_server, by_turn
from moe_trm.diagnostics.certificate import certificate_estimate, divergences
from moe_trm.diagnostics.mismatch import metrics
from moe_trm.diagnostics.strata import acceptance
from moe_trm.diagnostics.variance import gradient_noise, gradient_power
from moe_trm.methods.summable import add, finalize

__all__ = [
    "acceptance",
    "add",
    "by_age",
    "by_place",
    "by_server",
    "by_turn",
    "certificate_estimate",
    "divergences",
    "finalize",
    "gradient_noise",
    "gradient_power",
    "metrics",
]
