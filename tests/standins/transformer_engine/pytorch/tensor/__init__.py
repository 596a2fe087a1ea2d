"""8-bit tensors, of which there are none."""

from torch import Tensor


class QuantizedTensor(Tensor):
    """Made by nobody here."""
