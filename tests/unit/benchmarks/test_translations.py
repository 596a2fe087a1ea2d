"""The count of translations over a folder."""

from __future__ import annotations

from pathlib import Path

from benchmarks.translations import measure


def test_files_and_settings_are_counted(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python3 -m verl.main_ppo actor_rollout_ref.rollout.n=8 data.seed=$S x.y=1\n")
    (tmp_path / "other.sh").write_text("echo 'hello\n")
    (tmp_path / "launch.py").write_text("print(1)\n")
    row, crashed = measure("verl", tmp_path)
    assert crashed == []
    assert row == {
        "framework": "verl",
        "files": 3,
        "refused": 2,
        "crashed": 0,
        "translated_files": 1,
        "settings": 3,
        "translated": 1,
        "to_do": row["to_do"],
        "listed": 1,
        "lost": 0,
    }
