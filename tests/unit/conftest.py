"""A browser, a small checkpoint, and the worked example of the golden numbers: 4 rows, 13 sampled tokens.

Masked cells hold traps.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from moe_trm.corrections.evidence import Evidence
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from moe_trm.ratios import LogRatios

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@dataclass
class WorkedExample:
    """Row 2 has an engine outlier (ratio e^2.5), row 3 is negative and stale, row 1 has a tool token in column 1."""

    mask: Tensor = field(
        default_factory=lambda: _table([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    )
    rollout: Tensor = field(
        default_factory=lambda: _table(
            [[-0.5, -1, -0.2, -2, 0], [-0.3, -9, -0.7, -1.5, -0.4], [-0.1, -4, 0, 0, 0], [-0.8, -0.9, -0.5, 0, 0]]
        )
    )
    behavior: Tensor = field(
        default_factory=lambda: _table(
            [[-0.6, -1, -0.1, -2.3, 0], [-0.3, -1, -0.9, -1.4, -0.4], [-0.1, -1.5, 0, 0, 0], [-0.8, -0.9, -0.6, 0, 0]]
        )
    )
    current: Tensor = field(
        default_factory=lambda: _table(
            [[-0.5, -1.2, -0.1, -2, 0], [-0.2, -5, -1, -1.3, -0.5], [-0.1, -1.2, 0, 0, 0], [-1, -1.4, -0.9, 0, 0]]
        )
    )
    signs: Tensor = field(default_factory=lambda: torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64))

    @property
    def advantages(self) -> Tensor:
        return self.signs[:, None] * self.mask

    @property
    def ratios(self) -> LogRatios:
        return LogRatios(self.rollout, self.behavior, self.current, self.mask)

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.ratios, self.advantages)


@pytest.fixture
def fx() -> WorkedExample:
    return WorkedExample()


SMALL = TinyShape(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, experts=4, expert_ffn=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, seed=0, shape=SMALL)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium-headless-shell")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path)
        yield opened
        opened.close()
