"""Corrections and losses computed again on a recorded run, without engines: what each would have kept."""

from __future__ import annotations
