"""Megatron's losses of routers, which several frameworks hand through, in ours."""

from __future__ import annotations

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError
from moe_trm.tools.translate.values import Reader, Rule

BALANCE, Z = "loss.router_aux_coef", "loss.router_z_coef"


def router_losses(balance_key: str, z_key: str, kind_key: str, number: Reader, text: Reader) -> Rule:
    """The coefficients are ours. Megatron's `aux_loss` balances micro-batches, its `seq_aux_loss` rows, as here."""

    def apply(draft: Draft) -> None:
        kind = text(draft, kind_key) or "aux_loss"
        if kind not in ("none", "aux_loss", "seq_aux_loss"):
            raise NeedsDecisionError(kind_key, f"{kind}: {BALANCE} balances the load of each row")
        coefficient = number(draft, balance_key)
        if kind == "none":
            draft.miss(balance_key, f"no effect with {kind_key}=none")
            draft.miss(kind_key, "no load-balancing loss, as here")
        elif coefficient:
            keys = [balance_key, *([kind_key] if kind_key in draft.settings else [])]
            draft.put(BALANCE, coefficient, *keys)
            if kind == "aux_loss":
                draft.remark(f"Megatron's aux_loss balances the load of each micro-batch, {BALANCE} that of each row")
        else:
            draft.miss(balance_key, "off, as here")
            draft.miss(kind_key, f"no effect without {balance_key}")
        if z_coefficient := number(draft, z_key):
            draft.put(Z, z_coefficient, z_key)
        else:
            draft.miss(z_key, "off, as here")

    return Rule((balance_key, z_key, kind_key), (BALANCE, Z), apply)
