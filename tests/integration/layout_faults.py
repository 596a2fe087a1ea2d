"""One rank of a layout with a fault in it: `layout_faults.py FAULT` and the arguments of `layout_rank`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from moe_trm.config.schema import Config
from moe_trm.learner.build import build_learner
from moe_trm.learner.protocol import Learner
from moe_trm.tools.doctor import layout_rank

Change = Callable[[Tensor], object]
FAULTS: dict[str, tuple[str, Change]] = {
    "none": (r"no parameter", lambda weight: None),
    "attention": (r"layers\.1\.self_attention\.linear_proj\.weight", lambda weight: weight.data.mul_(1.05)),
    "router": (r"layers\.2\.mlp\.router\.weight", lambda weight: weight.data.mul_(1.1)),
    "experts": (r"layers\.2\.mlp\.experts\..*linear_fc2.*", lambda weight: weight.data.mul_(1.05)),
    "gradient": (
        r"layers\.1\.self_attention\.linear_proj\.weight",
        lambda weight: weight.register_hook(lambda gradient: 1.1 * gradient),
    ),
}
"""By name the parameters that it changes, and how."""


def faulty(fault: str, build: Callable[[Config], Learner]) -> Callable[[Config], Learner]:
    """`build` of a learner with the fault."""
    pattern, change = FAULTS[fault]

    def built(config: Config) -> Learner:
        learner, changed = build(config), 0
        for name, module in learner.named_modules():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if re.search(pattern, f"{name}.{parameter_name}"):
                    changed += 1
                    with torch.no_grad():
                        change(parameter)
        assert changed or fault == "none"
        return learner

    return built


if __name__ == "__main__":
    vars(layout_rank)["build_learner"] = faulty(sys.argv[1], build_learner)
    sys.exit(layout_rank.main(sys.argv[2:]))
