"""Whose log-probabilities: what servers give of a response, and what has to be scored.

What SGLang says of a sampled token is ``log_softmax(logits)`` after penalties, biases,
``min_new_tokens`` and grammar have changed the logits, and, unless it was started with
``SGLANG_RETURN_ORIGINAL_LOGPROB=1``, after they were divided by the temperature
(``sglang/srt/layers/sampler.py``). What it says of the tokens of a prompt is the
model's own in every case. So where the two differ, a finished response is sent once
more, as a prompt; its beginning is in the prefix cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.generation.protocol import (
    GenerateRequest,
    response_room,
    wants_log_probs,
)
from torchrl_sglang.backends.generation.request import Batch
from torchrl_sglang.backends.generation.sampling import changes_logits, temperature_of
from torchrl_sglang.errors import (
    ConfigurationError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.types import Completion, ServerCapabilities

__all__ = [
    "depends_on_server",
    "ignores_temperature",
    "plan_scoring",
    "scales_logits",
    "to_scoring_request",
    "with_scores",
]

GREEDY_TEMPERATURE = 1e-6
"""Below it SGLang samples greedily, at temperature 1."""

PROBE_TEMPERATURE = 1e4
"""Divided by it, the logits of any model are all alike."""

PROBE_MARGIN = 0.2
"""How far above that of equally likely tokens the greatest log-probability lies where
the logits were not divided."""

PROBE_SECONDS = 30.0
"""Budget for a probe."""


def scales_logits(params: Mapping[str, Any], capabilities: ServerCapabilities) -> bool:
    """Returns whether a temperature other than 1 is applied. Pure.

    Examples:
        >>> scales_logits({"temperature": 0.7}, engine.capabilities)
        True
        >>> scales_logits({"temperature": 0.0}, engine.capabilities)
        False
    """
    temperature = temperature_of(params, capabilities)
    if temperature is None:
        return True
    return temperature >= GREEDY_TEMPERATURE and temperature != 1


def depends_on_server(
    request: GenerateRequest, capabilities: ServerCapabilities
) -> bool:
    """Returns whether a server's log-probs at a temperature have to be known. Pure."""
    params = request.sampling_params
    if not wants_log_probs(request) or not scales_logits(params, capabilities):
        return False
    return request.logprobs_mode == "sampling" or not changes_logits(
        params, capabilities
    )


def plan_scoring(
    batch: Batch,
    ignores_temperature: bool | None,
    capabilities: ServerCapabilities,
    *,
    return_exceptions: bool,
) -> Batch:
    """Decides which responses are scored when they are finished. Pure.

    Args:
        batch: checked requests.
        ignores_temperature: whether the servers take log-probabilities before they
            apply the temperature; ``None`` if that is not known of all of them.
        capabilities: of the servers.
        return_exceptions: keep the error of a prompt in its place instead of raising
            the first one.

    Raises:
        UnsupportedByServerError: for log-probabilities that nothing can tell.
        ConfigurationError: for a prompt that leaves no room for scoring.
    """
    planned = Batch(size=batch.size, requests={}, errors=dict(batch.errors))
    for index, request in batch.requests.items():
        try:
            planned.requests[index] = _plan(request, ignores_temperature, capabilities)
        except SGLangError as error:
            if not return_exceptions:
                raise
            planned.errors[index] = error
    return planned


def _plan(
    request: GenerateRequest,
    ignores_temperature: bool | None,
    capabilities: ServerCapabilities,
) -> GenerateRequest:
    params = request.sampling_params
    if not wants_log_probs(request) or params.get("max_new_tokens") == 0:
        return request
    scaled = scales_logits(params, capabilities)
    if request.logprobs_mode == "sampling":
        if scaled and ignores_temperature is not False:
            raise _why_not_sampling(params, ignores_temperature)
        return request
    if not changes_logits(params, capabilities) and (not scaled or ignores_temperature):
        return request
    planned = replace(request, score_response=True)
    if response_room(planned, capabilities) < 1:
        raise ConfigurationError(
            f"A prompt of {len(request.input_ids)} tokens leaves no room for scoring "
            f"its response: the server takes at most {capabilities.max_prompt} prompt "
            f"tokens, and a response is scored as a part of one. Shorten it, or start "
            f"the server with a larger context_length."
        )
    return planned


