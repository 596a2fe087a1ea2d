"""Replay on stock Megatron-Core routers, with the proof that it happened.

`topk_routing_with_score_function` asks `router.router_replay`, when there is one, for its top-k. `MegatronReplayer`
puts one object there for each MoE layer of the forwarded model. Megatron's process-wide list of replay objects is not
used. Only the selection is replaced. Megatron computes gate weights from live logits over the replayed ids, for softmax
before or after the top-k and for sigmoid with expert bias. So gradients reach the router.

Natural: auxiliary load-balancing losses, Megatron's and those of `routing.replay.router_losses`, take their own top-k
from the logits, so they see natural routing. Not natural:
expert-bias statistics count the routing map, so under replay they count replayed routes.

The proof does not trust the object that replays. Just before the experts compute, the dispatcher's own routing map is
compared with a second cut of the records. The number of tokens with recorded routes is counted from the batch.

Shape letters: B sequences, R columns, N local tokens in router order, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from routing.errors import ReplayProofError, ReplayRefusedError, RouteError
from routing.hosts.megatron_checks import all_moe_layer_ids, check_config, moe_layers, unwrap
from routing.hosts.megatron_dispatch import Dispatched
from routing.hosts.megatron_pass import RouterTap
from routing.judge.sample_flips import PassFlips, keys_of, total
from routing.layout.packed import AnyLayout, PackedLayout
from routing.layout.rows import Rows
from routing.record.record import RouteRecord
from routing.record.sources import (
    Native,
    ReplayRecorded,
    ReplayRecords,
    ReplayReport,
    RouteSource,
    batch_digest,
    check_rows,
)
from routing.replay.cut import by_layer, first_cut, rows_of_records, stacked_routes
from routing.replay.gate_proof import GateProof, megatron_weights
from routing.replay.over_ranks import over_ranks
from routing.replay.proof import DueTokens, sample_of_tokens, second_cut, tokens_from
from routing.replay.replay_pass import Counters, ReplayPass, judge
from routing.replay.running import RunningPass


class MegatronReplayer:
    """Chooses and proves the routes of every forward of the attached model chunks.

    Use one replayer per model (an actor and a reference have one each). Use one `use` around each forward of each
    micro-batch, and one `report` per step, before the optimizer. While attached, a forward outside `use` raises: it
    would be silently native. Activation recompute in backward uses the routes of its own micro-batch, in any order of
    micro-batches. The pass is found through the autograd graph of the chunk's output, so there is no queue.

    Args:
        models: the chunk of this rank, or its list of virtual pipeline chunks; DDP and precision wrappers are looked
            through.
        max_local_flip_rate: bound on the share of replayed sets that differ from the live router's own, in any layer
            and overall; `report` raises above it, and for a sample that its batch does not explain
            (`routing.judge.flip_bound`). 1: no bound at all.
        missing: `reject` refuses records with rows that have no routes; `native` leaves those tokens to the live router
            and counts them.

    Raises:
        ReplayRefusedError: a model or setting for which replay would not happen or could not be proved.
    """

    def __init__(
        self, models: Any, *, max_local_flip_rate: float = 0.3, missing: Literal["reject", "native"] = "reject"
    ) -> None:
        if not 0.0 <= max_local_flip_rate <= 1.0:
            raise ReplayRefusedError(f"max_local_flip_rate must be between 0 and 1, got {max_local_flip_rate}")
        chunks = [unwrap(model) for model in (models if isinstance(models, list | tuple) else [models])]
        if not chunks:
            raise ReplayRefusedError("no model to attach to")
        self.config = chunks[0].config
        self.max_local_flip_rate, self.missing = max_local_flip_rate, missing
        check_config(self.config)
        self._chunks = {id(chunk): (chunk, moe_layers(chunk)) for chunk in chunks}
        self._model_layer_ids = all_moe_layer_ids(self.config)
        self._running = RunningPass()
        self._taps: dict[int, RouterTap] = {}
        self._previous: dict[int, Any] = {}
        self._hooks: list[Any] = []
        self._check_layers()
        # A chunk of a pipeline may have no layer, and no parameter.
        self._device = next(values for chunk in chunks for values in chunk.parameters()).device
        self._counters = Counters(self.config.num_layers, self._device)
        self._by_sample: list[PassFlips] = []
        attached = [layer for _, layers in self._chunks.values() for layer, _ in layers]
        self._gates = GateProof(attached, len(self._counters), self._device)
        for chunk, layers in self._chunks.values():
            self._hooks.append(chunk.decoder.register_forward_hook(self._running.tag_output))
            for layer, moe in layers:
                self._attach(layer, moe)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """0-based decoder layers of the attached MoE layers, ascending."""
        return tuple(sorted(self._taps))

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model that are counted, dense ones too."""
        return len(self._counters)

    @property
    def is_proved(self) -> bool:
        """True unless something was replayed since the last `report`."""
        return not self._by_sample

    def detach(self) -> None:
        """Give the routers back as they were found."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for _, layers in self._chunks.values():
            for layer, moe in layers:
                moe.router.router_replay = self._previous[layer]
        self._taps.clear()

    @contextmanager
    def use(
        self,
        source: RouteSource,
        layout: AnyLayout,
        input_ids: Tensor,
        target_ids: Tensor,
        valid: Tensor,
        *,
        model: Any = None,
        samples: Sequence[int] | None = None,
    ) -> Iterator[ReplayPass]:
        """Run exactly one forward of one micro-batch inside this context; its backward may come any time later.

        Args:
            source: whose routes.
            layout: this rank's cut of the micro-batch.
            input_ids: `[B, R]`, the whole micro-batch before any cut. Tensors on the CPU save a device sync.
            target_ids: `[B, R]`, likewise.
            valid: `[B, R]` bool, likewise.
            model: the forwarded chunk; needed only with virtual pipeline chunks.
            samples: ids of the rows, by which their flips are counted and named; None: by their tokens.

        Yields:
            The pass; with `Record()`, `pass_.recorded()` afterwards gives the routes.

        Raises:
            RouteError: records or recorded routes that are not this micro-batch's, before anything is computed.
            ReplayProofError: on leaving, when the attached MoE layers were not forwarded exactly once each, or are no
                longer ours.
        """
        if self._running.active is not None:
            raise ReplayProofError("`use` inside `use`: one context covers one forward")
        layers = self._layers_of(model)
        self._check_ours()
        opened = self._open(source, layout, input_ids, target_ids, valid, layers, samples)
        self._running.active = opened
        try:
            yield opened
        finally:
            self._running.active = None
        self._check_ours()
        wrong = {layer: count for layer, count in opened.proved.items() if count != 1}
        if wrong:
            raise ReplayProofError(
                f"MoE layers must be forwarded once inside `use`; forwards by layer: {wrong}. Another model was "
                "forwarded, or the model was rebuilt after the replayer was attached."
            )

    def report(self, group: ProcessGroup | None = None) -> ReplayReport:
        """Read and reset the counters: the only device synchronisation of the proof. Call it before the optimizer step.

        Args:
            group: ranks to sum over (collective: all of them call); None for this process alone.

        Raises:
            ReplayProofError: a token-layer that was due did not use its recorded set, or its gate weights are not those
                of this set, or the router got no gradient through them.
            FlipBoundError: too many local flips, in a layer or in a sample.
        """
        local_sums = self._counters.take(self._gates.take())
        passes, self._by_sample = self._by_sample, []
        counters, flips = over_ranks(local_sums, total(passes, len(local_sums)), group, self._device)
        return judge(
            counters,
            self.max_local_flip_rate,
            flips,
            int(self.config.moe_router_topk),
            int(self.config.num_moe_experts),
        )

    def _open(
        self,
        source: RouteSource,
        layout: AnyLayout,
        input_ids: Tensor,
        target_ids: Tensor,
        valid: Tensor,
        layers: Sequence[int],
        samples: Sequence[int] | None,
    ) -> ReplayPass:
        opened = self.new_pass(source, layers, layout.num_local)
        opened.layout = layout
        rows = self._rows(layout, valid)
        if isinstance(source, Native):
            return opened
        if isinstance(source, ReplayRecords):
            check_rows(source.records, rows, input_ids, target_ids, self.missing, source.origins)
            opened.targets, opened.expected = (
                by_layer(routes_LNK, layers, self._device) for routes_LNK in self._cuts(source.records, layout, layers)
            )
            due_tokens = DueTokens.of(rows.lengths, layout, source.records)
        else:
            opened.digest = batch_digest(input_ids, target_ids, valid) + layout.digest()
            if not isinstance(source, ReplayRecorded):
                return opened
            opened.check_recorded(source.recorded, int(self.config.moe_router_topk))
            opened.targets = opened.expected = self._move(source.recorded.experts)
            due_tokens = DueTokens.of(rows.lengths, layout)
        flips = PassFlips(
            keys_of(samples, input_ids),
            due_tokens.by_sample,
            layers,
            len(self._counters),
            sample_last=True,
            device=self._device,
            sample_of=sample_of_tokens(layout),
            due_N=due_tokens.due if isinstance(source, ReplayRecords) else None,
            experts=(int(self.config.moe_router_topk), int(self.config.num_moe_experts)),
            at_sampling=source.at_sampling if isinstance(source, ReplayRecords) else (),
            behind_N=tokens_from(source.prompts, layout) if isinstance(source, ReplayRecords) else None,
        )
        self._by_sample.append(flips)
        opened.expect(due_tokens.due, due_tokens.free, self._device, flips)
        return opened

    def _cuts(
        self, records: Sequence[RouteRecord | None], layout: AnyLayout, layers: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """`[L, N, K]` that the routers of `layers` are given, and the second cut, which the proof compares with."""
        experts, top_k = int(self.config.num_moe_experts), int(self.config.moe_router_topk)
        for layer_ids in {record.layer_ids for record in records if record is not None}:
            # A rank may be sent its own layers only; a layer that is no MoE layer means the record is of another model.
            if not set(layer_ids) <= set(self._model_layer_ids):
                raise RouteError(
                    "layers",
                    "the record has layers that are no MoE layers here",
                    got=layer_ids,
                    expected=f"some of {self._model_layer_ids}",
                )
        routes_SLK, rows_B = stacked_routes(records, layers, experts, top_k), rows_of_records(records)
        return first_cut(routes_SLK, rows_B, layout, experts), self._cut_again(routes_SLK, rows_B, layout)

    def new_pass(self, source: RouteSource, layer_ids: Sequence[int], num_local: int) -> ReplayPass:
        """An empty pass; what is measured about passes hooks in here."""
        return ReplayPass(source, layer_ids, num_local, self._counters)

    def _cut_again(self, routes_SLK: np.ndarray, rows_B: np.ndarray, layout: AnyLayout) -> np.ndarray:
        return second_cut(routes_SLK, rows_B, layout)

    def _move(self, routes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {layer: experts.to(self._device, non_blocking=True) for layer, experts in routes.items()}

    def _rows(self, layout: AnyLayout, valid: Tensor) -> Rows:
        """The rows of the micro-batch. Raises `RouteError` unless the layout is of this model and of them."""
        rows = Rows.right_padded(valid)
        tensor = int(self.config.tensor_model_parallel_size) if self.config.sequence_parallel else 1
        expected_sizes = (*valid.shape, int(self.config.context_parallel_size), tensor)
        got = (layout.batch, layout.length, layout.cp_size, layout.sp_size)
        if got != expected_sizes:
            raise RouteError(
                "shape",
                "the layout is not this model's or not this micro-batch's",
                got=got,
                expected=f"{expected_sizes} as (B, R, cp, sp)",
            )
        if isinstance(layout, PackedLayout) and layout.lengths != rows.lengths:
            raise RouteError("shape", "the pack is of other rows", got=layout.lengths[:8], expected=rows.lengths[:8])
        return rows

    def _attach(self, layer: int, moe: Any) -> None:
        settings = moe.router.config
        logits = settings.moe_router_score_function == "softmax" and not settings.moe_router_pre_softmax
        answered = partial(self._gates.answered, layer)
        tap = RouterTap(layer, self._running.current, logits=logits, answered=answered)
        self._previous[layer] = moe.router.router_replay
        moe.router.router_replay = self._taps[layer] = tap
        dispatched = Dispatched(moe)
        self._hooks.append(moe.router.register_forward_hook(partial(self._prove_gate, layer)))
        self._hooks.append(moe.router.register_forward_hook(partial(self._watch, layer)))
        self._hooks.append(moe.router.register_forward_hook(partial(self._add_losses, layer)))
        if moe.router.weight.requires_grad:
            self._hooks.append(moe.router.weight.register_hook(partial(self._answered, layer)))
        self._hooks += [dispatched, moe.experts.register_forward_pre_hook(partial(self._prove, layer, dispatched))]

    def _prove(self, layer: int, dispatched: Dispatched, _module: Any, _args: Any) -> None:
        running, recompute = self._running.current()
        running.prove(layer, dispatched.matches, recompute)

    def _prove_gate(self, layer: int, router: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        """See `routing.replay.gate_proof`."""
        running, _ = self._running.current()
        if not running.replays:
            return
        weights = output[0]
        with torch.no_grad():
            ids = running.expected[layer]
            logits = router.gating(args[0]).view(-1, weights.shape[1])
            self._gates.compare(layer, weights.gather(1, ids), megatron_weights(self.config, logits, ids), running.due)
        # Megatron-Core refuses the one gate without a gradient, a softmax over one chosen logit.
        if torch.is_grad_enabled() and router.weight.requires_grad and self._gates.watches(layer):
            if not router.weight.is_leaf:
                # Made anew for each forward, of a frozen weight and an adapter: hooks of the attached one see nothing.
                router.weight.register_hook(partial(self._answered, layer))
            self._gates.asks(layer, weights)

    def _watch(self, layer: int, router: Any, args: tuple[Tensor, ...], _output: Any) -> None:
        """See `routing.record.router_shift`."""
        running, recompute = self._running.current()
        if running.watch is None or recompute:
            return
        with torch.no_grad():
            logits = router.gating(args[0]).view(-1, int(self.config.num_moe_experts))
        sigmoid = self.config.moe_router_score_function == "sigmoid"
        running.watch.see(layer, logits, running.used(layer), sigmoid=sigmoid)

    def _answered(self, layer: int, gradient: Tensor) -> None:
        """A gradient at the router's weight. With losses of its own it says nothing: then the scores are watched."""
        owner = self._running.backward
        if owner is None or owner.losses is None:
            self._gates.answered(layer, gradient)

    def _add_losses(self, layer: int, router: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> Any:
        """See `routing.replay.router_losses`."""
        running, _ = self._running.current()
        if running.losses is None:
            return output
        logits = router.gating(args[0]).view(-1, int(self.config.num_moe_experts))
        sigmoid = self.config.moe_router_score_function == "sigmoid"
        top_k = int(self.config.moe_router_topk)
        return running.losses.attach(layer, output[0], logits, top_k, sigmoid=sigmoid), *output[1:]

    def _layers_of(self, model: Any) -> list[int]:
        if model is None and len(self._chunks) > 1:
            raise ReplayProofError("several chunks are attached: say which one is forwarded with `use(..., model=...)`")
        key = next(iter(self._chunks)) if model is None else id(unwrap(model))
        if key not in self._chunks:
            raise ReplayProofError(
                "this model is not the one the replayer was attached to; attach a new replayer after rebuilding a model"
            )
        return [layer for layer, _ in self._chunks[key][1]]

    def _check_layers(self) -> None:
        for _, layers in self._chunks.values():
            for layer, moe in layers:
                if layer not in self._model_layer_ids:
                    raise ReplayRefusedError(f"layer {layer} is a MoE layer, but moe_layer_freq says it is dense")
                if isinstance(moe.router.router_replay, RouterTap):
                    raise ReplayRefusedError(
                        f"the router of layer {layer} already belongs to a replayer; detach that one first"
                    )

    def _check_ours(self) -> None:
        for chunk, attached in self._chunks.values():
            current_layers = moe_layers(chunk)
            same = len(current_layers) == len(attached) and all(
                a[0] == b[0] and a[1] is b[1] for a, b in zip(current_layers, attached, strict=True)
            )
            if not same or any(moe.router.router_replay is not self._taps.get(layer) for layer, moe in current_layers):
                raise ReplayProofError(
                    "routers are no longer the ones the replayer was attached to: the model was rebuilt, or something "
                    "else took `router_replay`"
                )
