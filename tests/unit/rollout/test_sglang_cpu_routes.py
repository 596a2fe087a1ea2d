"""The CPU support package keeps, gathers and sends routes as SGLang does, id by id, in fewer copies, not its pickle."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.routes import begin, forget, wrap_end, wrap_gathering

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


class Recorder:
    """`BaseTopkCapturer` of SGLang 0.5.23, as far as it records a pass."""

    def __init__(self) -> None:
        self.topk_size = TOP_K
        self.host_cache = capturer().host_cache
        self.device_cache = torch.full((16, LAYERS, TOP_K), -1, dtype=torch.int32)
        self.told: list[int] = []

    def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
        self.told.append(layer_id)
        self.device_cache[: len(topk_indices), layer_id, :] = topk_indices

    def on_forward_end(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> str | None:
        slots = forward_batch.out_cache_loc_virtual
        slots = forward_batch.out_cache_loc if slots is None else slots
        if no_copy_to_cpu:
            return "later"
        self.host_cache.buffer[slots] = self.device_cache[: len(slots), :, : self.topk_size]
        return None


def batch(num_tokens: int, *, virtual: bool = False) -> Any:
    """A pass whose tokens are at places of no order. With `virtual`, the ones that attention sees are others."""
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(num_tokens))[:num_tokens]
    if virtual:
        return SimpleNamespace(out_cache_loc=slots.flip(0) + 1000, out_cache_loc_virtual=slots)
    return SimpleNamespace(out_cache_loc=slots, out_cache_loc_virtual=None)


def choices(num_tokens: int, layers: int = LAYERS, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(num_tokens, 9, generator=generator).topk(TOP_K)[1] for _ in range(layers)]


def end(recorder: Recorder, forward_batch: Any, **options: bool) -> Any:
    return wrap_end(Recorder.on_forward_end)(recorder, forward_batch, False, None, **options)


def recorded(passes: list[tuple[list[torch.Tensor], Any]]) -> Recorder:
    """By SGLang, layer by layer."""
    recorder = Recorder()
    for chosen, forward_batch in passes:
        for number, ids in enumerate(chosen):
            recorder.capture(number, ids)
        recorder.on_forward_end(forward_batch, False, None)
    return recorder


@pytest.mark.parametrize("virtual", [False, True])
def test_choices_that_wait_are_kept_as_sglang_keeps_them(virtual: bool) -> None:
    """Of many tokens and of one, over those of passes before."""
    recorder = Recorder()
    passes = [(choices(tokens, seed=tokens), batch(tokens, virtual=virtual)) for tokens in (12, 1, 7)]
    for chosen, forward_batch in passes:
        waiting = begin(recorder)
        assert waiting == []
        waiting.extend(chosen)
        assert end(recorder, forward_batch) is None
    wanted = recorded(passes).host_cache.buffer
    assert recorder.host_cache.buffer.dtype == wanted.dtype
    assert torch.equal(recorder.host_cache.buffer, wanted)
    assert not recorder.told, "no other copy"


@pytest.mark.parametrize(
    ("chosen", "options"),
    [(choices(5, layers=LAYERS - 1), {}), (choices(4), {}), (choices(5), {"no_copy_to_cpu": True})],
    ids=["a layer without choices", "another number of tokens", "a copy for later"],
)
def test_choices_of_an_unusual_pass_are_given_to_sglang(chosen: list[torch.Tensor], options: dict[str, bool]) -> None:
    recorder = Recorder()
    begin(recorder).extend(chosen)
    assert end(recorder, batch(5), **options) == ("later" if options else None)
    assert recorder.told == [*range(len(chosen))]
    if not options:
        assert torch.equal(recorder.host_cache.buffer, recorded([(chosen, batch(5))]).host_cache.buffer)


def test_a_pass_of_other_layers_is_sglangs() -> None:
    """Nothing waits: choices of a pass that failed are dropped, and those of a pass are kept once."""
    recorder = Recorder()
    begin(recorder).extend(choices(5))
    forget(recorder)
    for chosen in (choices(5, seed=1), choices(5, seed=2)):
        for number, ids in enumerate(chosen):
            recorder.capture(number, ids)
        end(recorder, batch(5))
        assert torch.equal(recorder.host_cache.buffer, recorded([(chosen, batch(5))]).host_cache.buffer)
        begin(recorder).extend(choices(3, seed=3))
        end(recorder, batch(3))
        recorder.host_cache.buffer.copy_(capturer().host_cache.buffer)


def test_without_a_recorder_nothing_waits() -> None:
    forget(None)
    assert begin(None) is None
