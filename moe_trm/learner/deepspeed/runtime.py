"""DeepSpeed, imported without its notices, and kept from compiling C++ on machines without CUDA.

Two patches of third-party state. `deepspeed.comm.torch.build_shm_op` (0.19) compiles a shared-memory all-reduce for CPU ranks whenever a process group is
made, which takes half a minute and a compiler; the operator is declared unavailable, so that gloo does the work. `runtime/engine.py:2003` refuses float16
on CPUs without instructions for it, where torch computes it all the same.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

_NOTICES = ("Setting accelerator to CPU",)


def load_deepspeed() -> Any:
    """The `deepspeed` module."""
    logger = logging.getLogger("DeepSpeed")
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)
    import deepspeed

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOTICES)
