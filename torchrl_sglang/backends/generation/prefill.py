"""Prefills prompts that several requests of a batch share, before these are sent.

Requests that arrive together would each compute the prompt, and a router that has not
seen it would spread them over the servers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.generation.dispatch import Dispatcher
from torchrl_sglang.backends.generation.in_flight import Ticket
from torchrl_sglang.backends.generation.request import GenerateRequest
from torchrl_sglang.errors import SGLangError

__all__ = ["prefill", "sharing_prompts"]

FEWEST_TOKENS = 32
"""Shorter prompts are not prefilled."""


def sharing_prompts(requests: Mapping[int, GenerateRequest]) -> list[list[int]]:
    """Returns the indices of requests that share a prompt worth a prefill. Pure."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for index, request in requests.items():
        # Requests for the log-probs of their prompt compute it in any case.
        if (
            len(request.input_ids) >= FEWEST_TOKENS
            and not request.return_prompt_logprobs
        ):
            groups[tuple(request.input_ids), request.adapter].append(index)
    return [group for group in groups.values() if len(group) > 1]


async def prefill(
    dispatcher: Dispatcher,
    request: GenerateRequest,
    deadline: float,
    request_timeout: float | None,
) -> None:
    """Has a server compute the prompt of a request; a failure is only logged."""
    prompt = replace(
        request,
        sampling_params={"max_new_tokens": 0},
        return_logprobs=False,
        top_logprobs=0,
        score_response=False,
    )
    # Without the caller's name: aborting one request must not abort its prefill.
    ticket = Ticket(deadline=deadline, request_timeout=request_timeout)
    try:
        with dispatcher.in_flight.registered([ticket]):
            async with dispatcher.in_flight.turn(deadline):
                await dispatcher.generate(
                    prompt, ticket, ticket.end_of_attempt(), count=False
                )
    except SGLangError as error:
        # The request itself will fail in the same way.
        torchrl_logger.debug(f"A prefill failed: {error}")
