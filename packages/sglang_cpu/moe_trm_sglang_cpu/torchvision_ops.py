"""Declares `torchvision::nms` where torchvision's compiled library cannot be loaded.

The `torchvision` wheel on PyPI is linked against CUDA. With a CPU build of torch its library does not load, so the
operator is not defined. torchvision's own registration of a fake kernel for it then raises on import. SGLang and the
model classes of transformers import torchvision and never call it. The `.pth` line installs the hook at every
interpreter start, so that plain transformers works as well.
"""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from types import ModuleType


def find_elsewhere(this: object, name: str, path: object, target: ModuleType | None) -> ModuleSpec | None:
    """The spec that the finders behind `this` on `sys.meta_path` give for `name`, or None."""
    position = next((index for index, finder in enumerate(sys.meta_path) if finder is this), len(sys.meta_path))
    for finder in sys.meta_path[position + 1 :]:
        spec = finder.find_spec(name, path, target)  # type: ignore[arg-type]
        if spec is not None:
            return spec
    return None


class TorchvisionOps:
    """A `sys.meta_path` hook that acts once, just before torchvision is imported, and never provides a module."""

    def __init__(self) -> None:
        self._library: object = None
        """Keeps the registration alive: torch drops a library's operators with the object."""
        self._done = False

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name == "torchvision" and not self._done:
            self._done = True
            spec = find_elsewhere(self, name, path, target)
            if spec is not None and not self._real_library_loads(spec):
                self._declare()

    def _real_library_loads(self, spec: ModuleSpec) -> bool:
        from pathlib import Path  # every interpreter start pays for what this module imports

        import torch

        if torch.version.cuda:
            return True
        for folder in spec.submodule_search_locations or ():
            for suffix in (*EXTENSION_SUFFIXES, ".so", ".pyd", ".dylib"):
                library = Path(folder) / f"_C{suffix}"
                if library.exists():
                    try:
                        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
                    except OSError:
                        return False
                    return True
        return False

    def _declare(self) -> None:
        import torch

        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            signature = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(signature)  # type: ignore[no-untyped-call]
        self._library = library


def install() -> None:
    """Make the next import of torchvision work beside a CPU build of torch.

    Idempotent; costs nothing until torchvision is imported.
    """
    if not any(isinstance(finder, TorchvisionOps) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionOps())
