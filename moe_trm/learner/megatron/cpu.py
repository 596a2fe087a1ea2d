"""Megatron-Core without CUDA: the patches (`install`) and the layers (`cpu_block_spec`) it needs there.

`install()` must run before the layers are imported in a process that builds Megatron objects.
"""

from moe_trm.learner.megatron.cpu_shim import install
from moe_trm.learner.megatron.cpu_spec import RMSNorm, cpu_block_spec

__all__ = ["RMSNorm", "cpu_block_spec", "install"]
