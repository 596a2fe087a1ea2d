"""Our rules behind slime's `--custom-tis-function-path`, and its `rollout_routed_experts` as route records.

The call and its tensors are those of slime 0.3.1 and of miles, which calls the same function: lists with one tensor for
each sample. Nothing of either is imported.

Shape letters: S response tokens of one sample, N of all samples of the micro-batch, B samples, R the longest response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moe_trm.corrections import compose
from moe_trm.corrections.plain import Rules, bind, correct
from moe_trm.errors import ConfigError
from routing.record.arrays import record_of
from routing.record.record import RouteRecord

TisFunction = Callable[..., tuple[Tensor, list[Tensor], dict[str, Tensor]]]
_WHERE = "moe_trm.adapters.slime"


def tis_function(rules: Rules, *, fresh: bool = False) -> TisFunction:
    """A function for `--custom-tis-function-path MODULE.NAME`, where MODULE is a file of yours.

    ```python
    # my_rules.py, then: --use-tis --custom-tis-function-path my_rules.corrected
    corrected = tis_function([("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"})])
    ```

    The policy loss of each token is multiplied by its weight, and is 0 where a rule drops it. The loss masks stay as
    they are: the host makes its denominators, and those of its entropy and KL terms, of them.

    Metrics are per token, as the host averages them: `moe_trm/weight`, `moe_trm/kept` and `moe_trm/log_ratio_abs`.

    Args:
        rules: as in `moe_trm.corrections.plain.bind`. slime hands over the log-probs of the step's beginning, no
            current ones and no advantages. So rules read `merged` (or `engine`, see `fresh`), none reads advantages,
            and none is of batch scope, because a call has one micro-batch.
        fresh: True says that every sample is of the weights that the step begins with, as in synchronous training.
            Then rules may read `engine`.

    Raises:
        ConfigError: here, rules that cannot be bound or are of batch scope. In the call: a rule that needs what is not
            there, and lists of other lengths, as under context parallelism.
    """
    bound = bind(rules)
    compose(bound)

    def corrected(
        args: Any = None,
        *,
        pg_loss: Tensor,
        train_log_probs: Sequence[Tensor] | None,
        rollout_log_probs: Sequence[Tensor] | None,
        loss_masks: Sequence[Tensor],
        **_others: Any,
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        mask_BR, lengths = _padded_masks(loss_masks)
        learner_BR = _padded(train_log_probs, lengths, "train_log_probs")
        rollout_BR = _padded(rollout_log_probs, lengths, "rollout_log_probs")
        if tuple(pg_loss.shape) != (sum(lengths),):
            raise _misfit("pg_loss", tuple(pg_loss.shape), (sum(lengths),))
        got = correct(
            bound,
            rollout_logprobs=rollout_BR,
            behavior_logprobs=learner_BR if fresh else None,
            proximal_logprobs=learner_BR,
            mask=mask_BR,
        )
        keep_N, weights_N = _flat(got.keep, lengths), _flat(got.weights, lengths).to(pg_loss.dtype)
        # Not a product with 0: the loss of a token that is dropped may be infinite.
        kept_loss = torch.where(keep_N, pg_loss * torch.where(keep_N, weights_N, 0.0), 0.0)
        log_ratio_BR = torch.where(mask_BR, learner_BR - rollout_BR, 0.0)
        metrics = {
            "moe_trm/weight": weights_N.detach(),
            "moe_trm/kept": keep_N.to(pg_loss.dtype),
            "moe_trm/log_ratio_abs": _flat(log_ratio_BR.abs(), lengths).to(pg_loss.dtype),
        }
        return kept_loss, list(loss_masks), metrics

    return corrected


def read_routes(
    rollout_routed_experts: Tensor | np.ndarray | Sequence[Any] | None,
    *,
    tokens: Sequence[int] | Tensor | np.ndarray,
    num_layers: int,
    layer_ids: Sequence[int],
    num_experts: int,
    top_k: int,
) -> RouteRecord:
    """The routes of one `Sample` as a record, validated and bound to its tokens.

    Args:
        rollout_routed_experts: `[T-1, num_layers, K]` of the sample: a tensor, an array or nested lists.
        tokens: `[T]`, `sample.tokens`.
        num_layers: `args.num_layers`, dense layers included.
        layer_ids: 0-based decoder layers that are MoE, ascending.
        num_experts: `args.num_experts`.
        top_k: `args.moe_router_topk`.

    Raises:
        RouteError: `payload` (None, or no numbers) and those of `routing.record.arrays.record_of`. A layer that no
            pipeline stage captured is zeros, and so a `duplicate`.
    """
    from routing import RouteError

    if rollout_routed_experts is None:
        raise RouteError(
            "payload",
            "the sample has no routes",
            got=None,
            expected="[T-1, num_layers, K]",
            fix="Run slime with --use-rollout-routing-replay.",
        )
    ids = [values.cpu() if isinstance(values, Tensor) else values for values in (rollout_routed_experts, tokens)]
    try:
        routes, token_ids = (np.asarray(values) for values in ids)
    except ValueError as error:
        raise RouteError("payload", f"routes or tokens are no array: {error}") from error
    return record_of(
        routes,
        tokens=token_ids,
        num_layers=num_layers,
        layer_ids=layer_ids,
        num_experts=num_experts,
        top_k=top_k,
    )


def _padded_masks(loss_masks: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    if not loss_masks or any(mask.ndim != 1 for mask in loss_masks):
        raise _misfit("loss_masks", [tuple(mask.shape) for mask in loss_masks], "one [S] for each sample")
    return pad_sequence(list(loss_masks), batch_first=True).bool(), [len(mask) for mask in loss_masks]


def _padded(parts: Sequence[Tensor] | None, lengths: Sequence[int], name: str) -> Tensor:
    """`[B, R]` of one `[S]` for each sample."""
    if parts is None:
        raise ConfigError(f"{name} are not handed over", where=_WHERE, got=None, expected="one [S] for each sample")
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [(length,) for length in lengths]:
        raise _misfit(name, shapes, [(length,) for length in lengths])
    return pad_sequence([part.detach() for part in parts], batch_first=True)


def _flat(values_BR: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(values_BR, lengths, strict=True)])


def _misfit(name: str, got: object, expected: object) -> ConfigError:
    return ConfigError(
        f"{name} do not have one value for each response token",
        where=_WHERE,
        got=got,
        expected=expected,
        fix=(
            "Under context parallelism a rank has parts of rows only, and rules judge whole ones: train with "
            "--context-parallel-size 1"
        ),
    )
