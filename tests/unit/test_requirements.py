"""The lists of pins: what the tests run with is what GPUs get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from moe_trm.config.engines import ENGINES
from moe_trm.tools.doctor.environment import TESTED
from moe_trm.tools.plan.candidates import PINNED_MEGATRON

FOLDER = Path(__file__).resolve().parents[2] / "requirements"
REQUIRED_PRE_RELEASES = {"flash-attn-4"}
"""SGLang requires a pre-release, and there is no release."""


def pins(name: str, python: str) -> dict[str, str]:
    """Versions by package of a list, for this Python."""
    versions: dict[str, str] = {}
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
                (specifier,) = requirement.specifier
                assert specifier.operator == "=="
                package = canonicalize_name(requirement.name)
                assert package not in versions, f"{package} stands twice"
                versions[package] = specifier.version
    return versions


GPU = pins("gpu.txt", "3.12")


def test_the_lane_without_a_gpu_runs_what_gpus_run() -> None:
    cpu = pins("cpu.txt", "3.12")
    assert {package: version for package, version in cpu.items() if GPU.get(package, version) != version} == {}
    named = {"torch", "megatron-core", "transformers", "sglang", "deepspeed", "safetensors", "numpy", "tokenizers"}
    assert named <= cpu.keys() & GPU.keys()


def test_python_3_11_differs_in_few_packages() -> None:
    older, newer = pins("cpu.txt", "3.11"), pins("cpu.txt", "3.12")
    assert older.keys() == newer.keys()
    assert {package for package in older if older[package] != newer[package]} == {
        "megatron-core",
        "torch",
        "torchvision",
    }


def test_cuda_libraries_are_those_of_gpus() -> None:
    libraries = pins("cuda.txt", "3.12")
    assert libraries
    assert libraries.items() <= GPU.items()


def test_gpus_get_no_pre_releases_that_sglang_does_not_require() -> None:
    assert {package for package, version in GPU.items() if Version(version).is_prerelease} == REQUIRED_PRE_RELEASES


@pytest.mark.parametrize("package", TESTED)
def test_the_doctor_and_the_planner_know_the_pins(package: str) -> None:
    assert TESTED[package] == tuple(dict.fromkeys(pins("cpu.txt", python)[package] for python in ("3.12", "3.11")))
    assert GPU["megatron-core"] == PINNED_MEGATRON


def test_engines_of_the_configuration_are_the_pinned_ones() -> None:
    engines = dict(package.split("==") for traits in ENGINES.values() for package in traits.packages)
    assert engines.items() <= pins("cpu.txt", "3.12").items()


def test_messages_of_the_makefile_name_the_pins() -> None:
    (said,) = re.findall(r"Python 3\.11 has .*", (FOLDER.parent / "Makefile").read_text(encoding="utf-8"))
    assert all(pins("cpu.txt", python)["megatron-core"] in said for python in ("3.11", "3.12"))
