"""Decides whether a server's log-probs are the requested ones, or a response is scored.

For a sampled token SGLang reports ``log_softmax(logits)`` after penalties, biases,
``min_new_tokens`` and grammar and, unless it was started with
``SGLANG_RETURN_ORIGINAL_LOGPROB=1``, after the temperature
(``sglang/srt/layers/sampler.py``). For prompt tokens it always reports the model's own.
So where the two differ, a finished response is sent once more, as a prompt, whose
beginning is in the prefix cache.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.generation.dispatch import seconds_left
from torchrl_sglang.errors import (
    ConfigurationError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.requests.behaviour import has_own_log_probs
from torchrl_sglang.requests.request import GenerateRequest, response_limit
from torchrl_sglang.requests.sampling import (
    GREEDY_TEMPERATURE,
    changes_logits,
    temperature_of,
)
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Completion, ServerCapabilities

PROBE_TEMPERATURE = 1e4
"""Divided by it, the logits of any model are all alike."""

PROBE_BIAS = 20.0
"""Of a token, so that no logits that are not divided are alike."""

PROBE_MARGIN = 0.2
"""Distance of the top log-prob of undivided logits above that of equal ones."""

PROBE_TIMEOUT_SECONDS = 30.0


def scales_logits(params: Mapping[str, Any], capabilities: ServerCapabilities) -> bool:
    """Returns whether a temperature other than 1 is applied. Pure."""
    temperature = temperature_of(params, capabilities)
    if temperature is None:
        return True
    return temperature >= GREEDY_TEMPERATURE and temperature != 1


def depends_on_server(
    request: GenerateRequest, capabilities: ServerCapabilities
) -> bool:
    """Returns whether servers have to be probed for a request of log-probs. Pure."""
    params = request.sampling_params
    if has_own_log_probs(request) or not scales_logits(params, capabilities):
        return False
    return request.logprobs_mode != "model" or not changes_logits(params, capabilities)


def plan_scoring(
    request: GenerateRequest,
    ignores_temperature: bool | None,
    capabilities: ServerCapabilities,
) -> GenerateRequest:
    """Decides whether a response with log-probs is scored when it is finished. Pure."""
    params = request.sampling_params
    if params.get("max_new_tokens") == 0 or has_own_log_probs(request):
        return request
    scaled = scales_logits(params, capabilities)
    if request.logprobs_mode != "model":
        if scaled and ignores_temperature is not False:
            why = (
                "depends on how the servers were started, and they differ, or one of "
                "them did not tell; try again, or use logprobs_mode='model'."
                if ignores_temperature is None
                else "cannot be had: the server takes log-probabilities before it "
                "applies the temperature. Start it with environment="
                "{'SGLANG_RETURN_ORIGINAL_LOGPROB': '0'}, or use "
                f"logprobs_mode='model'{_or_top_k(request, capabilities)}."
            )
            temperature = params.get("temperature")
            raise UnsupportedByServerError(
                f"logprobs_mode={request.logprobs_mode!r} with "
                f"temperature={temperature!r} {why}"
            )
        return request
    if not changes_logits(params, capabilities) and (not scaled or ignores_temperature):
        return request
    planned = replace(request, score_response=True)
    if response_limit(planned, capabilities) < 1:
        raise ConfigurationError(
            f"A prompt of {len(request.input_ids)} tokens leaves no room for scoring "
            f"its response: the server takes at most {capabilities.max_prompt} prompt "
            f"tokens, and a response is scored as a part of one. Shorten it, or start "
            f"the server with a larger context_length."
        )
    return planned


def _or_top_k(request: GenerateRequest, capabilities: ServerCapabilities) -> str:
    """Returns another remedy, where there is one."""
    most = capabilities.args.sampling_mask_max_tokens
    if request.logprobs_mode != "behaviour" or most is None:
        return ""
    return f", or sample with a top_k of 1 to {most}"


class TemperatureProbe:
    """Finds out whether servers take log-probs before they apply the temperature."""

    def __init__(
        self, http: HttpClient, fleet: Fleet, capabilities: ServerCapabilities
    ) -> None:
        self._http = http
        self._fleet = fleet
        self._capabilities = capabilities
        self._found: tuple[int, bool | None] | None = None

    async def ignores_temperature(self, deadline: float) -> bool | None:
        """Returns the answer of all servers; ``None`` if they do not agree."""
        epoch = self._fleet.membership_epoch
        if self._found is None or self._found[0] != epoch:
            try:
                async with asyncio.timeout(seconds_left(deadline)):
                    # Servers answer nothing during a weight update.
                    await self._fleet.gate.passed()
            except TimeoutError:
                return None
            urls = self._fleet.serving
            found = await asyncio.gather(*(self._probe(url, deadline) for url in urls))
            if None in found or not urls:
                return None
            self._found = (epoch, found[0] if len(set(found)) == 1 else None)
        return self._found[1]

    async def _probe(self, url: str, deadline: float) -> bool | None:
        """Samples a token at a temperature that makes all tokens equally probable."""
        payload = {
            "input_ids": [0],
            "sampling_params": {
                "max_new_tokens": 1,
                "temperature": PROBE_TEMPERATURE,
                # Some models have equal logits behind some token, such as one whose
                # embedding is zero.
                "logit_bias": {"0": PROBE_BIAS},
            },
            "return_logprob": True,
            "top_logprobs_num": 1,
            # The probe's prefix-cache entry is not shared with requests.
            "extra_key": "probe",
        }
        timeout = min(PROBE_TIMEOUT_SECONDS, seconds_left(deadline))
        try:
            answer = await self._http.request(
                "POST", f"{url}/generate", payload, timeout=timeout
            )
            meta = answer.raise_for_status().json()["meta_info"]
            (row,) = meta["output_top_logprobs"]
            return is_unscaled(float(row[0][0]), self._capabilities.vocab_size)
        except (SGLangError, LookupError, TypeError, ValueError) as error:
            torchrl_logger.debug(f"The log-prob probe of {url} failed: {error}")
            return None


def is_unscaled(greatest: float, vocab_size: int) -> bool:
    """Returns whether logits with this top log-prob were not divided. Pure."""
    return greatest > PROBE_MARGIN - math.log(vocab_size)


def to_scoring_request(
    request: GenerateRequest, completion: Completion
) -> GenerateRequest:
    """Returns the request that scores a response under the model's own distribution."""
    # The first scored token gets no log-prob: scoring begins at the last prompt token.
    return replace(
        request,
        input_ids=[*request.input_ids, *completion.token_ids],
        sampling_params={"max_new_tokens": 0},
        return_logprobs=True,
        return_prompt_logprobs=False,
        token_columns=(),
        score_response=False,
        scored_from=len(request.input_ids) - 1,
    )


def with_scores(completion: Completion, scores: Completion) -> Completion | None:
    """Returns a response with these log-probs; ``None`` if none is of its weights."""
    version = scores.versions[-1].version if scores.versions else None
    known = {
        position
        for span in completion.versions
        if span.version == version
        for position in range(span.start, span.end)
    }
    if completion.token_ids and not known:
        return None
    log_probs = [
        value if position in known else math.nan
        for position, value in enumerate(scores.log_probs or ())
    ]
    tops = scores.top_log_probs
    if tops is not None:
        tops = [
            row if position in known else [math.nan] * len(row)
            for position, row in enumerate(tops)
        ]
    return replace(
        completion,
        log_probs=log_probs,
        top_token_ids=scores.top_token_ids,
        top_log_probs=tops,
        logprobs_mode="model",
    )
