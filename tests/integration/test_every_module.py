"""Every module of the distribution imports in this environment."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec

import pytest

import benchmarks
import launch
import moe_trm
import routing
from moe_trm.learner.megatron.cpu_shim import import_uncompiled

PACKAGES = (moe_trm, routing, launch, benchmarks)
OPTIONAL = {"tensorboard", "vllm", "wandb", "mlflow", "trackio", "trl", "verl", "slime", "transformer_engine"}
"""Packages that only users of one thing install: modules that import one are left out where it is missing."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.__name__))
def test_every_module_imports(package: object) -> None:
    path, name = package.__path__, package.__name__  # type: ignore[attr-defined]
    modules = [
        module.name for module in pkgutil.walk_packages(path, f"{name}.") if not module.name.endswith("__main__")
    ]
    assert len(modules) > 3
    import_uncompiled()  # as every rank does
    failures = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            if missing not in OPTIONAL or find_spec(missing) is not None:
                failures.append(f"{module}: {error}")
        except ImportError as error:
            failures.append(f"{module}: {error}")
    assert not failures
