"""SGLang's own model of a release with a vision tower, in one process: what a push without the tower changes of it.

`python -m tests.integration.picture_push CHECKPOINT OUT.json`, with SGLANG_USE_CPU_ENGINE=1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from tests.integration import sglang_ranks


def main() -> None:
    from sglang.srt.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration as Model
    from sglang.srt.server_args import ServerArgs

    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    server = ServerArgs(
        model_path=str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True,
        attention_backend="torch_native", tp_size=1,
    )  # fmt: skip
    torch.set_default_dtype(torch.float32)
    stored = load_file(folder / "model.safetensors")
    text = {name: tensor * 2 for name, tensor in stored.items() if ".visual." not in name}
    loads = Model.load_weights

    def then_the_push(model: Model, weights: object) -> None:
        loads(model, weights)
        loads(model, iter(text.items()))

    whole = sglang_ranks.rank_checksums(server, 0, stored, None)["checksums"]
    expected = sglang_ranks.rank_checksums(server, 0, {**stored, **text}, None)["checksums"]
    with patch.object(Model, "load_weights", then_the_push):
        pushed = sglang_ranks.rank_checksums(server, 0, stored, None)["checksums"]
    out.write_text(json.dumps({"whole": whole, "expected": expected, "pushed": pushed}))


if __name__ == "__main__":
    main()
