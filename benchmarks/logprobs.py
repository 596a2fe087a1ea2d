"""Log-probs that never hold `[T, V]`: time and extra memory against the plain way, forward and backward.

`python -m benchmarks.logprobs --json FILE`. The plain way: logits, log-softmax, gather (for masks: the ids outside
filled with -inf). Plain and ours alternate, and the time ratio is the median over pairs. Extra memory is the peak
beyond inputs and gradients. The longest rows run ours alone, to show that memory does not follow the number of tokens.
The last rows weigh encoded masks against their entropy. Shape letters: T tokens, V vocabulary, H hidden size, M kept
ids.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from benchmarks.masks import entropy_bits_per_token, published_sizes, synthetic_mask
from benchmarks.options import command_line
from benchmarks.peak import forget_peak, status_bytes
from benchmarks.table import Row, report
from moe_trm.sampling_mask.codec import encode
from moe_trm.sampling_mask.dense import full_logprobs
from moe_trm.sampling_mask.logprobs import masked_logprobs, masked_logprobs_and_kl

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """Inputs of one size: `hidden` `[T, H]`, `weight` `[V, H]`, `target` and `slope` `[T]`.

    `slope` is the gradient of the loss with respect to the log-probs.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor
    kept_ids: Tensor
    kept_offsets: Tensor
    slope: Tensor


Way = Callable[[Case], Tensor]


def plain_full(case: Case) -> Tensor:
    logits_TV = case.hidden @ case.weight.T
    return logits_TV.log_softmax(-1).gather(1, case.target[:, None])[:, 0]


def plain_masked(case: Case) -> Tensor:
    logits_TV = case.hidden @ case.weight.T
    row = torch.repeat_interleave(case.kept_offsets.diff())
    allowed_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
    allowed_TV[row, case.kept_ids] = True
    return logits_TV.masked_fill(~allowed_TV, -torch.inf).log_softmax(-1).gather(1, case.target[:, None])[:, 0]


def our_full(case: Case) -> Tensor:
    return full_logprobs(case.hidden, case.weight, case.target)


def our_masked(case: Case) -> Tensor:
    return masked_logprobs(case.hidden, case.weight, case.target, case.kept_ids, case.kept_offsets)


def our_masked_with_kl(case: Case) -> Tensor:
    mu = torch.repeat_interleave(-case.kept_offsets.diff().float().log(), case.kept_offsets.diff())
    return masked_logprobs_and_kl(case.hidden, case.weight, case.target, case.kept_ids, case.kept_offsets, mu)[0]


WAYS: dict[str, tuple[Way, Way]] = {"full": (plain_full, our_full), "masked": (plain_masked, our_masked)}


