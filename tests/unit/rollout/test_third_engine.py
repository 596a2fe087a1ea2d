"""An engine of one file, named in the configuration, through the real controller: nothing else knows of it."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from moe_trm.config import InvalidConfigError, load, resolve
from moe_trm.config.engines import ENGINES, SERVER_BACKENDS
from moe_trm.config.schema import Config
from moe_trm.models.tiny.checkpoint import character_tokenizer
from moe_trm.rollout.build import build_controller
from moe_trm.rollout.recorded import BundleEngine
from moe_trm.rollout.sglang.backend import SglangBackend
from moe_trm.rollout.vllm.backend import VllmBackend
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import TrainBatch, TrainRow
from tests.unit.rollout.scripted_engine import REJECTED, SCRIPT
from tests.unit.tools.doctor.test_checks import looked

SCRIPTED = f"{Path(__file__).with_name('scripted_engine.py')}:ScriptedEngine"
ABLE = ("replay.mode=auto", "learner.minibatches=1", "probe.every=0", "sampling_mask.mode=off")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    character_tokenizer().save_pretrained(tmp_path / "start")
    (tmp_path / "start" / "config.json").write_text('{"vocab_size": 128, "eos_token_id": 2}')
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_dir: {tmp_path}\nmodel: {{checkpoint: {tmp_path / 'start'}}}\ntask: {{eval_size: 4}}\n"
        f"rollout: {{engine: '{SCRIPTED}', prompts_per_step: 4, group_size: 3}}\ntrain: {{steps: 2}}\n"
    )
    return path


def refused(path: Path, *overrides: str) -> set[str]:
    with pytest.raises(InvalidConfigError) as caught:
        load(path, overrides)
    return {problem.key for problem in caught.value.problems}


def rows_of(batch: TrainBatch) -> list[TrainRow]:
    return [row for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows]


def run(config: Config) -> tuple[list[TrainBatch], list[Mapping[str, float]]]:
    """Every step's batch, and the evaluation after every push."""

    async def go() -> tuple[list[TrainBatch], list[Mapping[str, float]]]:
        controller = await build_controller(config, None)
        await controller.start()
        batches: list[TrainBatch] = []
        evaluations: list[Mapping[str, float]] = []
        for version in range(config.train.steps):
            await controller.load_weights(WeightPush(version, "", ()))
            evaluations.append(await controller.evaluate())
            batches += await controller.plan(version + 1, data_size=1)
        await controller.close()
        return batches, evaluations

    return asyncio.run(go())


def test_it_samples_for_the_real_controller_whose_books_balance(file: Path) -> None:
    first, second = run(load(file, ABLE))[0]
    assert first.metrics["records/rejected/no_line"] == 1
    assert first.metrics["ledger/issued"] == 12 == first.metrics["ledger/trained"] + first.metrics["ledger/rejected"]
    assert second.metrics["ledger/issued"] == 24 == second.metrics["ledger/trained"] + second.metrics["ledger/rejected"]
    assert second.metrics["rollout/script_lines"] == len(SCRIPT)
    ids = [row.record.sample_id for row in rows_of(first)]
    assert sorted(ids) == [number for number in range(12) if number != REJECTED]
    for batch, version in ((first, 0), (second, 1)):
        for record in (row.record for row in rows_of(batch)):
            assert tuple(record.tokens[record.sampled]) == SCRIPT[record.sample_id % len(SCRIPT)]
            assert set(record.versions.tolist()) == {version}
            assert (record.routes, record.sampling_mask) == (None, None)


def test_held_out_prompts_are_asked_of_an_engine_with_weights(file: Path) -> None:
    for evaluation in run(load(file, ABLE))[1]:
        assert evaluation["eval/prompts"] == 4


def test_settings_are_judged_by_its_traits(file: Path) -> None:
    assert refused(file) == {"rollout.engine"}
    assert refused(file, "rollout.top_p=0.9") == {"rollout.engine", "sampling_mask.mode"}
    assert refused(file, *ABLE, "probe.every=1") == {"rollout.engine"}
    assert refused(file, *ABLE, "sync.method=distributed") == {"sync.method"}
    told = " ".join(resolve(file, [*ABLE, "rollout.url=http://x", "rollout.bundle=b"]).warnings)
    assert "rollout.url has no effect" in told
    assert "rollout.bundle has no effect" in told
    config = load(file, [*ABLE, "rollout.server.port=1"])
    checks = {check.name: check for check in looked(config)}
    assert checks["port"].status == "skip"
    assert "sglang" not in checks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def engine(config, api_key): ...", "does not say what it can do"),
        ("raise RuntimeError('half a file')", "cannot be loaded"),
        ("other = 1", "cannot be loaded"),
    ],
)
def test_a_file_that_is_no_engine_is_refused_when_it_is_loaded(
    file: Path, tmp_path: Path, text: str, said: str
) -> None:
    module = tmp_path / f"engine_{abs(hash(text))}.py"
    module.write_text(text)
    for _ in range(2):  # a file that failed is not taken for loaded the second time
        with pytest.raises(InvalidConfigError, match=said) as caught:
            load(file, [f"rollout.engine={module}:engine", "rollout.top_k=1"])
        assert {"rollout.engine", "rollout.top_k"} <= {problem.key for problem in caught.value.problems}


def test_engines_say_of_themselves_what_the_table_says() -> None:
    traits = {"sglang": SglangBackend.traits, "vllm": VllmBackend.traits, "bundle": BundleEngine.traits}
    assert traits == dict(ENGINES)


ROOT = Path(__file__).parents[3]
BUILDERS = {"moe_trm/rollout/build.py", "moe_trm/config/engines.py"}
IMPORTS_BEFOREHAND = "moe_trm/tools/quickstart/__main__.py"
"""Its servers are forks of a process that has imported SGLang."""
SPOKEN = "moe_trm/tools/translate/"
"""Tables of the words of other trainers."""


def test_no_engine_is_named_outside_its_folder_and_its_builders() -> None:
    """Words for people may name one: docstrings, comments, and descriptions of settings."""
    found = {
        f"{path}:{node.lineno}"
        for path, tree in product()
        if path not in BUILDERS and not path.startswith(SPOKEN)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in SERVER_BACKENDS
        if not path.startswith(f"moe_trm/rollout/{node.value!s}/")
    }
    assert not found


def test_no_engine_with_servers_is_imported_outside_its_folder() -> None:
    folders = {backend.partition(":")[0].rpartition(".")[0] for backend in SERVER_BACKENDS.values()}
    assert folders
    found = {
        (path, name)
        for path, tree in product()
        for folder in folders
        if not path.startswith((folder.replace(".", "/"), IMPORTS_BEFOREHAND))
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in named_by(node)
        if f"{name}.".startswith(f"{folder}.")
    }
    assert not found


def named_by(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Modules that an import names; `from package import name` may mean `package.name`."""
    names = [alias.name for alias in node.names]
    return names if isinstance(node, ast.Import) else [f"{node.module}.{name}" for name in names]


@cache
def product() -> list[tuple[str, ast.Module]]:
    """Path and syntax of every file of the product."""
    paths = [path for package in ("moe_trm", "launch") for path in sorted((ROOT / package).rglob("*.py"))]
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]
