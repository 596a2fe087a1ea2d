"""The JSON body of vLLM's `/inference/v1/generate`."""

from __future__ import annotations

from moe_trm.rollout.servers.question import Question

LISTED_IDS = 1024
"""Most ids with log-probs that are asked for at a position, and most that a server of ours lists."""


def generate_request(question: Question) -> dict[str, object]:
    """The body of one answer. Nothing is streamed: streams lose routes where two pieces are merged.

    A set of kept ids has at most top-k of them, so with masks the likeliest top-k ids are asked for. Where these are
    more than `LISTED_IDS`, `sampling_mask` alone can say which were kept.
    """
    params, fields = question.params, question.requested
    sampling: dict[str, object] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_tokens": params.max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        # What ends an answer is what the run says, not the model's generation_config.json.
        "ignore_eos": True,
        "logprobs": params.top_k if fields.mask and params.top_k <= LISTED_IDS else 0,
        "detokenize": bool(params.stop_texts),
    }
    if params.stop_texts:
        sampling["stop"] = list(params.stop_texts)
    if params.seed is not None:
        sampling["seed"] = params.seed
    if fields.routes and question.start:
        sampling["routed_experts_prompt_start"] = question.start
    return {"token_ids": list(question.context), "sampling_params": sampling}
