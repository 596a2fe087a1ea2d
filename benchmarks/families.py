"""Table of every MoE family of the installed transformers: whether replay is proved for it, or at which step it fails.

`python -m benchmarks.families [FAMILY ...]` examines a tiny model of each (`moe_trm.learner.deepspeed.conformance`), as
a start of the DeepSpeed learner does for families without a description of their own. It keeps what it finds in
benchmarks/families.json, family by family, and writes docs/models.md.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import models
from moe_trm.models.registry import indexer_layers

_COMPLETED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
"""Keys that transformers' defaults leave open, and every release has."""
_NOT_TEXT = ("gemma4_assistant",)
"""Drafts for another model's decoding: nothing to train."""


def moe_families() -> dict[str, str]:
    """Model type -> architecture of each causal language model whose code has experts, in the order of their names.

    A family with a configuration of its text has that model type.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    families: dict[str, str] = {}
    for model_type, architecture in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        folder = Path(inspect.getfile(CONFIG_MAPPING[model_type])).parent
        code = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("modeling_*.py")))
        if "self.experts = " in code and architecture.endswith("ForCausalLM") and model_type not in _NOT_TEXT:
            families[architecture] = model_type
    return {model_type: architecture for architecture, model_type in families.items()}


def proof_of(family: str) -> dict[str, str]:
    """The finding for a family as transformers' defaults have it, with sizes divided."""
    from transformers import AutoConfig

    from moe_trm.learner.deepspeed.conformance import examine

    hf_config = AutoConfig.for_model(family, **_COMPLETED.get(family, {})).to_dict()
    if indexer_layers(hf_config | {"architectures": [moe_families()[family]]}):
        return {"step": "", "problem": "with the positions of its indexer, by tests/integration/test_replay_indexer.py"}
    finding = examine(hf_config)
    return {"step": finding.step, "problem": _short(finding.problem)}


def _short(problem: str) -> str:
    return problem.splitlines()[0].replace("|", "/")[:200] if problem else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    families = moe_families()
    parser.add_argument("family", nargs="*", help="model types (default: all)")
    args = parser.parse_args(argv)
    proofs = models.found_in(models.FOUND_PROOFS)
    for family in args.family or families:
        proofs[family] = proof_of(family)
        print(f"{family}: {proofs[family]}", flush=True)
        ordered: Mapping[str, object] = {name: proofs[name] for name in families if name in proofs}
        models.FOUND_PROOFS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return models.main(["--page-only"])


if __name__ == "__main__":
    sys.exit(main())
