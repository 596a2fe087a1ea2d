"""Models that vLLM cannot serve here. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.config.schema import RolloutConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.models.hf_config import reads_images, text_config
from moe_trm.models.quantisation import quantisation_of
from moe_trm.rollout.servers.indexers import check_indexer
from moe_trm.rollout.vllm.request import LISTED_IDS


def check_model(
    full_config: Mapping[str, Any],
    where: str,
    rollout: RolloutConfig,
    *,
    masks: bool,
    exact: bool,
    pictures: bool,
    cuda: bool,
) -> None:
    """See `check_served`. Also a cache smaller than the longest sequence."""
    hf = text_config(full_config)
    check_indexer(hf, where)
    if reads_images(full_config):
        raise CheckpointError(
            "vLLM is started on a whole checkpoint here, and pushes have the names of its text alone",
            where=where,
            got=full_config["architectures"][0],
            expected=hf["architectures"][0],
            fix="Train it with rollout.engine=sglang, which is started on the text.",
        )
    if quantisation_of(hf, where) is not None:
        raise CheckpointError(
            "pushes to vLLM are plain tensors, and this checkpoint's are quantised",
            where=where,
            got=hf["quantization_config"].get("quant_method"),
            expected="none",
            fix="Train it with rollout.engine=sglang, or from a dequantised checkpoint.",
        )
    server, longest = rollout.server, int(hf["max_position_embeddings"])
    shortened = any(argument.startswith("--max-model-len") for argument in server.extra_args)
    if rollout.starts_server and server.max_total_tokens < longest and not shortened:
        raise ConfigError(
            "vLLM does not start with a cache that is smaller than the longest sequence of the model",
            where="config key rollout.server.max_total_tokens",
            got=server.max_total_tokens,
            expected=f"at least {longest}, max_position_embeddings of {where}",
            fix='Or allow shorter sequences only: rollout.server.extra_args=["--max-model-len=N"].',
        )
    kept = rollout.top_k or int(hf["vocab_size"])
    if masks and kept > LISTED_IDS:
        raise ConfigError(
            "vLLM has no sampling masks here, and tells the kept ids only where they are few",
            where="config key rollout.top_k",
            got=f"{kept} ids with sampling_mask.mode=keep",
            expected=f"at most {LISTED_IDS}",
            fix="Set rollout.top_k, or truncate nothing: rollout.top_p=1 and sampling_mask.mode=off.",
        )
