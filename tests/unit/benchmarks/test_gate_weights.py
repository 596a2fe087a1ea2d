"""Gate weights from elsewhere, put in behind the proof of the ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.engines.hf import HFScorer
from benchmarks.engines.scored import Setting, Text
from benchmarks.gate_weights import with_gate_weights
from moe_trm.errors import MoeTrmError
from moe_trm.models.tiny.checkpoint import make_checkpoint


def test_the_experts_are_given_the_weights_of_their_ids(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    scorer = HFScorer(Setting("hf", tmp_path, "float32", 1))
    text = Text(np.arange(5, 25, dtype=np.int32), np.arange(20) >= 8, 0)
    [own] = scorer.score([text])
    assert own.weights is not None
    # As an engine tells them: the same sets, in another order.
    told = {
        layer: (
            torch.from_numpy(own.routes.experts[:, n].astype(np.int64)).flip(1),
            torch.from_numpy(own.weights[:, n]).flip(1),
        )
        for n, layer in enumerate(own.routes.layer_ids)
    }
    with with_gate_weights(scorer.model, told):
        [same] = scorer.score([text], [own.routes])
    np.testing.assert_allclose(same.logprobs, own.logprobs, atol=1e-5)
    uneven = {
        layer: (ids, weights * torch.tensor([1.2] + [0.8] * (ids.shape[1] - 1)))
        for layer, (ids, weights) in told.items()
    }
    with with_gate_weights(scorer.model, uneven):
        [other] = scorer.score([text], [own.routes])
    assert np.abs(other.logprobs - own.logprobs).max() > 1e-3
    wrong = {layer: ((ids + 1) % scorer.model.config.num_experts, weights) for layer, (ids, weights) in told.items()}
    with with_gate_weights(scorer.model, wrong), pytest.raises(MoeTrmError, match="other experts"):
        scorer.score([text], [own.routes])
