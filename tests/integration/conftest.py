"""Real SGLang servers for integration tests, in float32: on a tiny random checkpoint and on the briefly warmed one."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.learner.megatron.cpu_shim import define_stash
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.tools.quickstart.warmup import warm_up
from tests.integration.jobs import BRIEF, write_config

# Some tests import parts of Megatron-Core themselves.
define_stash()

VOCAB_SIZE = 250
"""No multiple of 64: the engine pads its embedding."""


def save_tiny_moe(folder: Path, seed: int) -> Path:
    """A random Qwen3-MoE checkpoint with a character tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    specials = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocab = {token: index for index, token in enumerate([*specials, *map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the server starts from."""
    return save_tiny_moe(tmp_path_factory.mktemp("tiny_moe"), seed=0)


@pytest.fixture(scope="session")
def other_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same shape with other weights."""
    return save_tiny_moe(tmp_path_factory.mktemp("other_moe"), seed=1)


@pytest.fixture(scope="session")
def rollout_config(tiny_moe: Path) -> Config:
    """Configuration of the shared server, before its port is known. Its log has a line for every request."""
    server = {"port": 0, "dtype": "float32", "max_total_tokens": 32768, "extra_args": ("--log-level-http", "info")}
    server["startup_timeout_s"] = 1200  # on a machine that has other work
    return Config.model_validate(
        {
            "model": {"checkpoint": str(tiny_moe)},
            "rollout": {"server": server, "max_attempts": 2},
            "sampling_mask": {"mode": "keep"},
        }
    )


@pytest.fixture(scope="session")
def rollout_server(rollout_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The running server; stopped at the end of the session."""
    if find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    server = start_server(
        Served.of(rollout_config), tmp_path_factory.mktemp("server") / "rollout.log", api_key="integration-key"
    )
    try:
        yield server
    finally:
        server.stop()
        sys.stdout.write(f"\nrollout server stopped with exit status {server.poll()}\n")


@pytest.fixture(scope="session")
def served_config(rollout_config: Config, rollout_server: Server) -> Config:
    """The same configuration, attached to the running server."""
    rollout = rollout_config.rollout.model_copy(update={"url": rollout_server.url})
    return rollout_config.model_copy(update={"rollout": rollout})


@pytest.fixture(scope="session")
def brief_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a few seconds of warm-up: some of its samples are right and some wrong.

    The workers of a session share it: the first that asks makes it.
    """
    session = tmp_path_factory.getbasetemp()
    folder = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "brief-checkpoint"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            warm_up(folder, recipe=BRIEF)
    return folder


@pytest.fixture(scope="session")
def attached(brief_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Settings for runs of `brief_checkpoint` that sample from one running server, with the last user's weights."""
    folder, key = tmp_path_factory.mktemp("attached"), "key-of-the-shared-server"
    settings = ["rollout.server.dtype=float32"]
    config = load(write_config(folder, brief_checkpoint), settings)
    server = start_server(Served.of(config), folder / "rollout.log", key)
    yield [*settings, f"rollout.url={server.url}", f"rollout.api_key={key}"]
    server.stop()
