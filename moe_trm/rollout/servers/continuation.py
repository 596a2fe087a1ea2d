"""One answer that weight pushes cut into pieces, each with one version and the routes of the forwards that sampled it.

One thing no record can hold: later pieces attended to keys and values that the new weights recomputed for all tokens
before them. A learner that replays the record gives those tokens the routes of the weights that sampled them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe_trm.rollout.turn import routes_rejected
from moe_trm.sampling_mask.record import join
from moe_trm.types import SampledTurn, SamplingParams
from routing import RouteError
from routing.record.groups import extend


def continued(first: SampledTurn, second: SampledTurn) -> SampledTurn:
    """Join the aborted answer `first` and its continuation `second`.

    The routes of `second` begin at the row of the last token of `first`. Raises `RecordRejected` (`route_*`) when their
    routes do not meet.
    """
    routes = second.routes
    if first.routes is not None and second.routes is not None:
        try:
            routes = extend(first.routes, second.routes, first.routes.num_rows)
            routes.validate(first.routes.num_rows + 1 + second.num_sampled)
        except RouteError as error:
            raise routes_rejected(error) from error
    masks = [piece.sampling_mask for piece in (first, second) if piece.sampling_mask is not None]
    recomputed = first.num_sampled + second.recomputed if second.recomputed else first.recomputed
    return replace(
        second,
        tokens=np.concatenate([first.tokens, second.tokens]),
        rollout_logprobs=np.concatenate([first.rollout_logprobs, second.rollout_logprobs]),
        full_logprobs=np.concatenate([first.full_logprobs, second.full_logprobs]),
        versions=np.concatenate([first.versions, second.versions]),
        routes=routes,
        sampling_mask=join(masks) if masks else None,
        recomputed=recomputed,
        server=first.server if first.server == second.server else None,
        retracted=first.retracted or second.retracted,
    )


def settled(turn: SampledTurn, params: SamplingParams) -> SampledTurn:
    """The turn, with its true end where the engine aborted it in the step of its last token.

    Nothing is left to sample then, and an engine that is asked for no token fails or gives one too many.
    """
    if turn.finish_reason != "abort":
        return turn
    if int(turn.tokens[-1]) in params.stop_token_ids:
        return replace(turn, finish_reason="stop")
    return replace(turn, finish_reason="length") if turn.num_sampled >= params.max_new_tokens else turn
