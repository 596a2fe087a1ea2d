"""Transformer Engine's interface in plain torch: the modules, arguments and parameters that Megatron-Core uses.

Signatures are complete and take nothing more, so a call with a wrong name or too many arguments fails as it does on a
GPU. What is not here cannot be imported: Megatron-Core then goes without it, as with another version.

Source: TransformerEngine 2.20, `transformer_engine/pytorch`.
"""

from . import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.20.2"
