"""Processes of SGLang as the CPU support package starts them, and the models that they import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.architectures import files_of

PROGRAM = """
import gc, multiprocessing, sys, threading
from moe_trm_sglang_cpu.processes import fork_from_here
with_thread = sys.argv[1] == "with a thread"
multiprocessing.set_start_method("fork" if with_thread else "spawn", force=True)
done = threading.Event()
thread = threading.Thread(target=done.wait)
if with_thread:
    thread.start()
fork_from_here("positional", named=1)
print(multiprocessing.get_start_method(), gc.get_freeze_count() > 0)
done.set()
try:
    import megatron
except ImportError:
    print("hidden")
"""


@pytest.mark.parametrize(("kind", "said"), [("alone", "fork True"), ("with a thread", "spawn False")])
def test_processes_are_forks_of_one_without_threads(kind: str, said: str) -> None:
    """Only what forks share is kept from collections of garbage."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [said, "hidden"]


def test_the_served_model_is_found_by_its_name(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "qwen3_moe.py").write_text("class Qwen3MoeForCausalLM(nn.Module): ...")
    (models / "qwen3_moe_eagle.py").write_text("class Qwen3MoeForCausalLMEagle(Qwen3MoeForCausalLM): ...")
    (models / "other.py").write_text("from qwen3_moe import Qwen3MoeForCausalLM")

    def found(config: object) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return [f"{file.name} {architecture}" for file, architecture in files_of(tmp_path, models)]

    assert found({"architectures": ["Qwen3MoeForCausalLM"]}) == ["qwen3_moe.py Qwen3MoeForCausalLM"]
    assert found({"architectures": ["Unknown"]}) == found({"architectures": None}) == found({}) == []
    assert not list(files_of(tmp_path / "a-name-of-a-hub", models))
