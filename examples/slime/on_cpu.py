"""The policy loss of slime or miles, of its own source, with the rules of rules.py and on a CPU.

    python examples/slime/on_cpu.py slime FOLDER      # FOLDER holds slime's source
    python examples/slime/on_cpu.py miles FOLDER

Three answers as the host's trainer has them: packed, with log-probs of the learner and of the engine. One answer has a
token that is far off. The host loads our function by its own option. It prints the host's loss with our metrics, and
the routes of a `Sample` of the host as our record.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.adapters.slime import read_routes

LENGTHS, PROMPT, VOCAB = (4, 1, 3), 2, 11
HERE = Path(__file__).parent
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def arguments(path: str) -> Namespace:
    """The arguments that the policy losses of both hosts read."""
    return Namespace(
        use_rollout_logprobs=False, rollout_top_p=1.0, rollout_temperature=1.0, log_probs_chunk_size=-1,
        allgather_cp=False, use_opsm=False, advantage_estimator="grpo", eps_clip=0.2, eps_clip_high=0.28,
        eps_clip_c=None, get_mismatch_metrics=False, use_tis=True, custom_tis_function_path=path,
        calculate_per_token_loss=False, custom_pg_loss_reducer_function_path=None, entropy_coef=0.0,
        use_kl_loss=False, use_opd=False, qkv_format="thd", skip_actor_forward_only=False,
        observe_training_entropy=False, true_on_policy_mode=False,
    )  # fmt: skip


def slime_loss() -> tuple[Loss, Callable[..., Any]]:
    """slime's policy loss, and the maker of its reducer."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    loss = import_module("slime.backends.megatron_utils.loss").policy_loss_function
    return loss, import_module("slime.backends.megatron_utils.cp_utils").get_sum_of_sample_mean


def miles_loss() -> tuple[Loss, Callable[..., Any]]:
    """The same of miles, with parallel groups of this one process."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    state = import_module("miles.backends.training_utils.parallel")
    info = import_module("miles.utils.ft_utils.process_group_utils").GroupInfo
    single_rank = info(rank=0, size=1, group=dist.group.WORLD)
    names = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp")
    state.set_parallel_state(state.ParallelState(**dict.fromkeys(names, single_rank)))
    loss = import_module("miles.backends.training_utils.loss_hub.losses").policy_loss_function
    return loss, import_module("miles.backends.training_utils.cp_utils").get_sum_of_sample_mean


HOSTS = {"slime": slime_loss, "miles": miles_loss}


def batch_of(logits: Tensor, tokens: list[Tensor]) -> dict[str, Any]:
    """A micro-batch by the host's names. One token of the engine is far off, and one token is a tool's."""
    starts = torch.tensor([0, *(len(ids) for ids in tokens)]).cumsum(0).tolist()
    current = [
        logits[0, start + PROMPT - 1 : start + len(ids) - 1].log_softmax(-1).gather(1, ids[PROMPT:, None])[:, 0]
        for start, ids in zip(starts, tokens, strict=False)
    ]
    old = [part.detach() + 0.1 for part in current]
    rollout = [part.clone() for part in old]
    rollout[0][1] -= 1.5
    rollout[2] += 0.2
    masks = [torch.ones(length) for length in LENGTHS]
    masks[0][3] = 0
    return {
        "advantages": [torch.full((length,), value) for length, value in zip(LENGTHS, (1.0, -1.0, 0.5), strict=True)],
        "current": current,
        "log_probs": old,
        "rollout_log_probs": rollout,
        "loss_masks": masks,
        "unconcat_tokens": tokens,
        "total_lengths": [len(ids) for ids in tokens],
        "response_lengths": list(LENGTHS),
        "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]),
    }


def corrected_loss(host: str, folder: str) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, Any]]:
    """The host's loss and metrics, the logits that it is a function of, and the micro-batch."""
    sys.path[:0] = [*folder.split(":"), str(HERE)]
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}x", rank=0, world_size=1)
    loss, reducer = HOSTS[host]()
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, VOCAB, (PROMPT + length,), generator=generator) for length in LENGTHS]
    logits = torch.randn(1, sum(map(len, tokens)), VOCAB, generator=generator, requires_grad=True)
    batch = batch_of(logits, tokens)
    lengths = batch["total_lengths"], batch["response_lengths"]
    if host == "slime":
        sums = reducer(*lengths, batch["loss_masks"], batch["rollout_mask_sums"], False)
    else:
        sums = reducer(*lengths, batch["loss_masks"], denominators=batch["rollout_mask_sums"])
    value, metrics = loss(arguments("rules.corrected"), batch, logits, sums)
    return value, metrics, logits, batch


def sample_routes(host: str) -> tuple[int, ...]:
    """Shape of the record of a `Sample` of the host; its engine reported two of eight experts in each of two layers."""
    sample = import_module(f"{host}.utils.types").Sample(tokens=[5, 6, 7, 8])
    sample.rollout_routed_experts = (torch.arange(3 * 2 * 2).view(3, 2, 2) % 8).numpy()
    record = read_routes(
        sample.rollout_routed_experts,
        tokens=sample.tokens,
        num_layers=2,
        layer_ids=(0, 1),
        num_experts=8,
        top_k=2,
    )
    record.check_tokens(torch.tensor(sample.tokens).numpy())
    return record.experts.shape


if __name__ == "__main__":
    name, source = sys.argv[1:]
    value, metrics, logits, _ = corrected_loss(name, source)
    (gradient,) = torch.autograd.grad(value, logits)
    result: dict[str, Any] = {"host": name, "loss": float(value.detach()), "gradient_norm": float(gradient.norm())}
    result |= {key: float(metric) for key, metric in metrics.items() if key.startswith("moe_trm/")}
    print(json.dumps({**result, "routes": sample_routes(name)}))
