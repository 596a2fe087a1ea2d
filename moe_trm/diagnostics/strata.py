"""Kept rows by length, by sign of the advantage and by other classes. Shape letters: B sequences, T tokens."""

from __future__ import annotations

from torch import Tensor

from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.rows import num_tokens, row_sum
from moe_trm.methods import summable

LENGTH_EDGES = (16, 64, 256, 1024, 4096, 16384)


def acceptance(evidence: Evidence, correction: Correction) -> summable.Summable:
    """Share of rows that lost no token, by class of row; and share of kept tokens by turn.

    | name | rows |
    |---|---|
    | `acceptance/length_1_16`, `acceptance/length_17_64`, ..., `acceptance/length_16385_up` | by sampled tokens |
    | `acceptance/positive`, `acceptance/negative`, `acceptance/zero` | by sign of the row's summed advantage |
    | `acceptance/correct`, `acceptance/wrong` | reward above the mean of its group, or below |
    | `acceptance/multi_turn` | rows with several turns, where turns are known |
    | `acceptance/first_turn_tokens`, `acceptance/later_turn_tokens` | share of *tokens* kept, first turn and later |

    Right and wrong follow the reward's own scale, so partial credit is neither by itself; rows of a group with equal
    rewards are in neither class.

    The edges are fixed, so that counts of different batches may be added. A rule that is neutral to length has about
    the same share everywhere.
    """
    mask = evidence.mask
    lengths, intact = num_tokens(mask), (correction.keep | ~mask).all(dim=1)
    advantage = row_sum(evidence.advantages.detach().float(), mask)
    nonempty = lengths > 0
    strata: dict[str, Tensor] = {
        "positive": nonempty & (advantage > 0),
        "negative": nonempty & (advantage < 0),
        "zero": nonempty & (advantage == 0),
    }
    low = 1
    for high in LENGTH_EDGES:
        strata[f"length_{low}_{high}"] = (lengths >= low) & (lengths <= high)
        low = high + 1
    strata[f"length_{low}_up"] = lengths >= low
    if evidence.rewards is not None and evidence.group_means is not None:
        gain = evidence.rewards - evidence.group_means
        strata |= {"correct": nonempty & (gain > 0), "wrong": nonempty & (gain < 0)}
    tokens: dict[str, Tensor] = {}
    if evidence.turn_ids is not None:
        later = mask & (evidence.turn_ids > 0)
        strata["multi_turn"] = later.any(dim=1)
        tokens = {"first_turn_tokens": mask & ~later, "later_turn_tokens": later}
    by_token = [summable.fraction(f"acceptance/{name}", correction.keep, stratum) for name, stratum in tokens.items()]
    by_row = [summable.fraction(f"acceptance/{name}", intact, rows) for name, rows in strata.items()]
    return summable.add(by_row + by_token)
