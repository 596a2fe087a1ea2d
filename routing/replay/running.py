"""The pass that a router must ask: the open one or, inside a backward, the one whose output is being differentiated.

It is found through the autograd graph of the output. So backwards may come in any order of micro-batches, and there is
no queue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from routing.errors import ReplayProofError
from routing.replay.replay_pass import ReplayPass


class RunningPass:
    """The running pass of one replayer.

    Attributes:
        active: the pass inside `use`, or None.
        backward: the pass whose layers are being recomputed, or None outside of a backward.
        before_backward, after_backward: called around every backward of a tagged output.
    """

    def __init__(self) -> None:
        self.active: ReplayPass | None = None
        self.backward: ReplayPass | None = None
        self.before_backward: Callable[[], None] | None = None
        self.after_backward: Callable[[], None] | None = None

    def current(self) -> tuple[ReplayPass, bool]:
        """The pass that a router is being asked for, and whether this is its recomputation.

        Raises `ReplayProofError` outside of both.
        """
        # The test torch.utils.checkpoint itself uses for "inside a backward".
        recompute = torch._C._current_graph_task_id() != -1
        running = self.backward if recompute else self.active
        if running is None:
            raise ReplayProofError(
                "a model with a replayer was forwarded outside `use`; wrap the forward (Native() keeps the router's "
                "own choice) or detach the replayer"
            )
        return running, recompute

    def tag_output(self, _module: Any, _args: Any, output: Any) -> None:
        """A forward hook: the backward of this output announces its pass before any layer below recomputes."""
        first = output if isinstance(output, Tensor) else output[0]
        if self.active is not None and first.grad_fn is not None:
            first.grad_fn.register_prehook(partial(self._begin_backward, self.active))

    def _begin_backward(self, owner: ReplayPass, _gradients: Any) -> None:
        if self.before_backward is not None and self.backward is None:
            self.before_backward()
        self.backward = owner
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        # One call for each output of this backward; the first ends it.
        ended, self.backward = self.backward is not None, None
        if ended and self.after_backward is not None:
            self.after_backward()
