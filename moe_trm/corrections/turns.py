"""Turns in the place of rows: what a rule on rows says of each turn of a conversation, by itself.

Shape letters: B rows, T tokens, N sampled tokens, P turns (of all rows together), L tokens of the longest turn.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_trm.corrections.evidence import Correction, Evidence, RowDecision
from moe_trm.errors import ConfigError
from moe_trm.methods import summable
from moe_trm.methods.limits import LAST_TURN
from moe_trm.methods.row_fields import BY_ROW, RowFields


class Turns:
    """The turns of some rows, each a row of its own with its sampled tokens alone.

    Raises:
        ConfigError: the turn of a token is not known.
    """

    def __init__(self, evidence: Evidence) -> None:
        if evidence.turn_ids is None:
            raise ConfigError(
                "a rule by turn needs to know the turn of each token",
                where="correction.rules, scope",
                got="turn with evidence that has no turn_ids",
                expected="turn_ids of shape [B, T], or scope left out",
            )
        self._evidence = evidence
        mask, width = evidence.mask, max(evidence.mask.shape[1], 1)
        place_N = mask.flatten().nonzero()[:, 0]
        row_N, turn_N = place_N // width, evidence.turn_ids.flatten()[place_N].long()
        unit_P2, unit_N, length_P = torch.unique(
            torch.stack([row_N, turn_N], dim=1), dim=0, return_inverse=True, return_counts=True
        )
        order_N = unit_N.argsort(stable=True)
        column_N = torch.arange(len(place_N), device=mask.device) - (length_P.cumsum(0) - length_P)[unit_N[order_N]]
        shape = (len(length_P), max(int(length_P.max()) if len(length_P) else 0, 1))
        self._row_P, self.number_P = unit_P2[:, 0], unit_P2[:, 1]
        self._place_PL = place_N.new_zeros(shape).index_put((unit_N[order_N], column_N), place_N[order_N])
        self._mask_PL = mask.new_zeros(shape).index_put((unit_N[order_N], column_N), mask.new_ones(()))

    @cached_property
    def evidence(self) -> Evidence:
        """The same of `[P, L]`, without gradients."""
        values = {field.name: getattr(self._evidence, field.name) for field in fields(RowFields)}
        return Evidence(
            self._evidence.ratios.taking(self._taken, self._mask_PL),
            self._taken(self._evidence.advantages),
            **{
                name: None if value is None else value[self._row_P] if BY_ROW[name] else self._taken(value)
                for name, value in values.items()
            },
        )

    def spread(self, decision: Correction | RowDecision) -> Correction:
        """A decision on turns as one on the tokens of the rows."""
        by_turn = decision if isinstance(decision, Correction) else decision.spread(self._mask_PL, self._dtype)
        mask, places = self._evidence.mask, self._place_PL[self._mask_PL]
        keep = torch.zeros_like(mask).flatten().index_put((places,), by_turn.keep[self._mask_PL])
        weights = torch.zeros(mask.numel(), dtype=by_turn.weights.dtype, device=mask.device)
        weights = weights.index_put((places,), by_turn.weights[self._mask_PL])
        return replace(by_turn, keep=keep.view_as(mask), weights=weights.view_as(mask))

    def kept(self, prefix: str, decision: Correction | RowDecision) -> summable.Summable:
        """`kept_turn_fraction`, the share of turns that lost no token, and of the turns of each number
        `kept_turn_fraction/<turn>`; those after 7 share one.
        """
        keep = decision.keep if isinstance(decision, RowDecision) else (decision.keep | ~self._mask_PL).all(dim=1)
        masks_by_turn = {f"/{turn}": self.number_P == turn for turn in range(LAST_TURN + 1)}
        masks_by_turn |= {f"/{LAST_TURN + 1}_up": self.number_P > LAST_TURN, "": torch.ones_like(keep)}
        return summable.add(
            summable.fraction(f"{prefix}kept_turn_fraction{name}", keep, turn_mask)
            for name, turn_mask in masks_by_turn.items()
        )

    @property
    def _dtype(self) -> torch.dtype:
        return self._evidence.ratios.dtype

    def _taken(self, values: Tensor) -> Tensor:
        """`values` `[B, T]` at the tokens of each turn, `[P, L]`; anything where a turn is shorter."""
        return values.detach().flatten()[self._place_PL] if values.numel() else values.new_zeros(self._place_PL.shape)
