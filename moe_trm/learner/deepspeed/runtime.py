"""DeepSpeed, imported without its notices, and without compiling C++ on machines without CUDA.

Two patches of third-party state:

- `deepspeed.comm.torch.build_shm_op` (0.19) compiles a shared-memory all-reduce for CPU ranks whenever a process group
  is made. That takes half a minute and a compiler. The operator is declared unavailable, so gloo is used.
- `runtime/engine.py:2003` refuses float16 on CPUs without float16 instructions, although torch can compute it.
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
