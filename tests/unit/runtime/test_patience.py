"""Limits that a loaded machine stretches."""

from __future__ import annotations

import os

import pytest

from moe_trm.runtime.patience import MOST, patient


@pytest.mark.parametrize(("load", "times"), [(0.0, 1), (4.0, 1), (12.0, 3), (1000.0, MOST)])
def test_a_limit_grows_with_the_queue_for_a_processor(
    monkeypatch: pytest.MonkeyPatch, load: float, times: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert patient(5.0) == 5.0 * times
