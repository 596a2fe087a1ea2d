"""Imports go one way: the pure packages load no engine, and `routing` knows nothing of the harness."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

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
ENGINE_SIDE = ("routing.megatron", "routing.megatron_checks", "routing.sglang", "routing.hf")


def loaded_by(modules: list[str]) -> set[str]:
    program = f"import sys; from importlib import import_module; [import_module(m) for m in {modules!r}]; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def modules_of(name: str) -> list[str]:
    package = import_module(name)
    if not hasattr(package, "__path__"):
        return [name]
    inner = [info.name for info in pkgutil.walk_packages(package.__path__, f"{name}.")]
    return [name, *(module for module in inner if not module.startswith(ENGINE_SIDE))]


@pytest.mark.parametrize("name", PURE)
def test_pure_packages_import_no_engine(name: str) -> None:
    modules = modules_of(name)
    loaded = {module.split(".")[0] for module in loaded_by(modules)}
    assert name.split(".")[0] in loaded
    assert not loaded & set(ENGINES)


def test_routing_imports_nothing_of_the_harness() -> None:
    assert not [module for module in loaded_by(modules_of("routing")) if module.startswith("moe_trm")]


def test_advantages_need_no_torch() -> None:
    """The rollout controller computes them and stays light."""
    assert "torch" not in loaded_by(["moe_trm.batch.advantages"])
