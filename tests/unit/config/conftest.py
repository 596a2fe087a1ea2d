"""A configuration of two settings."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {checkpoint: start}\noptimizer: {lr: 3e-4}\n")
    return path
