"""The CPU support package leaves out, at the end of a pass, only what would do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.results import wrap_finish, wrap_handling, wrap_sending


def request(**other: Any) -> SimpleNamespace:
    """A request that goes on, but for `other`; `params.NAME` is a sampling parameter."""
    params = {
        "ignore_eos": False,
        "stop_token_ids": {7},
        "stop_strs": [],
        "stop_regex_strs": [],
        "max_new_tokens": 8,
        **{name.removeprefix("params."): value for name, value in other.items() if name.startswith("params.")},
    }
    plain = {
        "finished_reason": None,
        "to_finish": None,
        "grammar": None,
        "output_ids": [3, 4],
        "vocab_size": 100,
        "eos_token_ids": {2},
        "tokenizer": SimpleNamespace(eos_token_id=1, additional_stop_token_ids={9}),
        "rid": "a",
        "stream": False,
        "beam_group": None,
        "kv": SimpleNamespace(mamba_ping_pong_track_buffer=None),
    }
    own = {name: value for name, value in other.items() if not name.startswith("params.")}
    return SimpleNamespace(**{**plain, **own}, sampling_params=SimpleNamespace(**params))


PLAIN = SimpleNamespace(customized_info=None)
"""The output of a pass about which a request has nothing to say."""
MAY_END: list[dict[str, Any]] = [
    {"finished_reason": "length"},
    {"to_finish": "abort"},
    {"grammar": object()},
    *({"output_ids": [3, token]} for token in (7, 2, 1, 9, -1, 100)),
    {"output_ids": list(range(20, 28))},
    {"output_ids": list(range(20, 30))},
    {"params.stop_strs": ["x"]},
    {"params.stop_regex_strs": ["x"]},
]


@pytest.mark.parametrize("other", MAY_END)
def test_a_request_that_may_end_is_asked_by_sglang(other: dict[str, Any]) -> None:
    asked = []
    update = wrap_finish(lambda *arguments: asked.append(arguments))
    req = request(**other)
    update(req)
    assert asked == [(req, 1)]


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"tokenizer": None},
        {"eos_token_ids": None, "params.stop_token_ids": None},
        {"tokenizer": SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None)},
        {"vocab_size": None, "output_ids": [1000]},
        {"params.ignore_eos": True, "output_ids": [2]},
    ],
)
def test_a_request_that_goes_on_is_not_asked_unless_it_has_several_new_tokens(other: dict[str, Any]) -> None:
    asked = []
    update = wrap_finish(lambda *arguments: asked.append(arguments))
    req = request(**other)
    update(req)
    assert not asked
    update(req, 2)
    assert asked == [(req, 2)]


def test_the_tokens_that_end_a_request_are_its_own() -> None:
    asked = []
    update = wrap_finish(lambda *arguments: asked.append(arguments[0]))
    several = [request(**{"params.stop_token_ids": {token}}) for token in (3, 4, 5)]
    for _ in range(2):
        for req in several:
            update(req)
    assert asked == [several[1]] * 2


@pytest.mark.parametrize(
    ("own", "batch", "processor", "output"),
    [
        ({"finished_reason": "stop"}, None, None, PLAIN),
        ({"kv": SimpleNamespace(mamba_ping_pong_track_buffer=[1])}, None, None, PLAIN),
        ({}, [True], None, PLAIN),
        ({}, None, object(), PLAIN),
        ({}, None, None, SimpleNamespace(customized_info={"a": [1]})),
        ({}, None, None, None),
    ],
)
def test_what_is_more_to_do_for_a_request_is_done(own: dict[str, Any], batch: Any, processor: Any, output: Any) -> None:
    done = []
    handle = wrap_handling(lambda *arguments: done.append(arguments))

    def handled(req: Any, batch: Any, processor: Any, logits: Any) -> None:
        of_batch = SimpleNamespace(mamba_track_mask_cpu=batch)
        handle(SimpleNamespace(decode_offload_manager=processor), req, of_batch, "result", 3, logits)

    handled(request(), None, None, PLAIN)
    assert not done
    req = request(**own)
    handled(req, batch, processor, output)
    [(_, *others)] = done
    assert [others[0], *others[2:]] == [req, "result", 3, output]


def test_only_requests_with_something_to_send_are_sent() -> None:
    sent = []
    send = wrap_sending(lambda *arguments: sent.append(arguments), every=5)
    plain = SimpleNamespace(has_additional_customized_info=False, send_to_detokenizer=None)
    silent = [request(), request(output_ids=[1, 2, 3])]
    send(plain, silent, True)
    assert not sent
    heard = [
        request(finished_reason="stop"),
        request(stream=True),
        request(beam_group=object()),
        request(output_ids=[1] * 5),
    ]
    send(plain, [silent[0], *heard, silent[1]], True, heard[0])
    send(plain, silent, False, None, True)
    send(SimpleNamespace(has_additional_customized_info=True), silent, False)
    assert [arguments[1:] for arguments in sent] == [
        (heard, True, heard[0]),
        (silent, False, None, True),
        (silent, False, None, False),
    ]
