"""Imports go one way: the pure packages load no engine, and `routing` knows nothing of the harness."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
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
    "moe_trm.advantages.by_row",
    "moe_trm.advantages.by_token",
)
ENGINE_SIDE = ("routing.megatron", "routing.hosts.megatron_checks", "routing.sglang", "routing.vllm", "routing.hf")


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
    assert "torch" not in loaded_by(["moe_trm.advantages.by_row"])


def test_no_module_imports_one_that_imports_it() -> None:
    """Imports inside functions and for types count too. Raises `graphlib.CycleError` with the modules of a cycle."""
    imports = imports_of_modules()
    assert len(tuple(TopologicalSorter(imports).static_order())) == len(imports)


def test_no_package_imports_one_that_imports_it() -> None:
    """At every level: in `moe_trm`, in `moe_trm.rollout`, and so on; and between them and what is beside `moe_trm`."""
    imports = imports_of_modules()
    inner = packages_of(imports) - {""}
    assert not {package: circle for package in inner if (circle := circle_in(package, imports))}
    units = {name: {target.removeprefix("moe_trm.") for target in targets} for name, targets in imports.items()}
    assert not circle_in("", {name.removeprefix("moe_trm."): targets for name, targets in units.items()})


def test_a_circle_is_found_at_every_level() -> None:
    planted = {"m.a.x.p": {"m.a.y.q"}, "m.a.y.r": {"m.a.x.s"}, "m.a.y.q": set[str](), "m.a.x.s": set[str]()}
    assert {package for package in packages_of(planted) if circle_in(package, planted)} == {"m.a"}
    assert circle_in("m.a", planted) == ["m.a.x", "m.a.y", "m.a.x"]


def test_what_everyone_reads_stands_at_the_top() -> None:
    modules = {path.stem for path in (ROOT / "moe_trm").glob("*.py")} - {"__init__", "__main__"}
    packages = {path.parent.name for path in (ROOT / "moe_trm").glob("*/__init__.py")}
    assert len(modules) <= 5, modules
    assert len(packages) <= 20, packages


def test_the_core_imports_no_tool() -> None:
    """Benchmarks measure tools too. The command line names the modules of its subcommands as text."""
    assert not imports_into("moe_trm.tools", imports_of_modules(), allowed=("moe_trm.tools", "benchmarks"))


def test_an_import_of_a_tool_is_found() -> None:
    planted = {"moe_trm.loop": {"moe_trm.tools.plan.build", "moe_trm.types"}, "moe_trm.tools.a": {"moe_trm.tools.b"}}
    assert imports_into("moe_trm.tools", planted, allowed=("moe_trm.tools",)) == {
        ("moe_trm.loop", "moe_trm.tools.plan.build")
    }


def imports_into(package: str, imports: Mapping[str, set[str]], *, allowed: tuple[str, ...]) -> set[tuple[str, str]]:
    """Imports of modules of `package` by modules outside of the `allowed` packages."""
    return {
        (module, target)
        for module, targets in imports.items()
        for target in targets
        if f"{target}.".startswith(f"{package}.") and not f"{module}.".startswith(tuple(f"{a}." for a in allowed))
    }


@cache
def imports_of_modules() -> dict[str, set[str]]:
    """By module: the modules that it imports."""
    paths = [path for name in ("moe_trm", "routing", "launch", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name: imported(path) & (modules.keys() - {name}) for name, path in modules.items()}


def packages_of(modules: Iterable[str]) -> set[str]:
    """Every package of these modules; the empty name holds those at the top."""
    return {".".join(parts[:depth]) for parts in (name.split(".") for name in modules) for depth in range(len(parts))}


def circle_in(package: str, imports: Mapping[str, set[str]]) -> list[str]:
    """Modules and packages right inside of `package` that import each other in a circle; empty where none do."""
    start = f"{package}." if package else ""

    def unit(module: str) -> str:
        return start + module.removeprefix(start).split(".")[0]

    graph: dict[str, set[str]] = {}
    for module, targets in imports.items():
        # What a package's own __init__ imports from inside it is not between two of its units.
        if module.startswith(start) and module != package:
            inside = {unit(target) for target in targets if target.startswith(start)}
            graph.setdefault(unit(module), set()).update(inside - {unit(module)})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imported(path: Path) -> set[str]:
    """Modules that a file names in imports; `from package import name` may mean `package.name`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
