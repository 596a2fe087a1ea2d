"""Weights on their way to the engine, in seconds per GB, beside what memory, folder and processor need at least.

`python -m benchmarks.weights [--gib 2] [--folder DIR] [--rounds 5] [--json FILE]` makes float32 tensors of a mixture of
experts, exports them as a rank does (`export`: rounded to bfloat16, digested, written in buckets) and reads them back
as the controller does (`proof`: digests of the files, checksums that the engine must report). The rows `export, one
after the other` and `proof, one after the other` make the same steps without threads and buckets. GB are counted in the
bfloat16 files; all rows are medians of rounds in turn. Beside the seconds are the CPU seconds of all threads: the work
to be shared out, also where neighbours keep the cores busy.

The first rows are limits: the bytes copied in memory, written to the folder and read from it, the cast to bfloat16, the
digest of a tensor (XXH3-128), and the engine's hash on a CPU (SHA-256) and on CUDA, which is computed here on the CPU,
too. An export has to cast, digest and write; a proof to read, digest and hash. The last rows have both over the sum of
these limits on one core: below 1 where threads gain.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.rollout.servers.backend import Digests
from moe_trm.rollout.sglang.checksum import EngineChecksums
from moe_trm.rollout.sglang.disk_load import verified_checksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.rollout.sglang.gpu_hash import GpuTensorHash
from moe_trm.sync.disk import write_buckets
from moe_trm.sync.manifest import TensorEntry, WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.sync.tensors import HASH_THREADS, tensor_bytes, tensor_digest

EXPERTS, WIDTH, HIDDEN = 32, 768, 2048
ROUNDING = Rounding("bfloat16")
LIMITS = {"export": ("cast", "digest", "write"), "proof": ("read", "digest", "hash")}
"""Steps that each has to do at least with every byte."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the push in bfloat16 (default: 2)")
    parser.add_argument("--folder", type=Path, help="where files go (default: a temporary folder)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # as a rank without a device has
    tensors = dict(experts(int(args.gib * 2**30)))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = list(measured(tensors, Path(folder), args.rounds))
    report(f"Seconds per GB of a push, {HASH_THREADS} threads", rows, args.json)
    return 0


def experts(size: int) -> Iterator[tuple[str, Tensor]]:
    """float32 matrices of experts, of `size` bytes in bfloat16, layer by layer."""
    remaining, number = size, 0
    while remaining > 0:
        layer, place = divmod(number, EXPERTS * 3)
        expert, part = divmod(place, 3)
        shape = (HIDDEN, WIDTH) if part == 2 else (WIDTH, HIDDEN)
        name = ("gate", "up", "down")[part]
        yield f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight", torch.randn(shape)
        remaining, number = remaining - 2 * HIDDEN * WIDTH, number + 1


def measured(tensors: Mapping[str, Tensor], folder: Path, rounds: int) -> Iterator[Row]:
    """A row for each way, medians of rounds in turn."""
    folder = folder / "v000001"
    gigabytes = sum(tensor.numel() for tensor in tensors.values()) * 2 / 1e9
    push = WeightPush(1, str(folder), export(tensors, folder))
    block = torch.cat([tensor.view(-1)[: 1 << 20] for tensor in list(tensors.values())[:128]]).bfloat16()
    repeated, wide = gigabytes * 1e9 / block.nbytes, block.float()
    written, memory = folder / "block", bytearray(block.nbytes)
    written.write_bytes(tensor_bytes(block))
    ways: dict[str, Callable[[], object]] = {
        "copy in memory": lambda: block.clone(),
        "write": lambda: written.write_bytes(tensor_bytes(block)),
        "read": lambda: read_again(written, memory),
        "cast": lambda: wide.bfloat16(),
        "digest": lambda: tensor_digest(block),
        "hash": lambda: hashlib.sha256(tensor_bytes(block)).digest(),
        "hash of CUDA": lambda: cuda_hash(block),
        "export": lambda: export(tensors, folder),
        "export, one after the other": lambda: export_in_turn(tensors, folder / "in-turn.safetensors"),
        "proof": lambda: verified_checksums(push, EngineShape("bfloat16")),
        "proof for CUDA": lambda: verified_checksums(push, EngineShape("bfloat16", "cuda")),
        "proof, one after the other": lambda: prove_in_turn(push),
    }
    scale = {name: repeated if not name.startswith(("export", "proof")) else 1.0 for name in ways}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started, busy = time.perf_counter(), time.process_time()
            way()
            spent = time.perf_counter() - started, time.process_time() - busy
            seconds[name].append((spent[0] * scale[name] / gigabytes, spent[1] * scale[name] / gigabytes))
    for name, pairs in seconds.items():
        wall, cpu = zip(*pairs, strict=True)
        yield {
            "what": name,
            "s/GB": statistics.median(wall),
            "min": min(wall),
            "max": max(wall),
            "CPU s/GB": statistics.median(cpu),
        }
    for name, parts in LIMITS.items():
        limits = [sum(times) for times in zip(*([wall for wall, _ in seconds[part]] for part in parts), strict=True)]
        ratios = [wall / limit for (wall, _), limit in zip(seconds[name], limits, strict=True)]
        yield {"what": name, "over": " + ".join(parts), "ratio": statistics.median(ratios)}


def cuda_hash(tensor: Tensor) -> str:
    digest = GpuTensorHash()
    digest.update(tensor)
    return digest.hexdigest()


def read_again(path: Path, memory: bytearray) -> None:
    with path.open("rb", buffering=0) as file:
        file.readinto(memory)


def export(tensors: Mapping[str, Tensor], folder: Path) -> tuple[TensorEntry, ...]:
    return write_buckets(folder, "model-rank-00000", tensors.items(), ROUNDING)


def export_in_turn(tensors: Mapping[str, Tensor], path: Path) -> None:
    pushed = {name: ROUNDING.pushed(name, tensor) for name, tensor in tensors.items()}
    for tensor in pushed.values():
        tensor_digest(tensor)
    save_file(pushed, path, metadata={"format": "pt"})
    path.unlink()


def prove_in_turn(push: WeightPush) -> Digests:
    checksums = EngineChecksums((entry.name for entry in push.tensors), EngineShape("bfloat16"))
    for file in sorted({entry.file for entry in push.tensors}):
        for name, tensor in load_file(Path(push.directory) / file).items():
            tensor_digest(tensor)
            checksums.add(name, tensor)
    return checksums.result()


if __name__ == "__main__":
    sys.exit(main())
