"""Wrong routes told from a router that has moved, by a second look at the samples beyond the bound on flips.

The live router is asked again, without replay (`Record()`), and its choice is compared with the recorded sets of the
same sample: in place, one row earlier and later, in every other layer, and half a sample further, where they can agree
by chance only. With an agreement `a` (mean of `|live & recorded| / K`) and the agreement by chance `a_c`, the relation
is `(a - a_c) / (1 - a_c)`: 1 for the same routes, 0 for routes that have nothing to do with each other.

- In place below `RELATED`, or well below another place: the routes are wrong. They are another row's or layer's where
  that relation is above one half.
- Many tokens below it, beside others that agree: part of the sample is wrong.
- Otherwise rows and layers are in place, and the router has moved: that spreads over all tokens.

Where no sample stands out of its batch, all suspects are judged together: a few tokens that all go to the same experts
agree by chance as often as in place.

Only sums leave a rank. Shape letters: S suspects, L layers, T rows of a sample, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from routing.errors import MisalignedError
from routing.judge.flip_bound import FlipBoundError, Suspect, named
from routing.record.sources import Recorded, ReplayRecords, ReplayReport, RouteSource

RELATED = 1 / 4
"""Relation from which recorded and live routes belong to the same token and layer."""
PART = 0.2
"""Share of strangers among a sample's tokens from which part of it is wrong."""
JUDGED = 16
"""Experts of a token over all layers from which a token can be judged by itself."""
PLACES = ("in place", "of the row before", "of the row after", "by chance")
SHIFTS = (0, 1, -1)
"""Rows by which the record is taken further to compare it so."""

Routes = Callable[[int], Tensor]
"""Layer -> `[T, K]` int64 ids of one sample, -1 where another rank has them."""


