"""Packs in hybrid models of transformers: no state goes on from one sequence into the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm.errors import LearnerError
from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.registry import FAMILIES
from moe_trm.models.tiny.families import COMMON, make_family

HYBRIDS = tuple(name for name, family in FAMILIES.items() if "gated delta" in family.attention_kinds(COMMON))
LENGTHS = (5, 70, 3, 1, 6)
"""One sequence is longer than a chunk of the delta rule, and one has a token."""


def hidden(causal: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = causal.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state
    return found


def test_which_families_have_states() -> None:
    assert HYBRIDS == ("qwen3_next", "qwen3_5_moe")


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_sequence_of_a_pack_is_computed_as_if_it_were_alone(tmp_path: Path, family: str) -> None:
    checkpoint = HfCheckpoint(make_family(family, tmp_path))
    packed = load_policy(checkpoint, "float32", recompute=False, packed=True).causal
    plain = load_policy(checkpoint, "float32", recompute=False).causal
    ids = torch.randint(3, 128, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    got = hidden(packed, ids, position_ids=positions, sequence_lengths=LENGTHS)
    for own, sequence in zip(got.split(LENGTHS, 1), ids.split(LENGTHS, 1), strict=True):
        torch.testing.assert_close(own, hidden(plain, sequence), rtol=0, atol=2e-4)
    # What transformers alone makes of a pack: the state of the sequence before is in the next one.
    leaking = hidden(plain, ids, position_ids=positions)
    assert float((leaking - got)[0, LENGTHS[0] :].abs().max()) > 0.1
    with pytest.raises(LearnerError, match="not told of the sequences"):
        hidden(packed, ids, position_ids=positions, sequence_lengths=LENGTHS[:-1])