def _why_not_sampling(
    params: Mapping[str, Any], ignores_temperature: bool | None
) -> SGLangError:
    temperature = params.get("temperature")
    if ignores_temperature is None:
        return UnsupportedByServerError(
            f"logprobs_mode='sampling' with temperature={temperature!r} depends on how "
            f"the servers were started, and they differ, or one of them did not tell; "
            f"try again, or use logprobs_mode='model'."
        )
    return UnsupportedByServerError(
        f"logprobs_mode='sampling' with temperature={temperature!r} cannot be had: the "
        f"server takes log-probabilities before it applies the temperature. Start it "
        f"with environment={{'SGLANG_RETURN_ORIGINAL_LOGPROB': '0'}}, or use "
        f"logprobs_mode='model'."
    )


async def ignores_temperature(
    http: HttpClient, url: str, capabilities: ServerCapabilities, deadline: float
) -> bool | None:
    """Finds out whether a server's log-probs are those before the temperature.

    It has one token sampled at a temperature with which all tokens are equally likely.

    Returns:
        ``None`` if the server does not tell.
    """
    payload = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": PROBE_TEMPERATURE},
        "return_logprob": True,
        "top_logprobs_num": 1,
        # Its prefix-cache entry is nobody else's.
        "extra_key": "probe",
    }
    budget = max(min(PROBE_SECONDS, deadline - time.monotonic()), 1e-3)
    try:
        answer = await http.request("POST", f"{url}/generate", payload, timeout=budget)
        meta = answer.raise_for_status().json()["meta_info"]
        (row,) = meta["output_top_logprobs"]
        return is_unscaled(float(row[0][0]), capabilities.vocab_size)
    except (SGLangError, LookupError, TypeError, ValueError) as error:
        torchrl_logger.debug(f"{url} does not tell whose log-probs it gives: {error}")
        return None


def is_unscaled(greatest: float, vocab_size: int) -> bool:
    """Returns whether logits were not divided by :data:`PROBE_TEMPERATURE`. Pure.

    A model for which all tokens are equally likely anyway counts as one whose logits
    were divided, which costs time and no exactness.

    Args:
        greatest: the greatest log-probability in a token's place.
        vocab_size: number of tokens.

    Examples:
        >>> is_unscaled(-1.3, vocab_size=100), is_unscaled(-4.6, vocab_size=100)
        (True, False)
    """
    return greatest > PROBE_MARGIN - math.log(vocab_size)


def to_scoring_request(
    request: GenerateRequest, completion: Completion
) -> GenerateRequest:
    """Returns the request that scores a response: its log-probs are the model's own.

    The first token of what is scored gets no log-probability, so that scoring begins at
    the last token of the prompt; the KV cache of those before it is used.
    """
    return replace(
        request,
        input_ids=[*request.input_ids, *completion.token_ids],
        sampling_params={"max_new_tokens": 0},
        return_log_probs=True,
        return_prompt_log_probs=False,
        score_response=False,
        scored_from=len(request.input_ids) - 1,
    )


def with_scores(completion: Completion, scores: Completion) -> Completion | None:
    """Returns a response with the log-probabilities that scoring it gave. Pure.

    Scores are those of the weights at that time. The log-probability of a token that
    other weights generated cannot be known any more: it is NaN.

    Args:
        completion: the response, without log-probabilities.
        scores: what the server answered to :func:`to_scoring_request`.

    Returns:
        The response, or ``None`` where no token's log-probability is known.
    """
    version = scores.versions[-1].version if scores.versions else None
    known = [False] * len(completion.token_ids)
    for span in completion.versions:
        if span.version == version:
            known[span.start : span.end] = [True] * (span.end - span.start)
    if known and not any(known):
        return None
    log_probs = [
        value if is_known else math.nan
        for value, is_known in zip(scores.log_probs or (), known, strict=True)
    ]
    tops = scores.top_log_probs
    if tops is not None:
        tops = [
            row if is_known else [math.nan] * len(row)
            for row, is_known in zip(tops, known, strict=True)
        ]
    return replace(
        completion,
        log_probs=log_probs,
        top_token_ids=scores.top_token_ids,
        top_log_probs=tops,
        logprobs_mode="model",
    )
