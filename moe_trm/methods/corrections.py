"""The built-in corrections by name: the table that the configuration checks and `moe_trm.corrections` imports from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CORRECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "geometric_mask": "geometric_mask",
        "icepop": "icepop",
        "kpop": "kpop",
        "ln_trm": "ln_trm",
        "m2po": "m2po",
        "opsm": "opsm",
        "seq_icepop": "icepop",
        "seq_max_k2": "rejection",
        "seq_max_k3": "rejection",
        "seq_mean_k1": "rejection",
        "seq_mean_k2": "rejection",
        "seq_mean_k3": "rejection",
        "seq_mis": "mis",
        "seq_sum_k1": "rejection",
        "seq_sum_k2": "rejection",
        "seq_sum_k3": "rejection",
        "seq_tis": "tis",
        "ser": "ser",
        "token_k1": "rejection",
        "token_k2": "rejection",
        "token_k3": "rejection",
        "token_mis": "mis",
        "token_tis": "tis",
        "token_veto": "token_veto",
        "trm": "trm",
        "trm_avg": "trm",
        "trm_max": "trm",
        "trm_max_avg": "trm",
        "trm_soft": "trm",
    }
)
"""Module of `moe_trm.corrections` that each is defined in."""

READ_TOTAL = frozenset({"ln_trm", "m2po", "opsm", "ser", "trm", "trm_avg", "trm_max", "trm_max_avg", "trm_soft"})
"""Those that read the total ratio unless told otherwise; the others read the engine ratio."""