@dataclass
class Agreement:
    """Sums over the compared tokens of each suspect.

    Attributes:
        places: `[S, L, 4, 2]` tokens and their agreement, compared as in `PLACES`.
        layers: `[S, L, 2]` the same for the live routes of each layer with the recorded ones of the layer where the
            suspect stands out.
        strangers: `[S, 2]` tokens that could be judged by themselves, and those that disagree with their routes.
    """

    places: Tensor
    layers: Tensor
    strangers: Tensor

    @classmethod
    def nothing(cls, suspects: int, layers: int) -> Agreement:
        """Sums before anything was compared."""
        zeros = torch.zeros(suspects * (layers * 8 + layers * 2 + 2), dtype=torch.float64)
        return cls.of(zeros, suspects, layers)

    @classmethod
    def of(cls, flat: Tensor, suspects: int, layers: int) -> Agreement:
        """The sums in `flat`."""
        places, by_layer, strangers = torch.split(flat, [suspects * layers * 8, suspects * layers * 2, suspects * 2])
        return cls(places.view(suspects, layers, 4, 2), by_layer.view(suspects, layers, 2), strangers.view(suspects, 2))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three sums."""
        return self.places, self.layers, self.strangers

    def flat(self) -> Tensor:
        """All sums in one row."""
        return torch.cat([part.flatten() for part in self.parts()])

    def add(self, suspect: int, layers: Sequence[int], live: Routes, recorded: Routes, *, worst: int) -> None:
        """Compare one sample in `layers`; `worst` is the layer where it stands out."""
        worst_routes = recorded(worst) if worst in layers else None
        by_token: list[Tensor] = []
        top_k = 0
        for layer in layers:
            live_routes, theirs = live(layer), recorded(layer)
            top_k = live_routes.shape[1]
            moved = [theirs.roll(-shift, 0) for shift in SHIFTS]
            for shift, routes in zip(SHIFTS, moved, strict=True):
                if shift:
                    routes[-1 if shift > 0 else 0] = -1
            moved.append(theirs.roll(len(theirs) // 2, 0) if len(theirs) > 1 else torch.full_like(theirs, -1))
            for place, routes in enumerate(moved):
                self.places[suspect, layer, place] += _agreement(live_routes, routes).nan_to_num().sum(0)
            if worst_routes is not None:
                self.layers[suspect, layer] += _agreement(live_routes, worst_routes).nan_to_num().sum(0)
            by_token.append(_agreement(live_routes, theirs)[:, 1])
        if layers and top_k * len(layers) >= JUDGED:
            mean = torch.stack(by_token).mean(0)
            chance = _share(self.places[suspect, list(layers), 3].sum(0))
            is_known = ~mean.isnan()
            limit = chance + RELATED * (1 - chance)
            self.strangers[suspect] += torch.stack((is_known.sum(), (mean[is_known] < limit).sum())).double()


@dataclass(frozen=True)
class SuspectFinding:
    """The result of the second look at one suspect.

    Attributes:
        suspect: the sample.
        in_place: whether its routes belong to its tokens and layers; the router has moved then.
        words: how far its routes agree, and with what.
    """

    suspect: Suspect
    in_place: bool
    words: str


def examine(
    doubt: FlipBoundError,
    keys: Sequence[Sequence[int]],
    sources: Sequence[RouteSource],
    live: Sequence[Recorded | None],
    num_layers: int,
    group: ProcessGroup | None,
    device: torch.device,
) -> list[SuspectFinding]:
    """Compare the suspects' recorded routes with what the live router chose now. Collective over `group`.

    Args:
        doubt: names the suspects, the same ones on every rank.
        keys: of the rows of each of this rank's micro-batches.
        sources: what was replayed there.
        live: what the live router chose there, from a pass with `Record()`.
        num_layers: decoder layers of the whole model.
        group: ranks to sum over; None for this process alone.
        device: for the sum.
    """
    number = {suspect.key: place for place, suspect in enumerate(doubt.suspects)}
    sums = Agreement.nothing(len(number), num_layers)
    for rows, source, live_record in zip(keys, sources, live, strict=True):
        for row, key in enumerate(rows):
            if key in number and live_record is not None:
                layers, live_routes, recorded = _routes(source, live_record, row, len(rows))
                sums.add(number[key], layers, live_routes, recorded, worst=doubt.suspects[number[key]].layer)
    flat = sums.flat().to(device)
    if group is not None:
        torch.distributed.all_reduce(flat, group=group)
    agreement = Agreement.of(flat.cpu(), len(number), num_layers)
    if doubt.alike:
        agreement = Agreement(*(part.sum(0, keepdim=True).expand_as(part) for part in agreement.parts()))
    return [_judge(agreement, suspect, place) for place, suspect in enumerate(doubt.suspects)]


def refuse(doubt: FlipBoundError, findings: Sequence[SuspectFinding]) -> ReplayReport:
    """The report, when all suspects are in place: the router has moved. Raises `MisalignedError` when one is not.

    Or when something is wrong wherever the router has moved to.
    """
    wrong = [finding for finding in findings if not finding.in_place]
    if not wrong and doubt.certain is not None:
        raise doubt.certain
    if not wrong:
        return replace(doubt.report, moved=len(findings))
    listed = named([f"{finding.suspect}. {finding.words}" for finding in wrong])
    raise MisalignedError(
        f"{doubt.what}. Without replay, the live router does not agree with the recorded routes of "
        f"{len(wrong)} samples, so this is no router that has moved: rows or layers are misaligned, or the routes are "
        f"of other tokens or of far older weights:{listed}\n"
        "Nothing was trained on this update. Look for a defect of the engine's route recording (its version, "
        "its cache settings), and measure it with `moe-trm doctor`."
    )


def _routes(source: RouteSource, live_record: Recorded, row: int, rows: int) -> tuple[list[int], Routes, Routes]:
    """Layers, live and recorded routes of one row of a micro-batch."""
    if isinstance(source, ReplayRecords):
        record = source.records[row]
        if record is None:
            return [], _nothing, _nothing
        layers = [layer for layer in live_record.experts if layer in record.layer_ids]
        length, covered = record.num_rows, torch.from_numpy(record.coverage())

        def recorded(layer: int) -> Tensor:
            ids = torch.from_numpy(record.experts[:, record.layer_ids.index(layer)].astype(np.int64))
            return torch.where(covered[:, None], ids, -1)

    else:
        kept: Mapping[int, Tensor] = source.recorded.experts if hasattr(source, "recorded") else {}
        layers = [layer for layer in live_record.experts if layer in kept]
        length = 0 if not layers else _length(source.recorded, kept[layers[0]], rows)  # type: ignore[union-attr]

        def recorded(layer: int) -> Tensor:
            routes: Tensor = source.recorded.by_row(layer, rows, length)[row].cpu()  # type: ignore[union-attr]
            return routes

    def live(layer: int) -> Tensor:
        return live_record.by_row(layer, rows, length)[row].cpu()

    return layers, live, recorded


def _length(recorded: Recorded, experts: Tensor, rows: int) -> int:
    return len(experts) // rows if recorded.layout is None else recorded.layout.length


def _nothing(_layer: int) -> Tensor:
    return torch.zeros(0, 1, dtype=torch.int64)


def _agreement(live_routes: Tensor, theirs: Tensor) -> Tensor:
    """`[T, 2]` one and the share of experts in common for each token `[T, K]` that both sides have, else NaN."""
    is_known = (live_routes >= 0).all(1) & (theirs >= 0).all(1)
    share = (live_routes[:, :, None] == theirs[:, None, :]).any(-1).double().mean(1)
    share = torch.where(is_known, share, torch.nan)
    return torch.stack((torch.where(is_known, 1.0, torch.nan).double(), share), dim=1)


def _share(sums: Tensor) -> float:
    tokens, agreed = sums.tolist()
    return agreed / tokens if tokens else 0.0


def _judge(sums: Agreement, suspect: Suspect, place: int) -> SuspectFinding:
    here = sums.places[place, suspect.layer], sums.places[place].sum(0)
    chances = [_share(values[3]) for values in here]

    def relation(agreement: float, chance: float) -> float:
        return (agreement - chance) / (1 - chance) if chance < 1 else 1.0

    # The layer where the sample stands out decides, or all of them together.
    relations = [relation(_share(values[0]), chance) for values, chance in zip(here, chances, strict=True)]
    inside, scope = min((value, scope) for scope, value in enumerate(relations))
    chance = chances[scope]
    alternatives = {PLACES[shift]: _share(here[scope][shift]) for shift in (1, 2)}
    if scope == 0:
        layers = sums.layers[place]
        alternatives |= {
            f"of layer {layer_id}": _share(layers[layer_id])
            for layer_id in range(len(layers))
            if layer_id != suspect.layer
        }
    best = max(alternatives, key=lambda place_name: alternatives[place_name])
    words = (
        f"Recorded and live experts agree by {_share(here[scope][0]):.0%} in place, by {alternatives[best]:.0%} as "
        f"routes {best}, by {chance:.0%} at chance"
    )
    tokens, strangers = sums.strangers[place].tolist()
    elsewhere = relation(alternatives[best], chance)
    if inside < max(RELATED, elsewhere - RELATED):
        conclusion = f": these are the routes {best}" if elsewhere > max(0.5, inside) else ": they are unrelated"
        return SuspectFinding(suspect, False, words + conclusion)
    if tokens and strangers / tokens >= PART:
        return SuspectFinding(
            suspect, False, f"{words}, but {strangers:.0f} of {tokens:.0f} tokens disagree altogether"
        )
    return SuspectFinding(suspect, True, words)
