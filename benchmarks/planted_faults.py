"""Confusion matrix of the doctor: planted faults against the causes it names.

`python -m benchmarks.planted_faults [--checkpoint DIR] [--seeds 0 1 2] [--only FAULT ...] [--lies] [--json FILE]`

Every fault is planted from outside, into an input of one of the two engines: its weights, its config.json, its
settings, its tokenizer, or the connection between them. A real float32 SGLang server that serves the untouched
checkpoint records rollouts once per seed. A learner with a faulty input then scores them, at three severities, and the
doctor names a cause. Clean controls are treated the same way. Faults that no recording shows are planted between a live
server and `moe-trm doctor`, or into the server that the doctor starts.

`--lies` plants faults into a recorded step instead, after the engine (`benchmarks.lies`).

Printed: the confusion matrix, the share of severe faults whose cause was named, and false alarms.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks import lies, stale_decoder
from benchmarks.faults import SEVERITIES, Planted, faults, planted_checkpoint
from benchmarks.options import command_line
from benchmarks.short_run import starting_checkpoint
from benchmarks.swallowing_proxy import swallowing
from benchmarks.table import Row, report
from launch.job import free_port
from launch.start.checks import Check
from moe_trm.batch.collate import collate
from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.learner.protocol import Scores
from moe_trm.recording.bundle import BundleReader
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import start_server
from moe_trm.tools.doctor.causes import find_cause
from moe_trm.tools.doctor.examine import examine
from moe_trm.tools.doctor.measurements import Measurements, join, of_sample
from moe_trm.types import MicroBatch, TrainRow
from routing.judge.flips import flipped_tokens
from routing.record.sources import Record

KEY = "planted-faults"
SETTINGS = {
    "model": {"checkpoint": ""},
    "task": {"eval_size": 0},
    "rollout": {
        "prompts_per_step": 16,
        "group_size": 8,
        "server": {"dtype": "float32", "max_total_tokens": 16384, "max_running_requests": 64},
    },
    "learner": {"micro_batch_rows": 64},
}


class Clinic:
    """Runs the doctor on configurations of one folder."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder, self.checkpoint, self._count = folder, checkpoint, 0
        self._path = folder / "config.yaml"
        self._path.write_text(json.dumps(SETTINGS), encoding="utf-8")  # JSON is YAML

    def settings(self, words: Sequence[str]) -> Config:
        """The common settings with overrides."""
        return load(self._path, words)

    def visit(self, *overrides: str, probe: bool = True) -> tuple[str, dict[str, float], Path]:
        """The cause that the doctor names, its figures, and where the probe's recording lies."""
        self._count += 1
        folder = self.folder / f"visit-{self._count:03d}"
        folder.mkdir()
        words = [f"run_dir={folder}", f"model.checkpoint={self.checkpoint}", *overrides]
        config, path = self.settings(words), self._path
        failed: list[Check] = []
        examination = examine(
            str(path),
            words,
            config,
            1,
            folder,
            lambda check: failed.append(check) if check.status == "fail" else None,
            probe=probe,
        )
        if examination.finding is not None:
            return examination.finding.cause, dict(examination.finding.figures), folder / "bundle"
        return _named(failed), {}, folder / "bundle"


def _named(failed: Sequence[Check]) -> str:
    """The cause that failed checks name by themselves."""
    for check in failed:
        if check.name.startswith("tokenizer"):
            return "tokenizer"
        if "decoding reads stale" in check.says:
            return "decoding"
        if "SyncError" in check.says:
            return "sync"
    return "; ".join(f"{check.name}: {check.says.splitlines()[0]}" for check in failed) or "nothing"


@contextmanager
def serving(checkpoint: Path, folder: Path, dtype: str) -> Iterator[str]:
    """The address of a server of the untouched checkpoint."""
    server_settings = {**SETTINGS["rollout"]["server"], "dtype": dtype, "port": free_port()}  # type: ignore[index]
    config = Config.model_validate(
        {**SETTINGS, "model": {"checkpoint": str(checkpoint)}, "rollout": {"server": server_settings}}
    )
    server = start_server(Served.of(config), folder / f"server-{dtype}.log", KEY)
    try:
        yield server.url
    finally:
        server.stop()


