"""The counts of a proof over all ranks, in one exchange for a usual micro-batch and two for a large one.

A rank tells all others its counters and, for each of its samples, what was due, flipped and lost in each of its MoE
layers, and how many tokens disagree with their routes. Other ranks may have the same samples (other layers, other
columns) and others. Everything is a whole number, so sums are exact.

Shape letters: S samples, L decoder layers, G ranks, W words that a rank sends.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from routing.judge import answer_agreement
from routing.judge.end_agreement import SHAPE
from routing.judge.sample_flips import SampleFlips, summed
from routing.judge.token_agreement import Disagreement

ROOM = 1 << 11
"""Words of the first exchange: 100 samples in four layers. A rank with more sends the rest in a second one."""


def over_ranks(
    sums: Tensor, flips: SampleFlips, group: ProcessGroup | None, device: torch.device
) -> tuple[Tensor, SampleFlips]:
    """The sum over all ranks of `sums`, int64 of one shape on the CPU, and the counts of all their samples.

    Args:
        sums: of this rank.
        flips: of this rank, of the same number of layers on all of them. A sample may stand there several times.
        group: ranks to sum over (collective); None for this process alone.
        device: where the collectives of `group` work.
    """
    if group is None or group.size() == 1:
        return sums, summed(flips)
    num_layers = flips.due.shape[1]
    tables = _exchanged(_written(sums, flips), group, device)
    counters, all_flips = zip(*(_read(words, sums.numel(), num_layers) for words in tables), strict=True)
    total = torch.from_numpy(np.sum(counters, axis=0)).view(sums.shape)
    return total, summed(
        SampleFlips(
            np.concatenate([rank_flips.keys for rank_flips in all_flips]),
            np.concatenate([rank_flips.due for rank_flips in all_flips]),
            np.concatenate([rank_flips.flipped for rank_flips in all_flips]),
            np.concatenate([rank_flips.lost for rank_flips in all_flips]),
            np.sum([rank_flips.apart for rank_flips in all_flips], axis=0),
            np.sum([rank_flips.ends for rank_flips in all_flips], axis=0),
            np.sum([rank_flips.answers for rank_flips in all_flips], axis=0),
            Disagreement(
                *(np.concatenate(part) for part in zip(*(rank_flips.by_token for rank_flips in all_flips), strict=True))
            ),
            np.concatenate([rank_flips.fresh for rank_flips in all_flips]),
        )
    )


def _written(sums: Tensor, flips: SampleFlips) -> np.ndarray:
    """`[W]` int64: its own length, samples, layers, the counters, the layers' counts and ids, and those of samples."""
    layers = np.flatnonzero(flips.due.any(0))
    tables = np.stack([flips.due, flips.flipped, flips.lost])[..., layers]
    rows = np.stack([flips.keys, *flips.by_token, flips.fresh])
    words = np.concatenate(
        [
            [0, len(flips.keys), len(layers)],
            sums.flatten().numpy(),
            layers,
            flips.apart[layers].ravel(),
            flips.ends.ravel(),
            flips.answers.ravel(),
            rows.ravel(),
            tables.ravel(),
        ]
    )
    words[0] = len(words)
    return words


def _read(words_W: np.ndarray, num_sums: int, num_layers: int) -> tuple[np.ndarray, SampleFlips]:
    """The counters of a rank, and its samples."""
    _, samples, layers = words_W[:3].tolist()
    ids_at = 3 + num_sums
    apart_at, ends_at = ids_at + layers, ids_at + 3 * layers
    answers_at = ends_at + prod(SHAPE)
    rows_at = answers_at + prod(answer_agreement.SHAPE)
    tables_at = rows_at + 8 * samples
    layers_here = words_W[ids_at:apart_at]
    apart_L2 = np.zeros((num_layers, 2), np.int64)
    apart_L2[layers_here] = words_W[apart_at:ends_at].reshape(layers, 2)
    ends = words_W[ends_at:answers_at].reshape(SHAPE)
    answers = words_W[answers_at:rows_at].reshape(answer_agreement.SHAPE)
    keys, *by_token, fresh = words_W[rows_at:tables_at].reshape(8, samples)
    tables = np.zeros((3, samples, num_layers), np.int64)
    tables[..., layers_here] = words_W[tables_at:].reshape(3, samples, layers)
    due_SL, flipped, lost = tables
    judged = apart_L2, ends, answers, Disagreement(*by_token), fresh.astype(bool)
    return words_W[3:ids_at], SampleFlips(keys, due_SL, flipped, lost, *judged)


def _exchanged(words_W: np.ndarray, group: ProcessGroup, device: torch.device) -> list[np.ndarray]:
    """The words of every rank. Each begins with their number."""
    gathered = _gathered(words_W[:ROOM], ROOM, group, device)
    longest = int(gathered[:, 0].max())
    if longest > ROOM:
        # Every rank has read the same numbers, so every rank comes here.
        gathered = np.concatenate([gathered, _gathered(words_W[ROOM:], longest - ROOM, group, device)], axis=1)
    return [words[: words[0]] for words in gathered]


def _gathered(words: np.ndarray, room: int, group: ProcessGroup, device: torch.device) -> np.ndarray:
    """`[G, room]`, zeros behind the words of each rank."""
    padded = torch.zeros(room, dtype=torch.int64)
    padded[: len(words)] = torch.from_numpy(words)
    gathered = torch.empty(group.size(), room, dtype=torch.int64, device=device)
    group.allgather([list(gathered.unbind())], [padded.to(device)]).wait()
    return gathered.cpu().numpy()
