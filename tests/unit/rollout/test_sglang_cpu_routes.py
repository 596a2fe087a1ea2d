"""The CPU support package gathers and sends the routes of a request as SGLang does, id by id, without its pickle."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.routes import wrap_gathering

SLOTS, LAYERS, TOP_K = 40, 3, 2


def capturer(dtype: torch.dtype = torch.int32) -> Any:
    ids = torch.arange(SLOTS * LAYERS * TOP_K, dtype=dtype).view(SLOTS, LAYERS, TOP_K)
    return SimpleNamespace(host_cache=SimpleNamespace(buffer=ids))


def pool() -> Any:
    """Places of the tokens of four requests in the cache, in no order."""
    places = torch.stack([torch.randperm(SLOTS, generator=torch.Generator().manual_seed(row)) for row in range(4)])
    return SimpleNamespace(req_to_token=places.to(torch.int32))


def of_sglang(capturer: Any, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Any:
    """`BaseTopkCapturer.get_topk` of SGLang 0.5.23."""
    if start_len < 0:
        raise ValueError(f"{start_len=} must be non-negative")
    start_len = min(start_len, seqlen - 1)
    places = req_to_token_pool.req_to_token[req_pool_idx][start_len : seqlen - 1].cpu().clone()
    return capturer.host_cache.buffer[places]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@pytest.mark.parametrize(("length", "start"), [(17, 0), (17, 5), (17, 16), (17, 20), (2, 0), (1, 0)])
def test_the_routes_of_a_request_are_those_of_its_places(length: int, start: int, dtype: torch.dtype) -> None:
    """From the first row, from a later one, and none at all, where the request begins behind the end."""
    arguments = capturer(dtype), 2, length, pool(), start
    found, wanted = wrap_gathering(of_sglang)(*arguments), of_sglang(*arguments)
    assert found.shape == wanted.shape == (max(length - 1 - start, 0), LAYERS, TOP_K)
    assert found.numpy().data.tobytes() == wanted.numpy().tobytes()
    sent = pickle.loads(pickle.dumps(found))
    assert (type(sent), sent.dtype, sent.shape) == (torch.Tensor, dtype, wanted.shape)
    assert torch.equal(sent, wanted)
    assert sent.numpy().tobytes() == wanted.numpy().tobytes()


def test_gathered_routes_are_a_copy() -> None:
    """The next request takes the places of this one before this one's answer is sent."""
    source, places = capturer(), pool()
    found, wanted = (gather(source, 0, 9, places) for gather in (wrap_gathering(of_sglang), of_sglang))
    source.host_cache.buffer.zero_()
    assert torch.equal(pickle.loads(pickle.dumps(found)), wanted)


def test_what_is_written_between_two_requests_is_gathered() -> None:
    """Into the buffers that were read before, and of other buffers."""
    gather, source, places = wrap_gathering(of_sglang), capturer(), pool()
    for other in (False, True):
        for number in range(3):
            arguments = source, number, 9, places
            assert torch.equal(pickle.loads(pickle.dumps(gather(*arguments))), of_sglang(*arguments))
            source.host_cache.buffer.add_(1)
            places.req_to_token.copy_(places.req_to_token.flip(1))
        if not other:
            source, places = capturer(), pool()
            source.host_cache.buffer.mul_(2)


def test_no_storage_is_pickled() -> None:
    """SGLang's own way: a tensor within a tensor's storage, pickled twice."""
    packed = pickle.dumps(wrap_gathering(of_sglang)(capturer(), 0, 9, pool()))
    assert b"storage" not in packed
    assert b"storage" in pickle.dumps(of_sglang(capturer(), 0, 9, pool()))


def test_a_wrong_start_is_refused_by_sglang() -> None:
    with pytest.raises(ValueError, match="must be non-negative"):
        wrap_gathering(of_sglang)(capturer(), 0, 9, pool(), -1)
