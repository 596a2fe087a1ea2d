"""Installs the stand-ins. Called by the `.pth` line at interpreter start, in every process SGLang spawns."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from moe_trm_sglang_cpu import torchvision_ops
from moe_trm_sglang_cpu.inert_triton import InertTritonLoader

STUB = Path(__file__).with_name("sgl_kernel_stub")


class StandIns:
    """A `sys.meta_path` finder for `triton` and `sgl_kernel` that answers only when no other finder does."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "triton" and name != "sgl_kernel":
            return None
        # Finders appended later (editable installs do that) have not been asked yet when the import system gets here.
        real = torchvision_ops.find_elsewhere(self, name, path, target)
        if real is not None:
            return real
        if name == "sgl_kernel":
            # Submodules are the files of this folder: `import sgl_kernel.x` of another fails as if it were absent.
            return spec_from_file_location(name, STUB / "__init__.py", submodule_search_locations=[str(STUB)])
        return ModuleSpec(name, InertTritonLoader(), is_package=True)


def install() -> None:
    """Put the finders on `sys.meta_path`: the stand-ins last, the torchvision hook (which provides no module) first."""
    torchvision_ops.install()
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())
