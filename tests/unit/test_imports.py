"""Imports go one way: the pure packages load no engine, and `routing` knows nothing of the harness."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINES = ("megatron", "sglang", "transformers", "deepspeed", "vllm", "transformer_engine")
PURE = (
    "routing",
    "moe_trm.types",
    "moe_trm.ratios",
    "moe_trm.corrections",
    "moe_trm.losses",
    "moe_trm.diagnostics",
    "moe_trm.sampling_mask",
    "moe_trm.batch.advantages",
    "moe_trm.batch.token_advantages",
)
ENGINE_SIDE = ("routing.megatron", "routing.megatron_checks", "routing.sglang", "routing.vllm", "routing.hf")


def loaded_by(modules: list[str]) -> set[str]:
    """Every module that a fresh process has after these imports."""
    return {name for loaded in loaded_in_turn(modules).values() for name in loaded}


def loaded_in_turn(modules: list[str]) -> dict[str, list[str]]:
    """The modules that each of these imports adds to a fresh process, one after the other."""
    program = f"""
import json, sys
from importlib import import_module
added = {{}}
for name in {modules!r}:
    before = set(sys.modules)
    import_module(name)
    added[name] = sorted(set(sys.modules) - before)
print(json.dumps(added))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {str(name): list(added) for name, added in json.loads(done.stdout).items()}


def modules_of(name: str) -> list[str]:
    package = import_module(name)
    if not hasattr(package, "__path__"):
        return [name]
    inner = [info.name for info in pkgutil.walk_packages(package.__path__, f"{name}.")]
    return [name, *(module for module in inner if not module.startswith(ENGINE_SIDE))]


def test_pure_packages_import_no_engine() -> None:
    loaded = loaded_in_turn([module for name in PURE for module in modules_of(name)])
    assert len(loaded) > len(PURE)
    assert not {
        (module, engine)
        for module, added in loaded.items()
        for engine in {name.split(".")[0] for name in added} & set(ENGINES)
    }


def test_routing_imports_nothing_of_the_harness() -> None:
    assert not [module for module in loaded_by(modules_of("routing")) if module.split(".")[0] == "moe_trm"]


def test_advantages_need_no_torch() -> None:
    """They are NumPy alone."""
    assert "torch" not in loaded_by(["moe_trm.batch.advantages"])


def test_no_module_imports_one_that_imports_it() -> None:
    """Imports inside functions and for types count too. Raises `graphlib.CycleError` with the modules of a cycle."""
    imports = imports_of_modules()
    assert len(tuple(TopologicalSorter(imports).static_order())) == len(imports)


def test_no_package_imports_one_that_imports_it() -> None:
    """The units are the modules and packages at the top of `moe_trm`, and the packages beside it. Raises as above."""
    units: dict[str, set[str]] = {}
    for module, targets in imports_of_modules().items():
        units.setdefault(unit_of(module), set()).update(unit_of(target) for target in targets)
    graph = {unit: targets - {unit} for unit, targets in units.items() if unit != "moe_trm"}
    assert len(tuple(TopologicalSorter(graph).static_order())) >= len(graph)


def test_what_everyone_reads_stands_at_the_top() -> None:
    modules = {path.stem for path in (ROOT / "moe_trm").glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= 8, modules


def imports_of_modules() -> dict[str, set[str]]:
    """By module: the modules that it imports."""
    paths = [path for name in ("moe_trm", "routing", "launch", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name: imported(path) & (modules.keys() - {name}) for name, path in modules.items()}


def unit_of(module: str) -> str:
    """`moe_trm.rollout` of `moe_trm.rollout.sglang.parse`; `routing` of `routing.codec`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "moe_trm" else parts[0]


def imported(path: Path) -> set[str]:
    """Modules that a file names in imports; `from package import name` may mean `package.name`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
