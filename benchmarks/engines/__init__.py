"""The engines as scorers of given tokens, for comparisons outside of training."""

from __future__ import annotations
