"""Our rules and the replay of routes in TRL's `GRPOTrainer`, by a class that is mixed in before it.

Read in TRL 1.16.0, which is not imported here.

Shape letters: B rows, R completion columns, T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_trm import diagnostics
from moe_trm.corrections import compose
from moe_trm.corrections.evidence import Evidence
from moe_trm.corrections.plain import Rules, bind
from moe_trm.errors import ConfigError
from moe_trm.methods import summable
from moe_trm.ratios import LogRatios
from routing.hf_context import replay
from routing.layout.rows import Rows
from routing.record.record import RouteRecord, token_digest

_WHERE = "moe_trm.adapters.trl"


class Corrected:
    """Mixed in before `GRPOTrainer`: `class Trainer(Corrected, GRPOTrainer): pass`.

    Weights multiply the advantages of each token, which TRL's token losses are proportional to; 0 drops a token from
    the gradient and leaves every denominator. Rules see the policy in training. Metrics appear in TRL's own logs, of
    the rows of the main process: the rules' own, the split log-ratio (`engine/...`, `update/...`), kept shares by
    length (`acceptance/length_...`), and with routes `routing/local_flip_rate` and `routing/applied_fraction`.

    Args:
        rules: as in `moe_trm.corrections.plain.bind`.
        fresh: True says that samples are of the weights that the step begins with; then rules may read `engine`.
        routes: records by the digest of their tokens (`record.token_digest`), which every forward of the policy takes
            its routes from; the caller fills and empties it. None: no replay.
        max_local_flip_rate: as of `routing.hf.HFReplayer`.

    All other arguments are `GRPOTrainer`'s.

    Raises:
        ConfigError: rules that cannot be bound or are of batch scope; settings of TRL that would weigh by the same
            ratio again, that skip these hooks, or that hide whose forward it is. In a step: no log-probs of the engine.
        RouteError, ReplayProofError: in a step, a sequence without a record, and as `routing.hf_context.replay`.
    """

    def __init__(
        self,
        *args: Any,
        rules: Rules = "disabled",
        fresh: bool = False,
        routes: Mapping[bytes, RouteRecord] | None = None,
        max_local_flip_rate: float = 0.3,
        **kwargs: Any,
    ) -> None:
        self._rules = bind(rules)
        self._judge, self._fresh, self._routes = compose(self._rules), fresh, routes
        self._max_local_flip_rate = max_local_flip_rate
        self._pending: dict[str, Any] | None = None
        super().__init__(*args, **kwargs)
        self._check_settings()

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        self._pending = dict(inputs)
        try:
            loss: Tensor = super()._compute_loss(model, self._pending)  # type: ignore[misc]
            return loss
        finally:
            self._pending = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        size = kwargs.pop("batch_size", None) or len(input_ids)
        forward = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if not self._replays(model):
            outputs = forward(model, input_ids, attention_mask, *args, batch_size=size, **kwargs)
        else:
            # One context covers one forward.
            parts = []
            for start in range(0, len(input_ids), size):
                ids, mask = input_ids[start : start + size], attention_mask[start : start + size]
                with self._replayed(model, ids, mask):
                    parts.append(forward(model, ids, mask, *args, **kwargs))
            outputs = parts[0] if len(parts) == 1 else _joined(parts)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending["advantages"] = self._corrected_advantages(pending, outputs[0].detach())
        return outputs

    def _corrected_advantages(self, inputs: Mapping[str, Any], current: Tensor) -> Tensor:
        """`[B, R]` advantages times weights, 0 on tokens that are dropped."""
        sampled = inputs.get("sampling_per_token_logps")
        if sampled is None:
            raise ConfigError(
                "there are no log-probs of the engine that sampled",
                where=_WHERE,
                got="no sampling_per_token_logps in the batch",
                expected="use_vllm=True, or a rollout_func that returns logprobs",
            )
        mask = inputs["completion_mask"].bool()
        mask = mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask
        # TRL writes NaN where the engine sent none. Such a row is dropped and counted, never filled in.
        complete = (sampled.isfinite() | ~mask).all(dim=1)
        old = inputs.get("old_per_token_logps")
        old = current if old is None else old
        advantages = inputs["advantages"]
        advantages_BR = (advantages[:, None] if advantages.ndim == 1 else advantages).expand_as(current)
        ratios = LogRatios(sampled, old if self._fresh else None, current, mask & complete[:, None], old)
        evidence = Evidence(ratios, advantages_BR)
        correction = self._judge(evidence)
        parts = (correction.metrics, diagnostics.metrics(evidence), diagnostics.acceptance(evidence, correction))
        self._log_metrics(
            summable.finalize(summable.add(parts))
            | {"records/no_logprobs_fraction": 1.0 - float(complete.float().mean())}
        )
        corrected: Tensor = advantages_BR * torch.where(correction.keep, correction.weights, 0.0)
        return corrected.to(advantages_BR.dtype)

    @contextmanager
    def _replayed(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Iterator[None]:
        assert self._routes is not None
        rows = Rows.padded(attention_mask)
        digests = [token_digest(ids.cpu().numpy()) for ids in rows.sequences(input_ids)]
        records = [self._routes.get(digest) for digest in digests]
        trainer: Any = self
        inner = trainer.accelerator.unwrap_model(model)
        with replay(inner, records, input_ids, rows, max_local_flip_rate=self._max_local_flip_rate) as replayed:
            yield
        report = replayed.report
        assert report is not None
        rates = {"local_flip_rate": report.local_flip_rate, "applied_fraction": report.applied_fraction}
        self._log_metrics({f"routing/{name}": rate for name, rate in rates.items() if rate is not None})

    def _replays(self, model: Any) -> bool:
        """A reference model keeps its own routes."""
        trainer: Any = self
        unwrap = trainer.accelerator.unwrap_model
        return self._routes is not None and unwrap(model) is unwrap(trainer.model)

    def _log_metrics(self, metrics: Mapping[str, float]) -> None:
        trainer: Any = self
        for name, value in metrics.items():
            trainer._metrics["train" if trainer.model.training else "eval"][name].append(value)

    def _check_settings(self) -> None:
        trainer: Any = self
        weighs = [rule.rule.name for rule in self._rules if rule.weighs]
        refused = [
            (trainer.use_vllm and trainer.vllm_importance_sampling_correction and bool(weighs),
             "vllm_importance_sampling_correction", f"True beside {', '.join(weighs)}",
             "False: the ratio would be counted twice"),
            (trainer.loss_type == "vespo", "loss_type", "vespo", "a loss that is proportional to the advantages"),
            (bool(getattr(trainer.args, "use_liger_kernel", False)), "use_liger_kernel", True,
             "False: its loss asks for no log-probs"),
            (self._routes is not None and trainer.beta != 0.0 and trainer.ref_model is None, "beta", trainer.beta,
             "0 with routes and an adapter: the reference is the same module, and would be replayed"),
        ]  # fmt: skip
        for wrong, setting, got, expected in refused:
            if wrong:
                raise ConfigError(
                    "a setting of TRL does not go with these rules", where=setting, got=got, expected=expected
                )


def _joined(parts: list[Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    logprobs, entropies, losses = zip(*parts, strict=True)
    return (
        torch.cat(logprobs),
        None if entropies[0] is None else torch.cat(entropies),
        None if losses[0] is None else torch.stack(losses).mean(),
    )
