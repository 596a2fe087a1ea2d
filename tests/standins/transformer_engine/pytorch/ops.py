"""Operations that Megatron-Core names in signatures alone."""

from torch import nn


class FusibleOperation(nn.Module):
    """Made by nobody here."""


class Sequential(nn.Module):
    """Made by nobody here."""
