"""No process of a run takes a module from the folder that it was started in."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

from moe_trm.methods.load import load_function
from moe_trm.runtime.python import run_module

REPOSITORY = Path(__file__).parents[3]
PLANTED = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"


def test_a_module_planted_in_the_working_folder_is_not_executed(tmp_path: Path) -> None:
    for name in ("psutil", "numpy", "msgspec", "typing_extensions"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    done = subprocess.run(
        run_module("moe_trm.runtime.functions.worker"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "Traceback" in done.stderr, "it has begun, and found no descriptor"
    assert not (tmp_path / "executed").exists()


def test_modules_are_run_in_this_way_only() -> None:
    for folder in ("moe_trm", "launch"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            assert "-m" not in constants or path.name == "python.py", f"{path} runs a module by itself"


def test_a_users_file_stands_in_for_no_other_module(tmp_path: Path) -> None:
    (tmp_path / "nturl2path.py").write_text(PLANTED)
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 3\n")
    (tmp_path / "mine.py").write_text(
        "import nturl2path\nimport helper_of_mine\n\n"
        "def score(): return helper_of_mine.VALUE, nturl2path.url2pathname('a')\n"
    )
    function = load_function(f"{tmp_path / 'mine.py'}:score", key="task.reward")
    assert function()[0] == 3
    assert not (tmp_path / "executed").exists()
