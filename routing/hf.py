"""Replay on the MoE blocks of Hugging Face transformers (5.0 and later), unpatched, with the proof that it happened.

`routing.hf_context.replay` is the same for a single forward, in one line.

In these models a `gate` module returns logits, gate weights and expert ids, and an `experts` module takes hidden
states, ids and weights. Which value is which, and how weights follow from logits, is found when the hooks are attached
(`routing.hosts.hf_gates`); a gate that is not understood is refused there. A forward hook on the gate replaces ids and
weights. A pre-hook on the experts counts the ids that they are really given.

Gate weights are recomputed over the replayed ids from the live logits, with gradient. A bias and groups select experts
but are not part of the weights. Every replayed forward checks that this is the gate's own formula, by applying it to
the gate's own ids. Where it no longer is, `report` refuses.

An auxiliary loss stays natural: transformers takes its top-k from the returned logits, and so does
`routing.replay.router_losses`.

Shape letters: B sequences, R columns, N = B * R tokens in batch order (token `n` is column `n % R` of sequence `n //
R`), K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from routing.errors import MisalignedError, ReplayProofError, ReplayRefusedError
from routing.hosts.hf_blocks import body_of, check_weights, check_whole
from routing.hosts.hf_blocks import gate_of as gate_of
from routing.hosts.hf_blocks import moe_blocks as moe_blocks
from routing.hosts.hf_blocks import selection_bias as selection_bias
from routing.hosts.hf_gates import contracts_of
from routing.hosts.hf_gates import gate_weights as gate_weights
from routing.hosts.hf_indexer import IndexerReplay, indexers
from routing.indexer.proof import both, judge_indexers
from routing.judge.flip_bound import FlipBoundError
from routing.judge.sample_flips import PassFlips, keys_of, total
from routing.layout.columns import Columns
from routing.layout.rows import Rows
from routing.record.sources import (
    Native,
    ReplayRecorded,
    ReplayRecords,
    ReplayReport,
    RouteSource,
    batch_digest,
    check_rows,
)
from routing.replay.gate_proof import FORMULA_TOLERANCE, GateProof
from routing.replay.over_ranks import over_ranks
from routing.replay.placing import placed_routes, sliced_routes, uncovered
from routing.replay.replay_pass import Counters, ReplayPass, judge
from routing.replay.running import RunningPass


class HFReplayer:
    """Chooses and proves the routes of every forward of one transformers model.

    Used as `routing.megatron.MegatronReplayer` is.

    Activation checkpointing is covered: recomputation uses the routes of the micro-batch it belongs to.

    Args:
        model: a causal language model or its body; wrappers around the forward (DDP, DeepSpeed,
            PyTorch's `fully_shard`, activation checkpointing) may stay on.
        max_local_flip_rate: `report` raises when, in any layer or overall, replayed sets differ from the live gate's
            own more often, and for a sample that its batch does not explain (`routing.judge.flip_bound`). 1: no bound
            at all.
        missing: `reject` refuses records with rows that have no routes; `native` leaves those tokens to the live gate
            and counts them.

    Raises:
        ReplayRefusedError: a dense model, or gates this module cannot replay or not prove (`routing.hosts.hf_blocks`).
    """

    def __init__(
        self, model: nn.Module, *, max_local_flip_rate: float = 0.3, missing: Literal["reject", "native"] = "reject"
    ) -> None:
        if not 0.0 <= max_local_flip_rate <= 1.0:
            raise ReplayRefusedError(f"max_local_flip_rate must be between 0 and 1, got {max_local_flip_rate}")
        self.max_local_flip_rate, self.missing = max_local_flip_rate, missing
        self._model = model
        self._blocks = moe_blocks(model)
        if not self._blocks:
            raise ReplayRefusedError("routing replay cannot be used with a dense model: it has no routers")
        for layer, block in self._blocks.items():
            check_weights(layer, gate_of(block))
        self._contracts = contracts_of(self._blocks)
        first = next(iter(self._blocks.values()))
        self.num_experts, self.top_k = int(gate_of(first).num_experts), int(gate_of(first).top_k)
        self._device = gate_of(first).weight.device
        self._counters = Counters(max([*self._blocks, *(sparse := indexers(model)).source_of]) + 1, self._device)
        self._indexers = IndexerReplay(sparse, len(self._counters), self._device)
        self._by_sample: list[PassFlips] = []
        self._other_formula = torch.zeros(len(self._counters), dtype=torch.int64, device=self._device)
        self._gates = GateProof(tuple(self._blocks), len(self._counters), self._device)
        self._logits: dict[int, Tensor] = {}
        self._has_gradient: dict[int, bool] = {}
        self._running = RunningPass()
        self._hooks: list[Any] = []
        self._attach()

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """0-based decoder layers with a mixture of experts, ascending."""
        return tuple(self._blocks)

    @property
    def indexer_layer_ids(self) -> tuple[int, ...]:
        """0-based decoder layers with an indexer of their own, ascending; none of a model without sparse attention."""
        return self._indexers.layer_ids

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model that are counted, dense ones too."""
        return len(self._counters)

    @property
    def is_proved(self) -> bool:
        """True unless something was replayed since the last `report`."""
        return not self._by_sample

    def detach(self) -> None:
        """Remove every hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def rest(self) -> None:
        """Remove every hook, and come back for any backward of what was forwarded: its recomputation needs the routes.

        Such a backward ends with a `report`, and so with its errors.
        """
        self.detach()
        self._running.before_backward, self._running.after_backward = self._attach, self._end_of_backward

    def _attach(self) -> None:
        self._hooks = [body_of(self._model).register_forward_hook(self._running.tag_output)]
        self._hooks += self._indexers.attach(body_of(self._model), self._running)
        for layer, block in self._blocks.items():
            self._hooks += [
                gate_of(block).register_forward_hook(partial(self._route, layer)),
                block.experts.register_forward_pre_hook(partial(self._prove, layer), with_kwargs=True),
            ]

    def _end_of_backward(self) -> None:
        self.detach()
        self.report()

    @contextmanager
    def use(
        self,
        source: RouteSource,
        input_ids: Tensor,
        target_ids: Tensor,
        valid: Tensor,
        *,
        samples: Sequence[int] | None = None,
    ) -> Iterator[ReplayPass]:
        """Context for exactly one forward of one right-padded micro-batch; its backward may come any time later.

        Args:
            source: whose routes.
            input_ids: `[B, R]`. Tensors on the CPU save a device sync.
            target_ids: `[B, R]`.
            valid: `[B, R]` bool.
            samples: ids of the rows, by which their flips are counted and named; None: by their tokens.

        Raises:
            RouteError: routes of another micro-batch, before anything is computed.
            ReplayProofError: on leaving, when the blocks were not forwarded exactly once each, or are no longer those
                attached to.
        """
        with self.use_rows(source, Rows.right_padded(valid), input_ids, target_ids, samples=samples) as opened:
            yield opened

    @contextmanager
    def use_rows(
        self,
        source: RouteSource,
        rows: Rows,
        input_ids: Tensor,
        target_ids: Tensor | None = None,
        *,
        columns: Columns | None = None,
        samples: Sequence[int] | None = None,
    ) -> Iterator[ReplayPass]:
        """The same for rows of any layout. Padding keeps the live gate's choice and is not counted.

        Args:
            source: whose routes; records are those of `rows.spans`, in order.
            rows: where the sequences lie in `input_ids`.
            input_ids: `[B, R]`.
            target_ids: `[B, R]`, of rows that stop before the last token of each sequence. None: the rows hold whole
                sequences. Their last tokens predict nothing and have no routes: the gate chooses, uncounted.
            columns: those that this rank forwards under context or sequence parallelism, while all other arguments are
                of the whole micro-batch. None: all of them.
            samples: ids of the sequences; None: by their tokens.

        Raises:
            RouteError, ReplayProofError: as `use`.
        """
        if self._running.active is not None:
            raise ReplayProofError("`use` inside `use`: one context covers one forward")
        self._check_ours()
        opened = self._running.active = self._open(
            source, Columns(rows) if columns is None else columns, rows, input_ids, target_ids, samples
        )
        try:
            yield opened
        finally:
            self._running.active = None
        self._check_ours()
        wrong = {layer: count for layer, count in opened.proved.items() if count != 1}
        if wrong:
            raise ReplayProofError(f"MoE blocks must be forwarded once inside `use`; forwards by layer: {wrong}")
        self._indexers.check_proved(opened.indexer)

    def report(self, group: ProcessGroup | None = None) -> ReplayReport:
        """Read and reset the counters, summed over `group` (collective).

        Raises `ReplayProofError` on a step that is not proved, and its kind `FlipBoundError` for too many flips.
        """
        positions, apart_sums = self._indexers.take()
        local_sums = self._counters.take(
            torch.cat((self._gates.take(), self._other_formula[:, None], positions), dim=1)
        )
        passes, self._by_sample = self._by_sample, []
        self._other_formula.zero_()
        summed, flips = over_ranks(local_sums, total(passes, len(local_sums)), group, self._device)
        counters, positions = summed.tensor_split((-positions.shape[1],), dim=1)
        if num_other_formula := int(counters[:, -1].sum()):
            raise ReplayProofError(
                f"the gates do not compute their weights as this module does for {num_other_formula} token-layers: "
                "this model is not supported"
            )
        indexer, fault = judge_indexers(positions, apart_sums, bounded=self.max_local_flip_rate < 1)
        try:
            report = judge(counters[:, :-1], self.max_local_flip_rate, flips, self.top_k, self.num_experts)
        except FlipBoundError as doubt:
            # Of other hidden states both routers and indexers choose otherwise, whichever record is wrong.
            doubt.report, doubt.certain = replace(doubt.report, indexer=indexer), both(fault, doubt.certain)
            raise
        except MisalignedError as certain:
            raise both(fault, certain) or certain from None
        if fault is not None:
            raise fault
        return replace(report, indexer=indexer)

    def _open(
        self,
        source: RouteSource,
        columns: Columns,
        rows: Rows,
        input_ids: Tensor,
        target_ids: Tensor | None,
        samples: Sequence[int] | None,
    ) -> ReplayPass:
        rows.check_shape(input_ids)
        columns.check_rows(rows)
        opened = ReplayPass(source, self.layer_ids, columns.num_local, self._counters)
        opened.indexer = self._indexers.open(source, columns, whole_sequences=target_ids is None)
        if isinstance(source, Native):
            return opened
        due_N, free, prompts = columns.cut(rows.mask()).flatten(), None, tuple[int, ...]()
        if isinstance(source, ReplayRecords):
            prompts = source.prompts
            check_rows(source.records, rows, input_ids, target_ids, self.missing, source.origins)
            expected_shape = self.layer_ids, self.num_experts, self.top_k
            opened.targets = self._move(placed_routes(source.records, rows, *expected_shape, columns))
            opened.expected = self._move(sliced_routes(source.records, rows, *expected_shape, columns))
            due_N = columns.cut(rows.without_last()).flatten() if target_ids is None else due_N
            if (uncovered_rows := uncovered(source.records, rows)) is not None:
                free = columns.cut_places(uncovered_rows)
                due_N = due_N & ~free
        else:
            targets = input_ids if target_ids is None else target_ids
            opened.digest = batch_digest(input_ids, targets, rows.mask()) + (rows.digest() if rows.is_packed else b"")
            opened.digest += columns.digest()
        if isinstance(source, ReplayRecorded):
            opened.check_recorded(source.recorded, self.top_k)
            opened.targets = opened.expected = self._move(source.recorded.experts)
        if opened.replays:
            sequence_of = columns.cut_places(rows.sequence_of())
            behind = None
            if prompts:
                is_behind_N = rows.position_ids().flatten() >= torch.tensor(prompts)[rows.sequence_of()]
                behind = columns.cut_places(is_behind_N)
            flips = PassFlips(
                keys_of(samples, rows.sequences(input_ids.cpu()) if rows.is_packed else input_ids),
                torch.zeros(len(rows.spans), dtype=torch.int64).index_add(0, sequence_of, due_N.long()),
                self.layer_ids,
                len(self._counters),
                sample_last=False,
                device=self._device,
                sample_of=sequence_of if rows.is_packed else None,
                due_N=due_N if isinstance(source, ReplayRecords) else None,
                experts=(self.top_k, self.num_experts),
                at_sampling=source.at_sampling if isinstance(source, ReplayRecords) else (),
                behind_N=behind,
            )
            self._by_sample.append(flips)
            opened.indexer.keys = flips.keys
            opened.expect(due_N, free, self._device, flips, rest_is_live=True)
        return opened

    def _move(self, routes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {layer: ids.to(self._device, non_blocking=True) for layer, ids in routes.items()}

    def _route(self, layer: int, gate: nn.Module, _args: Any, output: tuple[Any, ...]) -> Any:
        running, recompute = self._running.current()
        if recompute:
            self._check_alone(gate)
        contract = self._contracts[layer]
        logits, weights, live = contract.read(output)
        check_whole(layer, logits)
        if running.records and contract.takes_best:
            scores = contract.selection_scores(logits, selection_bias(self._blocks[layer]))
            running.keep_margin(layer, scores, self.top_k)
        ids = running.choose(layer, live, recompute)
        if running.watch is not None and not recompute:
            running.watch.see(layer, logits, ids, sigmoid=contract.sigmoid)
        if ids is live:
            return self._with_losses(layer, output, logits, weights, ids)
        with torch.no_grad():
            formula_weights = contract.gate_weights(logits, live).to(weights.dtype)
            # What attention makes of padding may be NaN, which is close to nothing.
            differs_N = ~torch.isclose(formula_weights, weights, rtol=FORMULA_TOLERANCE, atol=1e-6).all(1)
            self._other_formula[layer] += (differs_N & running.due).sum()
        # The weight of a frozen gate with an adapter says nothing; what trains below the weights is in the logits.
        self._has_gradient[layer] = logits.requires_grad
        # A view, so that the gradient of the routers' own losses is no answer of the weights.
        weighed = logits.view_as(logits)
        if logits.requires_grad and self._gates.watches(layer):
            weighed.register_hook(partial(self._gates.answered, layer))  # type: ignore[no-untyped-call]
        self._logits[layer] = logits.detach()
        replayed = contract.gate_weights(weighed, ids).to(weights.dtype)
        return self._with_losses(layer, contract.write(output, replayed, ids), logits, replayed, ids)

    def _with_losses(
        self, layer: int, output: tuple[Any, ...], logits: Tensor, weights: Tensor, ids: Tensor
    ) -> tuple[Any, ...]:
        """See `routing.replay.router_losses`."""
        losses = self._running.current()[0].losses
        if losses is None:
            return output
        contract = self._contracts[layer]
        return contract.write(output, losses.attach(layer, weights, logits, self.top_k, sigmoid=contract.sigmoid), ids)

    def _prove(self, layer: int, _experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running, recompute = self._running.current()
        weights, ids = self._contracts[layer].passed_weights_and_ids(args, kwargs)
        # Weights stand in the order of the ids, so the order is proved as well.
        running.prove(layer, lambda expected: (ids == expected).all(1), recompute)
        if running.replays:
            self._prove_gate(layer, running, weights)

    def _prove_gate(self, layer: int, running: ReplayPass, weights: Tensor) -> None:
        """See `routing.replay.gate_proof`. The weights stand in the order of the ids that were replayed."""
        gate, contract = gate_of(self._blocks[layer]), self._contracts[layer]
        # Nothing is known here about a gate whose hook was taken away; that it was not asked is counted.
        if (logits := self._logits.pop(layer, None)) is not None:
            with torch.no_grad():
                formula = contract.gate_weights(logits, running.expected[layer])
                self._gates.compare(layer, weights, formula, running.due)
        # One weight that is divided by itself is 1, whatever the logits are.
        constant = self.top_k == 1 and contract.normalised
        has_gradient = gate.weight.requires_grad or self._has_gradient.get(layer, False)
        trained = torch.is_grad_enabled() and has_gradient and not constant
        if trained and self._gates.watches(layer):
            self._gates.asks(layer, weights)

    def _check_alone(self, gate: nn.Module) -> None:
        owners = [getattr(getattr(hook, "func", None), "__self__", None) for hook in gate._forward_hooks.values()]
        if any(isinstance(owner, HFReplayer) and owner is not self for owner in owners):
            raise ReplayProofError(
                "one backward recomputes layers of several replayers' forwards: use one HFReplayer for all of them, or "
                "one backward for each"
            )

    def _check_ours(self) -> None:
        current_blocks = moe_blocks(self._model)
        if list(current_blocks) != list(self._blocks) or any(
            current_blocks[layer] is not block or not gate_of(block)._forward_hooks
            for layer, block in self._blocks.items()
        ):
            raise ReplayProofError(
                "MoE blocks are no longer the ones the replayer was attached to: the model was rebuilt"
            )
