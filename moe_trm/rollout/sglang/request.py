"""The JSON body of SGLang's `/generate`."""

from __future__ import annotations

import base64
import re

from moe_trm.models.pictures import collapsed
from moe_trm.rollout.servers.question import Question


def generate_request(question: Question) -> dict[str, object]:
    """The body of one sample.

    The server refuses masks together with `n > 1`, hence one request each.
    """
    params, fields = question.params, question.requested
    sampling: dict[str, object] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_new_tokens": params.max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        **({} if params.seed is None else {"sampling_seed": params.seed}),
    }
    request: dict[str, object] = {
        "input_ids": list(question.context),
        "sampling_params": sampling,
        "return_logprob": True,
        "return_prompt_token_ids": True,
    }
    if question.pictures:
        assert question.image is not None, "the model of pictures has image tokens"
        # SGLang expands each placeholder itself, and answers 500 to one that is expanded.
        request["input_ids"] = collapsed(question.context, question.image)
        request["image_data"] = [base64.b64encode(data).decode() for data in question.pictures]
    if question.request_id:
        request["rid"] = question.request_id
    if params.stop_texts:
        # SGLang looks for a text in as many last tokens as the tokenizer writes it in; the policy may take more.
        # For an expression it looks at as many as there are characters (0.5.23, `Req._stop_match_tail_len`).
        sampling["stop_regex"] = [re.escape(text) for text in params.stop_texts]
    if fields.routes:
        request["return_routed_experts"] = True
        if question.start:
            request["routed_experts_start_len"] = question.start
    if fields.mask:
        request |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
        if fields.violation == "union":
            request["top_logprobs_num"] = 1
    return request
