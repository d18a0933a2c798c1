"""Generation: batches of prompts in, completions out, in order.

One server takes a batch as one request, which is the fastest form that it has. If the
server refuses the batch, its items are sent one by one, so that the bad one names
itself and the others are answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from torchrl_sglang.backends.http import HttpClient
from torchrl_sglang.backends.wire import GenerateRequest, parse_completion, to_payload
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.types import Completion, ServerCapabilities

__all__ = ["DataPlane"]

SINGLE_REQUESTS = 64
"""How many items of a refused batch are under way at once: each has a connection."""


class DataPlane:
    """Sends generation requests to one server. Used from the background loop only.

    Args:
        http: connections.
        url: address of the server.
        capabilities: what the server can do.
    """

    def __init__(
        self, http: HttpClient, url: str, capabilities: ServerCapabilities
    ) -> None:
        self._http = http
        self._url = url
        self._capabilities = capabilities

    async def generate(
        self, requests: Sequence[GenerateRequest], *, cache_key: str, timeout: float
    ) -> list[Completion | SGLangError]:
        """Returns each request's completion, or the error that is its own.

        Args:
            requests: checked requests.
            cache_key: version of the weights, which separates prefix-cache entries.
            timeout: budget for the batch, in seconds.

        Raises:
            ServerUnavailableError: if the server cannot be reached or fails.
            ServerTimeoutError: if the budget is used up.
        """
        if not requests:
            return []
        deadline = time.monotonic() + timeout
        try:
            return await self._post(requests, cache_key, timeout)
        except RequestRefusedError as error:
            if len(requests) == 1:
                error.index = 0
                return [error]
        turns = asyncio.Semaphore(SINGLE_REQUESTS)

        async def alone(request: GenerateRequest) -> list[Completion | SGLangError]:
            async with turns:
                left = deadline - time.monotonic()
                return await self._post([request], cache_key, max(left, 1e-3))

        outcomes = await asyncio.gather(
            *(alone(request) for request in requests), return_exceptions=True
        )
        results: list[Completion | SGLangError] = []
        for outcome in outcomes:
            if isinstance(outcome, RequestRefusedError):
                results.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results += outcome
        for index, result in enumerate(results):
            if isinstance(result, (GenerationAbortedError, RequestRefusedError)):
                result.index = index
        return results

    async def _post(
        self, requests: Sequence[GenerateRequest], cache_key: str, timeout: float
    ) -> list[Completion | SGLangError]:
        payload = to_payload(requests, self._capabilities, cache_key=cache_key)
        answer = await self._http.request(
            "POST", f"{self._url}/generate", payload, timeout=timeout
        )
        replies = answer.raise_for_status().json()
        if isinstance(replies, dict) and len(requests) == 1:
            replies = [replies]
        if not isinstance(replies, list) or len(replies) != len(requests):
            size = len(replies) if isinstance(replies, list) else type(replies).__name__
            raise ServerUnavailableError(
                f"{self._url} was sent {len(requests)} prompts and answered {size}."
            )
        results: list[Completion | SGLangError] = []
        for index, (reply, request) in enumerate(zip(replies, requests, strict=True)):
            try:
                results.append(
                    parse_completion(
                        reply,
                        request,
                        vocab_size=self._capabilities.vocab_size,
                        server=self._url,
                    )
                )
            except (GenerationAbortedError, RequestRefusedError) as error:
                error.index = index
                results.append(error)
        return results
