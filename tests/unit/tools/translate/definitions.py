"""Keys of the frameworks' own definitions, read in their source; and what changed since our lists were written.

    python -m tests.unit.tools.translate.definitions NAME REPOSITORY [--write]

Lists keys that are new there and keys that are gone, and exits with 1 where there are any. `--write` adds the new ones
to `moe_trm/tools/translate/keys/NAME.txt`; what becomes of them is for the tables to say. Source is parsed, never run.
A key that ends in `.*` or `-*` has further ones below it, of which nobody has a list.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import moe_trm.tools.translate as translate

LISTS = Path(translate.__file__).with_name("keys")
_FILES = {
    "verl": ["verl/trainer/config/_generated_*.yaml"],
    "nemo-rl": ["examples/configs/grpo_math_1B.yaml", "examples/configs/grpo_math_1B_megatron.yaml"],
    "slime": ["slime/utils/arguments.py", "slime/backends/*/arguments.py"],
    "miles": ["miles/utils/arguments.py", "miles/backends/*/arguments.py"],
    "trl": ["trl/trainer/base_config.py", "trl/trainer/grpo_config.py", "trl/scripts/utils.py",
            "trl/scripts/grpo.py", "trl/trainer/model_config.py"],
    "prime-rl": ["packages/prime-rl-configs/src/prime_rl/configs/*.py"],
    "skyrl": ["skyrl/train/config/config.py"],
    "areal": ["areal/api/cli_args.py"],
}  # fmt: skip
_INSTALLED = {
    "trl": ["transformers/training_args.py"],
    "megatron": ["megatron/core/transformer/transformer_config.py", "megatron/core/model_parallel_config.py",
                 "megatron/core/optimizer/optimizer_config.py",
                 "megatron/core/distributed/distributed_data_parallel_config.py"],
}  # fmt: skip
"""Definitions in packages that are installed here."""
_ROOTS = {
    "megatron": ("MLATransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"),
    "trl": ("TrainingArguments", "GRPOConfig", "_BaseConfig", "ScriptArguments", "DatasetMixtureConfig",
            "GRPOScriptArguments", "ModelConfig"),
    "prime-rl": ("RLConfig",),
    "skyrl": ("SkyRLTrainConfig",),
    "areal": ("GRPOConfig",),
}  # fmt: skip


def defined(name: str, repository: Path) -> set[str]:
    """Keys of one framework, from the newest commit of its repository."""
    texts = _installed(name) if name == "megatron" else _sources(repository, _FILES[name]) + _installed(name)
    if name in ("verl", "nemo-rl"):
        return {key for text in texts for key in _leaves(yaml.safe_load(text))}
    trees = [ast.parse(text) for text in texts]
    if name in ("slime", "miles"):
        return {flag for tree in trees for flag in _flags(tree)}
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    aliases = {alias: value for tree in trees for alias, value in _aliases(tree)}
    return {key for root in _ROOTS[name] if root in classes for key in _fields(root, classes, aliases, "", ())}


def listed(name: str) -> set[str]:
    """Keys of the list beside the tables."""
    file = LISTS / f"{name}.txt"
    return set(file.read_text(encoding="utf-8").split()) if file.exists() else set()


def _installed(name: str) -> list[str]:
    site = Path(yaml.__file__).parents[1]
    return [(site / file).read_text(encoding="utf-8") for file in _INSTALLED.get(name, ())]


def _sources(repository: Path, patterns: list[str]) -> list[str]:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=True).stdout

    names = git("ls-tree", "-r", "--name-only", "HEAD").splitlines()
    matching_names = [name for name in names if any(Path(name).match(pattern) for pattern in patterns)]
    return [git("show", f"HEAD:{name}") for name in matching_names]


def _leaves(data: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(data, dict) and data:
        for key, inner in data.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif data == {}:
        yield f"{prefix}.*"
    elif prefix:
        yield prefix


def _flags(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("add_argument", "reset_arg"):
            values = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield from (value[2:] for value in values if isinstance(value, str) and value.startswith("--"))


def _aliases(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _fields(
    name: str, classes: dict[str, ast.ClassDef], aliases: dict[str, ast.AST], prefix: str, above: tuple[str, ...]
) -> Iterator[str]:
    """Fields of a class and of those it extends; a field whose type is a class of the same source has its fields."""
    if name in above:
        return
    node = classes[name]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _fields(base.id, classes, aliases, prefix, above)
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(field.annotation) or field.target.id.startswith("_"):
            continue
        key = f"{prefix}{field.target.id}"
        inner = list(dict.fromkeys(_classes(field.annotation, classes, aliases, ())))
        if not inner:
            is_open = "dict" in ast.unparse(field.annotation).lower()
            yield f"{key}.*" if is_open else key
        for part in inner:
            yield from _fields(part, classes, aliases, f"{key}.", (*above, name))


def _classes(
    node: ast.AST, classes: dict[str, ast.ClassDef], aliases: dict[str, ast.AST], above: tuple[str, ...]
) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        node = ast.Name(node.value)
    for part in ast.walk(node):
        name = part.id if isinstance(part, ast.Name) else ""
        if name in classes:
            yield name
        elif name in aliases and name not in above:
            yield from _classes(aliases[name], classes, aliases, (*above, name))


def main() -> int:
    """Compare one list with the source it was read in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*_FILES, "megatron"))
    parser.add_argument("repository", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    keys_there, keys_here = defined(args.name, args.repository), listed(args.name)
    new, gone = keys_there - keys_here, keys_here - keys_there
    for title, keys in (("new", new), ("gone", gone)):
        sys.stdout.write("".join(f"{title}: {key}\n" for key in sorted(keys)))
    if args.write:
        (LISTS / f"{args.name}.txt").write_text("\n".join(sorted(keys_there | keys_here)) + "\n", encoding="utf-8")
    return 1 if new or gone else 0


if __name__ == "__main__":
    sys.exit(main())
