"""The pages that lie outside docs/ become pages of the site, and links of the repository become links of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "benchmarks/RESULTS.md",
    "examples/calculator/README.md": "examples/calculator.md",
    "examples/agent/README.md": "examples/agent.md",
    "examples/openai_agents/README.md": "examples/openai_agents.md",
    "examples/terminal/README.md": "examples/terminal.md",
    "examples/own_methods/README.md": "examples/own_methods.md",
    "examples/distillation/README.md": "examples/distillation.md",
    "examples/logit_fusion/README.md": "examples/logit_fusion.md",
    "packages/sglang_cpu/README.md": "packages/sglang_cpu.md",
    "packages/vllm_worker/README.md": "packages/vllm_worker.md",
}
"""Pages by their path in the repository, and where the site has them."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^):]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/."""
    for source, place in OUTSIDE.items():
        text = (REPOSITORY / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn the links of one page, which are those of the repository, into those of the site."""
    place = page.file.src_uri
    if place.startswith("reference/"):
        page.meta["search"] = {"boost": 0.5}  # a search finds guides before signatures
    sources = {place: source for source, place in OUTSIDE.items()}
    folder = os.path.dirname(sources.get(place, f"docs/{place}"))
    return _LINK.sub(lambda link: _translated(link, folder, os.path.dirname(place), files), markdown)


def _translated(link: re.Match[str], folder: str, here: str, files: Files) -> str:
    """One link; only its text where it leads to a file that is no page."""
    image, text, target = link.groups()
    path, mark, anchor = target.partition("#")
    if not path:
        return link[0]
    source = os.path.normpath(os.path.join(folder, path))
    source = f"{source}/README.md" if f"{source}/README.md" in OUTSIDE else source
    place = OUTSIDE.get(source, source.removeprefix("docs/"))
    if files.get_file_from_path(place) is None:
        return text
    return f"{image}[{text}]({os.path.relpath(place, here or '.')}{mark}{anchor})"
