"""slime's hook on tensors as its caller hands them over: lists of responses, one flat loss, full loss masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_trm.adapters.slime import read_routes, tis_function
from moe_trm.corrections.plain import Rules, correct
from moe_trm.errors import ConfigError
from routing import RouteError, token_digest

ICEPOP: Rules = [("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"})]
LENGTHS = (4, 1, 3)


def call(**changes: Any) -> dict[str, Any]:
    """One token of the first answer is far off, one is a tool's, the second answer is one token.

    The third is far off as a whole.
    """
    gen = torch.Generator().manual_seed(0)
    rollout = [-torch.rand(length, generator=gen) for length in LENGTHS]
    learner = [part.clone() for part in rollout]
    learner[0][1] += 1.5
    learner[2] -= 0.4
    masks = [torch.ones(length, dtype=torch.int) for length in LENGTHS]
    masks[0][3] = 0
    learner[0][3] = float("nan")
    return {
        "args": None,
        "pg_loss": torch.randn(sum(LENGTHS), generator=gen, requires_grad=True),
        "train_log_probs": learner,
        "rollout_log_probs": rollout,
        "loss_masks": masks,
        "total_lengths": [length + 5 for length in LENGTHS],
        "response_lengths": list(LENGTHS),
    } | changes


def by_row(parts: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


RULES: dict[str, Any] = {
    "icepop": ICEPOP,
    "trm by row": [("trm_max", {"max_kl": 0.05, "ratio": "merged"})],
    "ln_trm": [("ln_trm", {"delta": 2.0, "max_score": 0.05, "ratio": "merged"})],
    "preset": "decoupled_k3_rs_token_tis",
    "two": [
        ("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"}),
        ("seq_mean_k3", {"upper": 0.05, "ratio": "merged"}),
    ],
}


@pytest.mark.parametrize("name", RULES)
def test_the_loss_of_each_token_gets_the_rules_weight(name: str) -> None:
    given = call()
    pg_loss, masks, metrics = tis_function(RULES[name])(**given)
    expected = correct(
        RULES[name],
        rollout_logprobs=by_row(given["rollout_log_probs"]),
        proximal_logprobs=by_row(given["train_log_probs"]),
        mask=by_row(given["loss_masks"]).bool(),
    )
    spans = [(row, slice(0, length)) for row, length in enumerate(LENGTHS)]
    weights = torch.cat([torch.where(expected.keep, expected.weights, 0.0)[span] for span in spans])
    torch.testing.assert_close(pg_loss, given["pg_loss"] * weights)
    assert all(one is other for one, other in zip(masks, given["loss_masks"], strict=True))
    torch.testing.assert_close(metrics["moe_trm/kept"], torch.cat([expected.keep[span] for span in spans]).float())
    assert all(value.shape == pg_loss.shape and not value.requires_grad for value in metrics.values())
    assert all(bool(value.isfinite().all()) for value in metrics.values())
    (gradient,) = torch.autograd.grad(pg_loss.sum(), given["pg_loss"])
    torch.testing.assert_close(gradient, weights)


def test_kept_and_dropped_tokens_worked_out() -> None:
    """Ratios of the first answer: 1, e^1.5, 1; its last token is a tool's. Of the third: e^-0.4 each."""
    pg_loss, _, metrics = tis_function(ICEPOP)(**call())
    assert metrics["moe_trm/kept"].tolist() == [1, 0, 1, 0, 1, 1, 1, 1]
    assert pg_loss[1] == pg_loss[3] == 0
    torch.testing.assert_close(metrics["moe_trm/weight"][5:], torch.full((3,), 0.67032))


def test_an_infinite_loss_of_a_dropped_token_does_no_harm() -> None:
    given = call()
    loss = given["pg_loss"].detach().clone()
    loss[1], loss[3] = float("inf"), float("nan")
    pg_loss, _, _ = tis_function(ICEPOP)(**given | {"pg_loss": loss})
    assert bool(pg_loss.isfinite().all())


def test_rules_that_read_what_slime_does_not_give_are_refused() -> None:
    with pytest.raises(ConfigError, match="whole minibatch"):
        tis_function([("m2po", {"budget": 0.04, "ratio": "merged"})])
    with pytest.raises(ConfigError, match="advantages"):
        tis_function([("opsm", {"delta": 0.01, "ratio": "merged"})])(**call())
    with pytest.raises(ConfigError, match="ratio=total"):
        tis_function([("trm_max", {"max_kl": 0.05})])(**call())
    engine: Rules = [("icepop", {"low": 0.5, "high": 2.0})]
    with pytest.raises(ConfigError, match="merged"):
        tis_function(engine)(**call())
    pg_loss, _, _ = tis_function(engine, fresh=True)(**call())
    assert torch.equal(pg_loss, tis_function(ICEPOP)(**call())[0])


@pytest.mark.parametrize("name", ["train_log_probs", "rollout_log_probs", "loss_masks"])
def test_parts_of_rows_are_refused(name: str) -> None:
    """As of a context-parallel rank, which has its own columns of the log-probs and whole loss masks."""
    given = call()
    with pytest.raises(ConfigError, match="context"):
        tis_function(ICEPOP)(**given | {name: [part[: len(part) // 2] for part in given[name]]})
    with pytest.raises(ConfigError):
        tis_function(ICEPOP)(**given | {name: given[name][:2]})


def test_log_probs_that_are_not_handed_over_are_refused() -> None:
    """miles calls its hook without them where it has scored nothing."""
    with pytest.raises(ConfigError, match="train_log_probs"):
        tis_function(ICEPOP)(**call(train_log_probs=None))


T, D, K, E, LAYERS = 6, 4, 2, 8, (1, 3)
TOKENS = np.arange(T) + 100


def routes() -> np.ndarray:
    found = np.argsort(np.random.default_rng(0).random((T - 1, D, E)), axis=-1)[..., :K].astype(np.int32)
    found[:, [0, 2]] = 0
    return found


@pytest.mark.parametrize("form", ["tensor", "array", "lists"])
def test_routes_of_a_sample_are_read(form: str) -> None:
    given: Any = {"tensor": torch.from_numpy(routes()), "array": routes(), "lists": routes().tolist()}[form]
    record = read_routes(given, tokens=TOKENS.tolist(), num_layers=D, layer_ids=LAYERS, num_experts=E, top_k=K)
    np.testing.assert_array_equal(record.experts, routes()[:, list(LAYERS)])
    assert record.token_digest == token_digest(TOKENS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("missing", "payload"),
        ("ragged", "payload"),
        ("padded to all tokens", "rows"),
        ("a layer of zeros", "duplicate"),
        ("negative", "range"),
        ("floats", "dtype"),
        ("moe layers alone", "shape"),
    ],
)
def test_malformed_routes_are_refused(change: str, reason: str) -> None:
    given: Any = routes()
    if change == "missing":
        given = None
    elif change == "ragged":
        given = [[[0, 1]], [[0]]]
    elif change == "padded to all tokens":
        given = np.concatenate([given, given[-1:]])
    elif change == "a layer of zeros":
        given[:, 3] = 0
    elif change == "negative":
        given[1, 1, 0] = -1
    elif change == "floats":
        given = given.astype(np.float32)
    elif change == "moe layers alone":
        given = given[:, list(LAYERS)]
    with pytest.raises(RouteError) as error:
        read_routes(given, tokens=TOKENS, num_layers=D, layer_ids=LAYERS, num_experts=E, top_k=K)
    assert error.value.reason == reason
