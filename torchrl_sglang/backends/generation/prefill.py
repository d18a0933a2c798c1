"""Prefills prompts that several requests of a batch share, before these are sent.

Requests that arrive together would each compute the prompt, and a router that has not
seen it would spread them over the servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.generation.dispatch import Dispatcher, Response
from torchrl_sglang.backends.generation.request import GenerateRequest
from torchrl_sglang.errors import SGLangError

__all__ = ["Prefix", "prefill", "prefix_of", "shared_prefixes"]

FEWEST_TOKENS = 32
"""Shorter prompts are not prefilled."""

Prefix = tuple[tuple[int, ...], str | None]
"""Prompt and adapter: what requests that share a KV cache have in common."""


def prefix_of(request: GenerateRequest) -> Prefix:
    """Returns what requests that share a KV cache with this one have in common."""
    return tuple(request.input_ids), request.adapter


def shared_prefixes(
    requests: Iterable[GenerateRequest],
) -> dict[Prefix, GenerateRequest]:
    """Returns the first request of each prefix that is worth a prefill. Pure.

    Requests for the log-probs of their prompt compute it in any case.
    """
    worthwhile = [
        request
        for request in requests
        if len(request.input_ids) >= FEWEST_TOKENS
        and not request.return_prompt_logprobs
    ]
    counts = Counter(map(prefix_of, worthwhile))
    found: dict[Prefix, GenerateRequest] = {}
    for request in worthwhile:
        prefix = prefix_of(request)
        if counts[prefix] > 1:
            found.setdefault(prefix, request)
    return found


async def prefill(
    dispatcher: Dispatcher, requests: Sequence[GenerateRequest], deadline: float
) -> None:
    """Has a server compute the prompts of requests; failures are only logged."""
    prompts = [
        replace(
            request,
            sampling_params={"max_new_tokens": 0},
            return_logprobs=False,
            top_logprobs=0,
            score_response=False,
        )
        for request in requests
    ]
    try:
        # Without the caller's names: aborting one request must not abort its prefill.
        with dispatcher.in_flight.registered([None] * len(prompts)) as tickets:

            async def attempt(url: str) -> list[Response]:
                return await dispatcher.post(
                    url, prompts, tickets, deadline, count=False
                )

            async with dispatcher.in_flight.turn(deadline):
                await dispatcher.send(
                    attempt,
                    lambda: tickets,
                    session_id=prompts[0].session_id,
                    deadline=deadline,
                )
    except SGLangError as error:
        # The requests themselves will fail in the same way.
        torchrl_logger.debug(f"A prefill failed: {error}")
