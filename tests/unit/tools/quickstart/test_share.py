"""Two processes that share each batch of the warm-up learn what one learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

PROGRAM = """
import sys
from pathlib import Path
from moe_trm.tools.quickstart.share import forked
from moe_trm.tools.quickstart.warmup import WarmupRecipe, warm_up
recipe = WarmupRecipe(
    max_digits=1, batch_size=15, steps=6, further_steps=1, max_steps=6, mixed_steps=2, extra_rounds=0, eval_size=9,
    enough=0.0, max_greedy=1.0, min_working=0.0,
)
warm_up(Path(sys.argv[1]), recipe=recipe, share=forked(int(sys.argv[2])))
"""


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    """Batches and problems of an odd number, so that the parts are unlike."""
    said = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), str(size)], capture_output=True, text=True, check=True
        )
        said.append(len(done.stdout.splitlines()))
    one, two = (load_file(tmp_path / size / "model.safetensors") for size in ("1", "2"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert float((tensor - two[name]).abs().max()) < 1e-3, name
    reports = [json.loads((tmp_path / size / "warmup.json").read_text())["report"] for size in ("1", "2")]
    assert reports[0]["steps"] == reports[1]["steps"] == 6
    assert abs(reports[0]["greedy_accuracy"] - reports[1]["greedy_accuracy"]) < 0.2
    assert said[0] == said[1], "the second process says nothing"