def record(clinic: Clinic, seeds: Sequence[int], needed: Collection[str]) -> dict[tuple[str, int], tuple[Path, str]]:
    """The recordings that are needed, by name and seed: the bundle, and the override under which it was made."""
    requested = {"clean": "rollout.top_p=0.95", **{f"top_p {p}": f"rollout.top_p={p}" for p in (0.98, 0.9, 0.8)}}
    recordings = {}
    for dtype, available in (("float32", list(requested)), ("bfloat16", ["bfloat16"])):
        names = [name for name in available if name in needed]
        if not names:
            continue
        with serving(clinic.checkpoint, clinic.folder, dtype) as url:
            for name in names:
                for seed in seeds:
                    sampling = requested.get(name, requested["clean"])
                    cause, _, bundle = clinic.visit(
                        f"rollout.url={url}",
                        f"rollout.api_key={KEY}",
                        f"rollout.server.dtype={dtype}",
                        f"seed={seed}",
                        sampling,
                    )
                    print(f"recorded {name}, seed {seed}: the doctor names {cause}", flush=True)
                    recordings[name, seed] = bundle, sampling
    return recordings


def of_recordings(
    clinic: Clinic,
    recorded: Mapping[tuple[str, int], tuple[Path, str]],
    planted: Sequence[Planted],
    seeds: Sequence[int],
) -> Iterator[Row]:
    """One row for each fault, severity and seed."""
    for fault in planted:
        for seed in seeds:
            bundle, sampling = recorded[fault.recorded, seed]
            folder = planted_checkpoint(clinic.checkpoint, clinic.folder / "planted", fault.change, seed)
            words = [
                sampling,
                f"model.checkpoint={folder}",
                "optimizer.lr=0",
                "replay.max_local_flip_rate=1.0",
                *fault.learner,
            ]
            finding = find_cause(rescore(clinic.settings(words), bundle))
            shutil.rmtree(folder)
            figures = "  ".join(f"{name} {value:.3g}" for name, value in finding.figures.items())
            print(f"{fault.name}, {fault.severity}, seed {seed}: {finding.cause}  {figures}", flush=True)
            yield {
                "fault": fault.name,
                "severity": fault.severity,
                "seed": seed,
                "expected": fault.expected,
                "found": finding.cause,
            }


def rescore(config: Config, bundle: Path) -> Measurements:
    """The doctor's probe of a recording, from a learner built in this process."""
    from moe_trm.learner.megatron.build import build_megatron_learner, close_learner

    learner = build_megatron_learner(config)
    try:
        records = BundleReader(str(bundle)).read(1)
        rows = [TrainRow(record) for record in records]
        size = config.learner.micro_batch_rows or len(rows)
        micro = [MicroBatch(tuple(rows[i : i + size])) for i in range(0, len(rows), size)]
        batches = [collate(part, keep_mask=config.keeps_masks) for part in micro]
        natives = learner.score(batches, [Record() for _ in batches])
        sources = [batch.rollout_routes for batch in batches]
        replays: dict[int, Scores] = {}

        def keep(index: int, scores: Scores) -> torch.Tensor:
            replays[index] = scores
            return 0.0 * scores.logprobs.sum()

        learner.update(batches, sources, keep, entropy=True)
        parts = []
        for index, (part, batch, native) in enumerate(zip(micro, batches, natives, strict=True)):
            replayed = replays[index]
            assert native.recorded is not None
            assert replayed.entropy is not None
            flips = flipped_tokens(native.recorded, batch.routes, batch.mask.shape[1]).sum(-1)
            channels = (
                replayed.logprobs - batch.rollout_logprobs,
                native.logprobs - batch.rollout_logprobs,
                replayed.entropy,
                flips,
            )
            for row, item in enumerate(part.rows):
                sample_channels = [channel.detach()[row][batch.mask[row]].numpy() for channel in channels]
                parts.append(of_sample(item.record, *sample_channels))
        return join(parts)
    finally:
        close_learner()


def of_live_servers(clinic: Clinic, seeds: Sequence[int]) -> Iterator[Row]:
    """Faults that no recording shows: another tokenizer, and pushes that do not arrive."""
    with serving(clinic.checkpoint, clinic.folder, "float32") as url:
        base = (f"rollout.url={url}", f"rollout.api_key={KEY}")
        for severity, swaps in zip(SEVERITIES, (1, 4, 16), strict=True):
            for seed in seeds:
                altered = planted_checkpoint(clinic.checkpoint, clinic.folder / "planted", None, seed)
                swap_tokens(altered / "tokenizer.json", swaps, seed)
                cause, _, _ = clinic.visit(*base, f"model.checkpoint={altered}", probe=False)
                shutil.rmtree(altered)
                yield {
                    "fault": "tokenizers differ",
                    "severity": severity,
                    "seed": seed,
                    "expected": "tokenizer",
                    "found": cause,
                }
        for severity, kept in zip(SEVERITIES, ("one element", "one expert", "everything"), strict=True):
            for seed in seeds:
                with swallowing(url, KEY, clinic.checkpoint, clinic.folder / "stale", kept, seed) as proxy:
                    cause, _, _ = clinic.visit(f"rollout.url={proxy}", f"rollout.api_key={KEY}", f"seed={seed}")
                print(f"failed sync, {kept}, seed {seed}: {cause}", flush=True)
                yield {"fault": "failed sync", "severity": severity, "seed": seed, "expected": "sync", "found": cause}


