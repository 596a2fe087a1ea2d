"""What is not of one framework."""

from . import recipe

__all__ = ["recipe"]
