"""Comparison of what a rollout server serves with the learner's checkpoint: the tokenizer, the sizes, the norms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from launch.start.checks import Check, attempt
from moe_trm.config.schema import RolloutConfig
from moe_trm.errors import CheckpointError, EngineError
from moe_trm.models.hf_config import library_config, reads_images, text_config
from moe_trm.rollout.credentials import api_key_for
from moe_trm.rollout.servers.arrival import ANSWER_S, Arrival
from moe_trm.rollout.servers.backend import ServerBackend, backend_of
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.runtime.patience import patient
from moe_trm.tasks.tokens import Tokens

SAMPLES = ("672+39=", "The quick brown fox\n", " 1, 2, 3 # 4", "Zürich 東京 \N{ROCKET}")
"""Texts on which two tokenizers that differ usually do."""
MEANS_THE_SAME = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "architectures")
"""Keys of config.json that change no number."""


def attached(rollout: RolloutConfig, checkpoint: str) -> Iterator[Check]:
    """Checks of every server that the run attaches to; none where it starts its own from `checkpoint`, the folder of
    the learner.
    """
    if not (rollout.traits.has_servers and rollout.attached):
        return
    for url in rollout.addresses:
        reached = attempt(f"server at {url}", partial(asyncio.run, _reached(rollout, url)))
        yield reached
        if reached.status == "fail":
            continue
        for what, look in (("tokenizer", _tokenizer), ("model", _geometry)):
            yield attempt(f"{what} of {url}", partial(asyncio.run, _looked(rollout, checkpoint, url, look)))


def known_difference(rollout: RolloutConfig, checkpoint: str) -> Iterator[Check]:
    """Known differences between the model of `checkpoint` and the one that this engine serves."""
    with suppress(CheckpointError):  # the checks before this one have told it
        if rollout.traits.has_servers and (remark := backend_of(rollout.engine).remark(Path(checkpoint))):
            yield Check("served model", "warn", remark, "docs/models.md says how far log-probs are apart")


async def _reached(rollout: RolloutConfig, url: str) -> Check:
    backend, arrival = backend_of(rollout.engine), Arrival(url, rollout.server.startup_timeout_s)
    async with EngineHttp(url, api_key_for(rollout), timeout_s=patient(ANSWER_S), max_attempts=1) as http:
        await arrival.of(lambda: http.request("GET", backend.health_path))
    return Check(f"server at {url}", "ok", "it generates")


async def _looked(rollout: RolloutConfig, checkpoint: str, url: str, look: Any) -> Check:
    async with EngineHttp(url, api_key_for(rollout), timeout_s=20.0, max_attempts=1) as http:
        check: Check = await look(backend_of(rollout.engine), checkpoint, http)
        return check


async def _tokenizer(backend: ServerBackend, checkpoint: str, http: EngineHttp) -> Check:
    tokens, name = Tokens(checkpoint), f"tokenizer of {http.url}"
    for text in SAMPLES:
        try:
            served_ids = await backend.tokenized(http, text)
        except EngineError as error:
            return Check(name, "skip", f"the server does not tokenize: {error.what}")
        if served_ids is None:
            return Check(name, "skip", "servers of this engine do not say how they tokenize")
        theirs, ours = list(served_ids), list(tokens.encode_plain(text))
        if theirs != ours:
            return Check(
                name,
                "fail",
                f"it reads {text!r} as {theirs}, the learner's checkpoint as {ours}",
                "start the server from model.checkpoint, or set model.checkpoint to what it serves",
            )
    return Check(name, "ok", f"the learner's, on {len(SAMPLES)} texts")


async def _geometry(backend: ServerBackend, checkpoint: str, http: EngineHttp) -> Check:
    name = f"model of {http.url}"
    folder = await backend.model_folder(http)
    if folder is None:
        return Check(name, "skip", "servers of this engine do not say what they serve")
    if not (folder / "config.json").is_file():
        return Check(name, "skip", f"{folder} is not on this machine")
    theirs, ours = _read(folder), library_config(text_config(_read(Path(checkpoint))))
    if reads_images(theirs):
        return Check(
            name,
            "fail",
            f"it serves {theirs['architectures'][0]}, and pushes have the names of its text alone",
            "start it from the same configuration, `python -m launch.rollout CONFIG`: it then serves the text",
        )
    # A server of a quantised checkpoint must hold plain weights, because pushes are plain.
    held = {key: theirs[key] for key in ("quantization_config",) if key in theirs}
    different = differing(library_config(theirs) | held, ours)
    if not different:
        return Check(name, "ok", f"config.json of {folder} and of the learner agree")
    return Check(
        name,
        "fail",
        "; ".join(f"{key}: server {a}, learner {b}" for key, (a, b) in different.items()),
        "the two engines compute different models: use one folder for both",
    )


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys of two config.json that change what a model computes, with both values."""
    keys = sorted((set(a) | set(b)) - set(MEANS_THE_SAME))
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def _read(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return data
