"""Data-sheet values of GPUs: memory, bandwidth, dense bfloat16 products, links."""

from __future__ import annotations

from dataclasses import dataclass

from moe_trm.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One GPU by its maker's data sheet.

    Attributes:
        memory_gb: 10^9 bytes.
        bandwidth_gb_s: memory bandwidth, 10^9 bytes per second.
        tflops: dense bfloat16 products, 10^12 operations per second, without sparsity.
        link_gb_s: to the other GPUs of its node, 10^9 bytes per second in one direction.
    """

    memory_gb: float
    bandwidth_gb_s: float
    tflops: float
    link_gb_s: float


GPUS = {
    "a100-40": Gpu(40, 1555, 312, 300),
    "a100": Gpu(80, 2039, 312, 300),
    "h100": Gpu(80, 3350, 989, 450),
    "h200": Gpu(141, 4800, 989, 450),
    "b200": Gpu(180, 8000, 2250, 900),
}
"""By name: NVIDIA's SXM modules."""


def gpu_of(name: str) -> Gpu:
    """The GPU of that name, in any case. Raises `ConfigError` with the list."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(
            "unknown GPU",
            where="--gpu",
            got=name,
            expected=f"one of {', '.join(GPUS)}",
            fix="Name the nearest of these, and set --memory-gb, --bandwidth-gb-s and --tflops to your own values.",
        )
    return gpu
