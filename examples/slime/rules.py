"""Corrections for slime or miles: `--use-tis --custom-tis-function-path rules.corrected`, this folder in PYTHONPATH."""

from __future__ import annotations

from moe_trm.adapters.slime import tis_function

corrected = tis_function(
    [
        ("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"}),
        ("trm_max", {"max_kl": 0.05, "ratio": "merged"}),
    ]
)
"""IcePop weighs by the ratio of trainer to rollout, within a band. TRM drops answers whose worst token is far off."""
