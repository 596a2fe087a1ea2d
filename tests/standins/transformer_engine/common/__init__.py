"""Parts that belong to no framework."""

from . import recipe

__all__ = ["recipe"]
