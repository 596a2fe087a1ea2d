"""From the run's configuration to a ready `DeepSpeedLearner`: process group, model, ZeRO."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moe_trm.config.learning_rate import learning_rate
from moe_trm.config.schema import Config, LayerNoiseConfig
from moe_trm.learner.alignment import alignment_of
from moe_trm.learner.deepspeed.conformance import check_conformance
from moe_trm.learner.deepspeed.learner import DeepSpeedLearner
from moe_trm.learner.deepspeed.lora import DeepSpeedAdapters, add_adapters
from moe_trm.learner.deepspeed.optimizer import DeepSpeedGuardedOptimizer, adamw, freeze
from moe_trm.learner.deepspeed.partitioned import partition
from moe_trm.learner.deepspeed.pictures import PictureInputs
from moe_trm.learner.deepspeed.policy import HfPolicy, load_policy
from moe_trm.learner.deepspeed.runtime import load_deepspeed
from moe_trm.learner.deepspeed.settings import check_model, zero_config
from moe_trm.learner.deepspeed.state import DeepSpeedState, base_parts
from moe_trm.learner.deepspeed.weights import PartitionSnapshots, owned_tensors
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.hf_export import HfExporter
from moe_trm.learner.hf_form import ExportForm
from moe_trm.learner.hf_tensors import check_tensors
from moe_trm.learner.layer_noise import LayerNoise
from moe_trm.learner.lora.base import Identity, base_checksum
from moe_trm.learner.lora.requested import requested_adapters
from moe_trm.learner.loss_scale import loss_scale_of
from moe_trm.learner.parameter_groups import check_groups
from moe_trm.learner.snapshots import Snapshots
from moe_trm.models.gpt_oss import GPT_OSS
from moe_trm.models.hf_config import check_vocabulary, num_experts, read_full_config, read_hf_config
from moe_trm.models.picture_processor import PictureProcessor
from moe_trm.models.pictures import picture_tokens
from moe_trm.models.registry import find_family
from moe_trm.sync.rounding import computes_in
from routing.hf import HFReplayer, moe_blocks
from routing.hosts.hf_blocks import body_of


def build_deepspeed_learner(config: Config) -> DeepSpeedLearner:
    """Build this rank's learner. Collective; call it once per process, under torchrun.

    Raises:
        ConfigError: replay of a dense model, or parameter groups that cannot be.
        CheckpointError: a checkpoint that is missing, incomplete, unsupported, or does not fit its tokenizer; an
            adapter to start from that does not fit.
    """
    folder = config.model.checkpoint
    hf = read_hf_config(folder)
    check_model(config, hf)
    check_conformance(hf, f"{folder}/config.json")
    check_vocabulary(folder, int(hf["vocab_size"]))
    checkpoint = HfCheckpoint(folder)
    check_tensors(checkpoint, hf)
    adapter_settings = requested_adapters(config.learner, config.seed, hf, checkpoint)
    pictures = config.task.has_pictures
    names = checkpoint.stored_names if pictures else checkpoint.names
    check_groups(config.optimizer, names if adapter_settings is None else adapter_settings.factor_names)
    device, packed = _start_process_group(), config.batch.layout == "packed"
    partitioned = config.learner.deepspeed.zero_stage == 3
    # Of other families only transformers knows which tensors are lacking.
    by_parts = partitioned and find_family(hf) is not None
    recompute = config.learner.recompute == "full"
    policy = load_policy(
        checkpoint, config.learner.dtype, recompute=recompute, packed=packed, empty=by_parts, vision=pictures
    )
    freeze(policy.causal, config.learner)
    trains_vision = pictures and not config.learner.freeze_vision
    adapters = DeepSpeedAdapters() if adapter_settings is None else add_adapters(policy.causal, adapter_settings)
    adam = adamw(policy.causal, config.optimizer, adapters.factors)
    settings = zero_config(config.learner, config.optimizer)
    engine = _initialize(policy, adam, settings, device, checkpoint if by_parts else None)
    replayer = None
    # Families name the number of experts in many ways; what transformers built has them or not.
    if num_experts(hf) or moe_blocks(policy.causal):
        replayer = HFReplayer(
            policy.causal, max_local_flip_rate=config.replay.stops_above, missing=config.replay.missing
        )
    adapters.merge_in_passes()
    identity = None
    if adapter_settings is not None:
        identity = Identity(base_checksum(base_parts(policy.causal), device), adapter_settings.lora)
    loss_scale = loss_scale_of(config.learner.dtype, config.learner.loss_scale)
    alignment = alignment_of(config.optimizer.alignment_limit)
    optimizer = DeepSpeedGuardedOptimizer(
        engine, learning_rate(config.optimizer, config.learner, config.train), loss_scale, alignment
    )
    return DeepSpeedLearner(
        engine,
        optimizer,
        replayer,
        HfExporter(
            partial(owned_tensors, policy.causal, adapters, partitioned=partitioned, vision=trains_vision),
            ExportForm(
                checkpoint,
                config.learner.dtype,
                config.train.export_form == "published",
                trains_vision=trains_vision,
            ),
        ),
        (PartitionSnapshots if partitioned else Snapshots)(
            [policy],
            inputs_first=find_family(hf) is GPT_OSS,
            computes_in=computes_in(config.learner, config.rollout, config.train, config.seed),
            trained_only=adapter_settings is not None,
        ),
        DeepSpeedState(policy.causal, engine, optimizer, identity),
        temperature=config.rollout.temperature,
        device=device,
        packed=packed,
        noise=_layer_noise(policy, config.learner.layer_noise, config.seed, device),
        pictures=_picture_inputs(config.model.checkpoint, config.learner.dtype) if pictures else None,
    )


def _layer_noise(policy: HfPolicy, settings: LayerNoiseConfig, seed: int, device: torch.device) -> LayerNoise | None:
    if not settings.sigma:
        return None
    body: Any = body_of(policy.causal)
    return LayerNoise(dict(enumerate(body.layers)), len(body.layers), settings, seed, device)


def _picture_inputs(folder: str, dtype: str) -> PictureInputs:
    tokens = picture_tokens(read_full_config(folder), f"{folder}/config.json")
    return PictureInputs(PictureProcessor(folder), tokens.image, getattr(torch, dtype))


def close_learner() -> None:
    """Tear the process group down; the learner is unusable afterwards."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _start_process_group() -> torch.device:
    """The device of this rank; joins the group that torchrun described unless the launcher already did."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def _initialize(
    policy: HfPolicy,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    device: torch.device,
    unread: HfCheckpoint | None,
) -> object:
    """DeepSpeed's engine around `policy`, which moves to `device`; at stage 3 partition by partition, never whole.

    `unread`: the checkpoint of a policy whose parameters are read now.
    """
    deepspeed = load_deepspeed()
    # DeepSpeed casts everything to the training dtype; rotary frequencies and selection biases must stay as
    # transformers made them.
    precise = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    if unread is not None:
        partition(policy, policy.causal, unread, settings)
    elif settings["zero_optimization"]["stage"] == 3:
        deepspeed.zero.Init(module=policy, config_dict_or_path=settings)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=settings, dist_init_required=False)
    for name, value in precise.items():
        owner, _, leaf = name.rpartition(".")
        setattr(policy.get_submodule(owner), leaf, value.to(device))
    return engine
