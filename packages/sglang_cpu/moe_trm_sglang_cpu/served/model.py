"""The classes of SGLang that serve the checkpoint. Without any SGLang imports all of its models, and looks among them.

Imported by SGLang's processes, which know the checkpoint by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from sglang.srt import runtime_context

from moe_trm_sglang_cpu.architectures import files_of


def classes() -> Iterator[type]:
    """SGLang's class of each architecture of the checkpoint."""
    folder = Path(runtime_context.__file__).parent / "models"
    for file, architecture in files_of(Path(runtime_context.get_model().model_path), folder):
        module = import_module(f"sglang.srt.models.{file.stem}")
        if file.stem == "qwen3_moe":
            from moe_trm_sglang_cpu import qwen3_moe

            module.Qwen3MoeModel.forward = qwen3_moe.wrap(module.Qwen3MoeModel.forward)
        entry = getattr(module, "EntryClass", [])
        entries = entry if isinstance(entry, list) else [entry]
        yield from (found for found in entries if found.__name__ == architecture)


EntryClass = list(classes())
