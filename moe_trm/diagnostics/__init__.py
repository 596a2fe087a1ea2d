"""What the mismatch is, where it comes from, and who pays for its correction."""

from __future__ import annotations

from moe_trm.diagnostics.certificate import certificate_estimate, divergences
from moe_trm.diagnostics.mismatch import metrics
from moe_trm.diagnostics.strata import acceptance
from moe_trm.diagnostics.verdict import Verdict, verdict
from moe_trm.summable import add, finalize

__all__ = ["Verdict", "acceptance", "add", "certificate_estimate", "divergences", "finalize", "metrics", "verdict"]