def make_case(num_tokens: int, weight_VH: Tensor, seed: int) -> Case:
    """Random hidden states and kept sets of the published shape."""
    gen = torch.Generator().manual_seed(seed)
    mask, sampled = synthetic_mask(published_sizes(num_tokens, seed, largest=len(weight_VH) // 2), len(weight_VH), seed)
    hidden = torch.randn(num_tokens, weight_VH.shape[1], generator=gen)
    tensors = [
        hidden,
        torch.from_numpy(sampled.astype(np.int64)),
        torch.from_numpy(mask.ids.astype(np.int64)),
        torch.from_numpy(mask.offsets),
        torch.randn(num_tokens, generator=gen),
    ]
    hidden, target, ids, offsets, slope = (tensor.to(weight_VH.device) for tensor in tensors)
    return Case(hidden.requires_grad_(), weight_VH, target, ids, offsets, slope)


def measure(way: Way, case: Case, *, backward: bool) -> tuple[float, float]:
    """Seconds, and MiB at the peak beyond what was there before and the gradients."""
    case.hidden.grad = case.weight.grad = None
    gc.collect()
    memory = Memory(case.weight.device)
    started = time.perf_counter()
    with torch.set_grad_enabled(backward):
        value = way(case)
        if backward:
            (value * case.slope).sum().backward()  # type: ignore[no-untyped-call]
    memory.synchronize()
    seconds = time.perf_counter() - started
    gradients = sum(tensor.grad.nbytes for tensor in (case.hidden, case.weight) if tensor.grad is not None)
    return seconds, max(0.0, memory.peak_bytes() - gradients) / MIB


class Memory:
    """The highest memory use since this was made: of the device's allocator, or of this process (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._start_bytes = torch.cuda.memory_allocated(device)
        else:
            # Memory that was freed but not given back would hide what is taken from it again.
            ctypes.CDLL(None).malloc_trim(0)
            self._start_bytes = forget_peak()

    def synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        return (torch.cuda.max_memory_allocated() if self._cuda else status_bytes("VmHWM")) - self._start_bytes


def paired(kind: str, num_tokens: int, weight_VH: Tensor, repeats: int) -> Row:
    """Plain against ours, forward and backward."""
    plain, ours = WAYS[kind]
    case = make_case(num_tokens, weight_VH, seed=num_tokens)
    pairs = [(measure(plain, case, backward=True), measure(ours, case, backward=True)) for _ in range(repeats)]
    seconds = [(plain_value[0], our_value[0]) for plain_value, our_value in pairs]
    megabytes = [(plain_value[1], our_value[1]) for plain_value, our_value in pairs]
    return {
        "kind": kind,
        "tokens": num_tokens,
        "plain_s": median(plain_value for plain_value, _ in seconds),
        "ours_s": median(our_value for _, our_value in seconds),
        "time_ratio": median(our_value / plain_value for plain_value, our_value in seconds),
        "plain_mib": median(plain_value for plain_value, _ in megabytes),
        "ours_mib": median(our_value for _, our_value in megabytes),
        "memory_ratio": median(our_value / plain_value for plain_value, our_value in megabytes),
    }


def ours_only(kind: str, way: Way, num_tokens: int, weight_VH: Tensor, *, backward: bool) -> Row:
    """Ours without the plain way, which would not fit."""
    case = make_case(num_tokens, weight_VH, seed=num_tokens)
    seconds, megabytes = measure(way, case, backward=backward)
    return {
        "kind": kind,
        "tokens": num_tokens,
        "ours_s": seconds,
        "ms_per_1k_tokens": seconds * 1e6 / num_tokens,
        "ours_mib": megabytes,
    }


def codec_row(num_tokens: int, vocab_size: int) -> Row:
    """Encoded kept ids against the entropy of the sets given the sampled tokens."""
    sizes = published_sizes(num_tokens, seed=3, largest=vocab_size // 2)
    mask, sampled = synthetic_mask(sizes, vocab_size, seed=3)
    encoded = len(encode(mask, sampled, vocab_size)) / num_tokens
    entropy = entropy_bits_per_token(sizes, vocab_size) / 8
    return {
        "kind": "codec",
        "tokens": num_tokens,
        "size_mean": float(sizes.mean()),
        "size_median": float(np.median(sizes)),
        "size_p99": float(np.quantile(sizes, 0.99)),
        "singletons": float((sizes == 1).mean()),
        "bytes_per_token": encoded,
        "entropy_bytes_per_token": entropy,
        "codec_ratio": encoded / entropy,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary size V (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size H (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1024, 2048], help="T of the paired rows (default: %(default)s)"
    )
    parser.add_argument(
        "--alone",
        type=int,
        nargs="*",
        default=[4096, 8192],
        help="T of full log-probs without the plain way, forward only (default: %(default)s)",
    )
    parser.add_argument(
        "--longest",
        type=int,
        nargs="*",
        default=[8192, 32768],
        help="T of masked log-probs without the plain way (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=2, help="pairs per row (default: %(default)s)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda (default: cuda where there is one)",
    )
    options = parser.parse_args(argv)
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(options.vocab, options.hidden, generator=gen).mul_(0.02).to(options.device).requires_grad_()
    rows = [paired(kind, n, weight, options.repeats) for n in options.tokens for kind in WAYS]
    rows += [ours_only("full, forward", our_full, n, weight, backward=False) for n in options.alone]
    rows += [ours_only("masked", our_masked, n, weight, backward=True) for n in options.longest]
    rows += [ours_only("masked with KL", our_masked_with_kl, n, weight, backward=True) for n in options.longest]
    rows.append(codec_row(20_000, options.vocab))
    setting = f"V={options.vocab} H={options.hidden} device={options.device} threads={torch.get_num_threads()}"
    report(f"Log-probs, {setting}", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
