"""Limits that a loaded machine stretches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_trm.run_folder import history
from moe_trm.runtime.patience import MOST, patient


@pytest.mark.parametrize(("load", "times"), [(0.0, 1), (4.0, 1), (12.0, 3), (1000.0, MOST)])
def test_a_limit_grows_with_the_queue_for_a_processor(
    monkeypatch: pytest.MonkeyPatch, load: float, times: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert patient(5.0) == 5.0 * times


def test_killed_processes_of_a_loaded_machine_get_more_time_to_be_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run that is started again must not be refused because of the one before it."""
    waits = list[float]()
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    monkeypatch.setattr(history, "held_alone", lambda *_, patience_s, **__: waits.append(patience_s))
    history.only_trainer(tmp_path / "lock")
    assert waits == [MOST * history.END_OF_KILLED_S]