def of_stale_decoders(clinic: Clinic, seeds: Sequence[int]) -> Iterator[Row]:
    """A server of the doctor's own whose decoding keeps the weights of its start in one layer."""
    with patch.dict(os.environ, stale_decoder.planted(clinic.folder / "plugin")):
        for seed in seeds:
            cause, _, _ = clinic.visit("rollout.server.port=0", "sync.prove_every=1", f"seed={seed}")
            print(f"stale decoder, seed {seed}: {cause}", flush=True)
            yield {
                "fault": "stale decoder",
                "severity": "severe",
                "seed": seed,
                "expected": "decoding",
                "found": cause,
            }


def swap_tokens(path: Path, swaps: int, seed: int) -> None:
    """Exchange the ids of `swaps` pairs of characters that the probe texts hold."""
    data = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    used = [character for character in "672+39=The quickbrownfxs,#14" if character in vocabulary]
    generator = torch.Generator().manual_seed(seed)
    shuffled = [used[i] for i in torch.randperm(len(used), generator=generator).tolist()]
    for a, b in zip(shuffled[:swaps], shuffled[swaps : 2 * swaps], strict=False):
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(data), encoding="utf-8")


def matrix(rows: Sequence[Row]) -> list[Row]:
    """One line for each fault and severity: how often each cause was named."""
    table: list[Row] = []
    for fault, severity, expected in dict.fromkeys((row["fault"], row["severity"], row["expected"]) for row in rows):
        causes = Counter(row["found"] for row in rows if (row["fault"], row["severity"]) == (fault, severity))
        named = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
        right = causes[expected] / causes.total()
        table.append(
            {"fault": fault, "severity": severity, "should be": expected, "doctor says": named, "right": right}
        )
    return table


def summary(rows: Sequence[Row]) -> str:
    severe = [row for row in rows if row["severity"] == "severe" and row["expected"] != "none"]
    clean = [row for row in rows if row["expected"] == "none"]
    right = sum(row["found"] == row["expected"] for row in severe)
    alarms = sum(row["found"] != "none" for row in clean)
    return f"severe faults named: {right} of {len(severe)}; false alarms: {alarms} of {len(clean)} clean controls"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder (default: the quickstart's)")
    parser.add_argument("--versions", type=Path, nargs="*", default=[], help="later weights of it, near to far")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of what is sampled and planted (default: 0 1 2)"
    )
    parser.add_argument("--lies", action="store_true", help="edit a recorded step instead")
    parser.add_argument("--bundle", type=Path, help="with --lies: that step, recorded before from --checkpoint")
    parser.add_argument("--only", nargs="+", help="faults by name")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-trm-faults-") as scratch:
            checkpoint = starting_checkpoint(args.checkpoint, Path(scratch)).resolve()
            if args.lies:
                rows = lies.rows_of_lies(checkpoint, Path(scratch), args.bundle, args.seeds)
                report("Records that are not what they claim to be", rows, args.json)
                return int(not all(map(lies.suffices, rows)))
            clinic = Clinic(Path(scratch), checkpoint)
            planted = [fault for fault in faults(args.versions) if not args.only or fault.name in args.only]
            rows = (
                list(
                    of_recordings(
                        clinic, record(clinic, args.seeds, {fault.recorded for fault in planted}), planted, args.seeds
                    )
                )
                if planted
                else []
            )
            if not args.only or {"tokenizers differ", "failed sync"} & set(args.only):
                rows += of_live_servers(clinic, args.seeds)
            if not args.only or "stale decoder" in args.only:
                rows += of_stale_decoders(clinic, args.seeds)
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    report(
        f"The doctor on planted faults, {len(args.seeds)} seeds. {summary(rows)}",
        matrix(rows),
        args.json,
        {"visits": rows},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
