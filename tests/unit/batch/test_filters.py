from __future__ import annotations

from dataclasses import replace

import pytest

from moe_trm.batch.filters import reason_to_drop, reason_to_drop_sample
from moe_trm.config.schema import BatchConfig
from moe_trm.types import RolloutRecord
from tests.unit.advantages import of_samples
from tests.unit.records import make_record


def group(*rewards: float, overlong: tuple[int, ...] = ()) -> list[RolloutRecord]:
    return [
        replace(make_record(sample_id=i, reward=reward), finish_reason="length" if i in overlong else "stop")
        for i, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("records", "settings", "reason"),
    [
        (group(1, 1, 1), {}, None),
        (group(1, 1, 1), {"zero_variance": "drop"}, "zero_variance"),
        (group(1, 0, 1), {"zero_variance": "drop"}, None),
        (group(1), {"zero_variance": "drop"}, "zero_variance"),
        (group(1, 0, 1, overlong=(1,)), {"zero_variance": "drop"}, None),
        (group(1, 0, 1, overlong=(1,)), {"zero_variance": "drop", "overlong": "mask"}, None),
        (group(1, 0, 1, overlong=(1,)), {"zero_variance": "drop", "overlong": "drop"}, "zero_variance"),
        (group(1, 0, 1, overlong=(1,)), {"overlong": "drop"}, None),
        (group(1, 0, overlong=(0, 1)), {"overlong": "drop"}, "overlong"),
        ([], {}, "empty"),
    ],
)
def test_reasons_of_groups(records: list[RolloutRecord], settings: dict[str, str], reason: str | None) -> None:
    assert reason_to_drop(records, BatchConfig.model_validate(settings)) == reason


def test_only_drop_drops_a_sample() -> None:
    [cut] = group(0, overlong=(0,))
    reasons = [reason_to_drop_sample(cut, BatchConfig(overlong=policy)) for policy in ("keep", "drop", "mask")]
    assert reasons == [None, "overlong", None]


def test_a_masked_sample_has_no_advantage_and_leaves_the_others_theirs() -> None:
    records = group(1, 0, 1, overlong=(1,))
    masked, kept = (of_samples(records, "dr_grpo", batch={"overlong": overlong}) for overlong in ("mask", "keep"))
    assert [own[0] for [own] in kept] == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert [own[0] for [own] in masked] == pytest.approx([1 / 3, 0.0, 1 / 3])
