"""A learner on Transformer Engine's layers, on real ranks without CUDA.

Started by torchrun: `fused.py CHECKPOINT OUT RUN [RUN ...]`, a RUN as of `runs.py`.

With `layers=fused` in a RUN, `transformer_engine` is that of `tests/standins`: its signatures, its modules' parameters
(a norm's weight in the linear layer behind it, one weight for each expert of a grouped layer) and plain torch.
Megatron-Core's own specification, wrappers and optimizer call it. Nothing is asserted here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_trm.learner.checkpoint.pieces import PieceReader, write_pieces
from moe_trm.sync.rounding import Rounding
from routing.record.sources import Native
from tests.integration.learner_support.conformance import build, save, work
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.work import objective


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the learner build fused layers on this machine."""
    from moe_trm.learner.megatron import build as learner_build
    from moe_trm.learner.megatron import fp8, schedule
    from moe_trm.learner.megatron.packed import packed_parameters

    patch.setattr(learner_build, "layers_here", lambda *_: "transformer_engine")
    # Rows are padded as 8-bit products need it, which must change nothing.
    patch.setattr(fp8, "alignment", lambda _learner: 16)
    # On a CPU packs have no starts of sequences.
    patch.setattr(schedule, "packed_parameters", lambda *where, latent: packed_parameters(*where, latent=True))


def run(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Score, train a step, save; then take over what the run `from` saved."""
    learner = build(checkpoint, options)
    batches, random, numbers = work(learner)
    learner.export_shard(str(out / "before"), Rounding("float32"))
    scores = [*learner.score(batches, [Native()] * len(batches)), *learner.score(batches, random)]
    first = learner.update(batches, random, objective(batches, []))
    learner.export_shard(str(out / "after"), Rounding("float32"))
    pieces, counters = learner.state()
    (out / "state").mkdir(exist_ok=True)
    write_pieces(out / "state" / f"rank-{dist.get_rank()}.safetensors", pieces)
    dist.barrier()
    names = [f"{kind}.{number}" for kind in ("native", "replayed") for number in numbers]
    save(out, "scores", {name: score.logprobs for name, score in zip(names, scores, strict=True)})
    chunk: Any = learner._chunks[0]  # type: ignore[attr-defined]
    padded = learner._parts.padded(batches[0]).input_ids.shape[1]  # type: ignore[attr-defined]
    applied = learner.replay_report().applied_fraction
    save(out, "facts", {"norm": first.grad_norm, "applied": applied, "columns": padded})
    save(out, "parameters", {name: torch.tensor(value.shape) for name, value in chunk.named_parameters()})
    if "from" in options:
        other = build(checkpoint, options)
        other.restore(PieceReader(sorted((out.parent / options["from"] / "state").glob("*.safetensors"))), counters)
        other.export_shard(str(out / "restored"), Rounding("float32"))


def with_layers(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """The run on the layers that it names."""
    with pytest.MonkeyPatch.context() as patch:
        if options.get("layers") == "fused":
            install(patch)
        run(checkpoint, out, options | {"backend": "megatron"})


def with_transformer_engine() -> None:
    """Begin anew with what Megatron-Core decided when it found no Transformer Engine. The rest stays imported."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "standins"))
    for name in [*sys.modules]:
        if name.startswith(("megatron.", "moe_trm.learner.megatron", "routing.megatron", "tests.")):
            del sys.modules[name]
    import_module("moe_trm.learner.megatron.cpu_shim").define_stash()
    import_module("tests.integration.learner_support.runs").do_runs(
        import_module("tests.integration.learner_support.fused").with_layers
    )


if __name__ == "__main__":
    fused = any("layers=fused" in word for word in sys.argv)
    with_transformer_engine() if fused else do_runs(with_layers)
