"""The page of model families says what the last run found."""

from __future__ import annotations

import json

from benchmarks import models
from moe_trm.models.registry import MOE_FAMILIES

FOUND = json.loads(models.FOUND.read_text(encoding="utf-8"))


def test_the_page_is_what_the_last_run_wrote() -> None:
    assert models.PAGE.read_text(encoding="utf-8") == models.page(FOUND), (
        "run `python -m benchmarks.models --page-only`"
    )


def test_every_cell_of_every_family_is_yes_or_has_its_reason() -> None:
    assert tuple(FOUND) == MOE_FAMILIES
    for engines in FOUND.values():
        for engine in ("sglang", *models.LEARNERS):
            checks = models.CHECKS["sglang" if engine == "sglang" else "learner"]
            assert all(engines[engine][check] for check in checks)


def test_a_reason_is_numbered_once_and_said_below() -> None:
    cells = dict.fromkeys(models.CHECKS["learner"], "yes")
    found = {
        "one": {"sglang": dict.fromkeys(models.CHECKS["sglang"], "it fell over"), "megatron": cells, "deepspeed": cells}
    }
    page = models.page(found)
    assert "| one | SGLang | no (1) | - | - | no (1) | no (1) | no (1) |" in page
    assert "\n1. it fell over\n" in page
    assert "| one | Megatron-Core | - | yes | yes | yes | yes | yes |" in page
