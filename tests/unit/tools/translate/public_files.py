"""Launch files of a framework's own repository, translated: none of their settings may be unaccounted for.

    python -m tests.unit.tools.translate.public_files NAME REPOSITORY [--since 2026-06-01]

Prints the settings translated, to do and without a counterpart, those that are unknown, and the files that are refused
as no configuration. It exits with 1 where a setting is in none of these lists. TRL has few launch files: the arguments
of each `GRPOConfig(...)` in its documentation and examples are taken, where they are literals.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from moe_trm.errors import ConfigError
from moe_trm.tools import translate

FILES = {
    "slime": r"(scripts|examples)/.*run-.*\.sh",
    "miles": r"(scripts|examples)/.*run[^/]*\.(sh|py)",
    "verl": r"examples/(?!sft/).*\.sh",
    "trl": r"(docs|examples)/.*\.(md|py)",
    "nemo-rl": r"examples/configs/(recipes/llm/)?grpo[^/]*\.yaml",
    "skyrl": r"examples/(?!.*/sft/).*\.sh",
    "prime-rl": r"(examples|configs)/.*\.toml",
    "areal": r"examples/.*\.yaml",
}

_BESIDE = {"nemo-rl": r"examples/configs/.*\.yaml"}
"""Files that those name."""


@dataclass
class Tally:
    """Counts over the files of a repository."""

    files: int = 0
    translated: int = 0
    to_do: int = 0
    listed: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    unaccounted: list[tuple[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def tally(name: str, repository: Path, since: str | None) -> Tally:
    """Translate the launch files in the newest commit, or those of them that changed `since` a date."""
    result, translator = Tally(), getattr(translate, f"from_{name.replace('-', '_')}")
    with tempfile.TemporaryDirectory() as folder:
        for path in _checked_out(name, repository, since, Path(folder)):
            shown = str(path.relative_to(folder))
            try:
                draft = translator(path)
            except ConfigError:
                result.refused.append(shown)
                continue
            result.files += 1
            result.unknown.update(draft.unknown)
            result.to_do += len(draft.to_do)
            result.translated += len(draft.translated.keys() - draft.to_do.keys())
            result.listed += len(draft.missing.keys() - draft.translated.keys() - draft.to_do.keys())
            result.unaccounted += [(shown, key) for key in draft.settings if not draft.accounted(key)]
    return result


def _checked_out(name: str, repository: Path, since: str | None, folder: Path) -> Iterator[Path]:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=True).stdout

    recent = set(git("log", f"--since={since}", "--format=", "--name-only").split()) if since else None
    listed = git("ls-tree", "-r", "--name-only", "HEAD").splitlines()
    for file in listed:
        if not re.fullmatch(_BESIDE.get(name, FILES[name]), file):
            continue
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(git("show", f"HEAD:{file}"), encoding="utf-8")
    for file in listed:
        if re.fullmatch(FILES[name], file) and (recent is None or file in recent):
            yield from _calls(folder / file) if name == "trl" else [folder / file]


def _calls(path: Path) -> Iterator[Path]:
    """Each `GRPOConfig(...)` of a file as the YAML that `trl grpo --config` takes."""
    text = path.read_text(encoding="utf-8")
    sources = [text] if path.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for place, source in enumerate(sources):
        try:
            calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        except SyntaxError:
            continue
        for call in calls:
            if getattr(call.func, "id", "") == "GRPOConfig":
                written = path.with_name(f"{path.name}-{place}-{call.lineno}.yaml")
                literals = {word.arg: value for word in call.keywords for value in _literal(word.value)}
                written.write_text(yaml.safe_dump({"model_name_or_path": "m", **literals}), encoding="utf-8")
                yield written


def _literal(node: ast.expr) -> list[object]:
    try:
        return [ast.literal_eval(node)]
    except ValueError:
        return []


def main() -> int:
    """Translate one repository's files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(FILES))
    parser.add_argument("repository", type=Path)
    parser.add_argument("--since", help="a date: only files that changed from then on")
    args = parser.parse_args()
    counts = tally(args.name, args.repository, args.since)
    lines = [f"{counts.files} files: {counts.translated} settings translated, {counts.to_do} to do, {counts.listed} "
             f"without a counterpart, {len(counts.unaccounted)} unaccounted for"]  # fmt: skip
    lines += [f"unaccounted for: {key} in {file}" for file, key in counts.unaccounted]
    lines += [f"unknown, to do: {key}, {number} times" for key, number in counts.unknown.most_common()]
    lines += [f"no configuration: {file}" for file in counts.refused]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if counts.unaccounted else 0


if __name__ == "__main__":
    sys.exit(main())
