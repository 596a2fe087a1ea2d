"""One rank of a replay test: `python -m tests.integration.replay_rank FOLDER PARALLEL MODULE SCENARIO [SCENARIO ...]`.

It runs functions of a test module one after the other. FOLDER/reports-RANK.json gets one report of each, empty when it
passed.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from moe_trm.learner.megatron.cpu import install


def main(folder: Path, parallel: dict[str, int], module: str, names: list[str]) -> None:
    install()
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    reports = {}
    for name in names:
        try:
            getattr(importlib.import_module(module), name)(folder)
            reports[name] = ""
        except BaseException:  # noqa: BLE001 - whatever a scenario raises is its report
            reports[name] = traceback.format_exc()
    (folder / f"reports-{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4:])
