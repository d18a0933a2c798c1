"""Log-probs of the requested mode: probes servers, and joins scores to a response."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.generation.dispatch import seconds_left
from torchrl_sglang.errors import SGLangError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Completion, ServerCapabilities

PROBE_TEMPERATURE = 1e4
"""Temperature at which the logits of any model are all alike."""

PROBE_BIAS = 20.0
"""Bias of a token, without which undivided logits may be alike."""

PROBE_MARGIN = 0.2
"""Distance of the top log-prob of undivided logits above the log-prob of equal ones."""


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
            probes = [self._probe(url, deadline) for url in urls]
            answers = await asyncio.gather(*probes)
            if None in answers or not urls:
                return None
            self._found = (epoch, answers[0] if len(set(answers)) == 1 else None)
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
        timeout = min(30.0, seconds_left(deadline))
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


def with_scores(completion: Completion, scores: Completion) -> Completion | None:
    """Returns a response with these log-probs; ``None`` if none is of its weights."""
    version = scores.versions[-1].version if scores.versions else None
    positions = {
        position
        for span in completion.versions
        if span.version == version
        for position in range(span.start, span.end)
    }
    if completion.token_ids and not positions:
        return None
    log_probs = [
        value if position in positions else math.nan
        for position, value in enumerate(scores.log_probs or ())
    ]
    tops = scores.top_log_probs
    if tops is not None:
        tops = [
            row if position in positions else [math.nan] * len(row)
            for position, row in enumerate(tops)
        ]
    return replace(
        completion,
        log_probs=log_probs,
        top_token_ids=scores.top_token_ids,
        top_log_probs=tops,
        logprobs_mode="model",
    )
