"""Masks that the engine's own figures refute are rejected, whatever weights sampled them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_trm.config.schema import Config
from moe_trm.errors import RecordRejected
from moe_trm.rollout.kept_sets import check_kept_sets, sampler_bounds
from moe_trm.types import RolloutRecord
from tests.unit.records import make_record


def check(record: RolloutRecord, **rollout: object) -> None:
    config = Config.model_validate({"model": {"checkpoint": "none"}, "rollout": {"top_p": 0.85, **rollout}})
    check_kept_sets(record, sampler_bounds(config.rollout, config.sampling_mask))


def with_mass(mass: float) -> RolloutRecord:
    record = make_record()
    full = record.rollout_logprobs.copy()
    full[2] += np.log(mass)
    return replace(record, full_logprobs=full)


def test_what_the_settings_leave_is_accepted() -> None:
    for mass in (0.85, 0.99, 1.0, 1.001, float("nan")):
        check(with_mass(mass))


@pytest.mark.parametrize("mass", [18.0, 1.05, 0.7])
def test_a_mass_above_one_or_below_top_p_is_rejected(mass: float) -> None:
    with pytest.raises(RecordRejected, match="position 2") as rejected:
        check(with_mass(mass))
    assert rejected.value.reason == "mask_mass"


def test_a_set_that_top_k_or_min_p_cuts_may_have_less() -> None:
    check(with_mass(0.7), top_k=3)
    check(with_mass(0.7), min_p=0.1)
    with pytest.raises(RecordRejected, match="a probability"):
        check(with_mass(18.0), top_k=3)


def test_more_ids_than_top_k_are_rejected() -> None:
    with pytest.raises(RecordRejected, match="more ids than top_k") as rejected:
        check(make_record(), top_k=2)
    assert rejected.value.reason == "mask_size"


def test_without_a_mask_the_record_is_rejected() -> None:
    with pytest.raises(RecordRejected) as rejected:
        check(replace(make_record(), sampling_mask=None))
    assert rejected.value.reason == "mask_missing"
