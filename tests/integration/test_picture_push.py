"""A push without the vision tower, as SGLang's own loader of the whole model takes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.picture_model import make_picture_model


@pytest.mark.long
@pytest.mark.skipif(find_spec("moe_trm_sglang_cpu") is None, reason="CPU support is installed without CUDA only")
def test_a_push_changes_the_text_and_leaves_the_tower(tmp_path: Path) -> None:
    checkpoint, out = make_picture_model(tmp_path / "pictures"), tmp_path / "answers.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.picture_push", str(checkpoint), str(out)],
        check=False,
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(out.read_text())
    assert answers["pushed"] == answers["expected"]
    pushed = {name: digest for name, digest in answers["pushed"].items() if not name.endswith(".axis_map")}
    same = {name for name, digest in pushed.items() if digest == answers["whole"][name]}
    assert same == {name for name in pushed if name.startswith("visual.")} != set()
