"""8-bit products, which no CPU computes."""

from __future__ import annotations

from typing import Any


class FP8GlobalStateManager:
    """Asked whether 8-bit products are on."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """They never are."""
        return False


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, _graph: bool = False
) -> Any:
    """Entered by nobody here."""
    raise NotImplementedError("8-bit products need a GPU")


def fp8_model_init(enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False) -> Any:
    """Entered by nobody here."""
    raise NotImplementedError("8-bit weights need a GPU")
