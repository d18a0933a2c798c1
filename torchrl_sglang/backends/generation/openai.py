"""Requests of OpenAI's protocol: ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from torchrl_sglang.backends.fleet.weights_state import ServedWeights
from torchrl_sglang.backends.generation.batch import explain_unavailable
from torchrl_sglang.backends.generation.dispatch import Dispatcher
from torchrl_sglang.backends.generation.in_flight import InFlightRequest
from torchrl_sglang.backends.generation.reply import (
    FinishReason,
    aborted_early,
    check_finished,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    RequestRefusedError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.requests.request import GENERATE_TIMEOUT_SECONDS
from torchrl_sglang.support.checks import check_mapping, check_seconds

KEPT_BY_ROUTER = frozenset({"/v1/completions"})
"""Paths whose requests sglang-router 0.3.2 passes on whole. Of a chat it drops, with
status 200, fields outside OpenAI's: the request's name, which an abort needs, its key
of the prefix cache, and ``return_routed_experts``, ``return_sampling_mask``,
``return_meta_info``, ``stop_regex``, ``cache_salt``, ``priority`` and thirty more."""

FINISHED = ("stop", "length", "tool_calls", "function_call", "content_filter")
"""Values of ``finish_reason`` of a complete choice."""

ANSWERED_BY = {
    "return_hidden_states": "hidden_states",
    "return_meta_info": "meta_info",
    "return_routed_experts": "routed_experts",
    "return_sampling_mask": "output_token_sampling_mask",
}
"""Field of a request -> field of the answer that it adds."""


_Attempt: TypeAlias = tuple[Any, str, ServedWeights]
"""Content of an answer, its server or router, and the weights at its dispatch."""


async def post_openai(
    dispatcher: Dispatcher,
    path: str,
    payload: Mapping[str, Any],
    *,
    session_id: str | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Sends a request, with the adapter in ``lora_path``, and returns the answer."""
    if timeout is not None:
        check_seconds("timeout", timeout)
    if check_mapping("payload", payload).get("stream"):
        raise ConfigurationError(
            "A stream cannot be returned as one answer; use a client of OpenAI's "
            "protocol with base_url=engine.openai_base_url."
        )
    content = dict(payload)
    name = content.pop("lora_path", None)
    await dispatcher.adapters.refresh([name])
    seconds = GENERATE_TIMEOUT_SECONDS if timeout is None else timeout
    # Another request begins the answer anew.
    ticket = InFlightRequest(deadline=time.monotonic() + seconds, resumable=False)
    fleet = dispatcher.fleet

    async def attempt(url: str) -> _Attempt:
        with dispatcher.adapters.used(name) as adapter:
            selected = {} if adapter is None else {"lora_path": adapter.served_as}
            # The weight version of when it is sent, not of when it was asked for.
            weights = fleet.weights
            defaults = {"model": "default", "extra_key": weights.version}
            complete = {**defaults, **content, **selected, "rid": ticket.sent_as}
            try:
                answer = await dispatcher.post(
                    url + path, complete, ticket, ticket.deadline, session_id
                )
            except RequestRefusedError as error:
                aborted_early(error)
                reply: Any = {"choices": [{"finish_reason": "abort"}]}
            else:
                reply = answer.json()
            return reply, url, weights

    with dispatcher.in_flight.registered([ticket]):
        try:
            reply, url = await _send_until_whole(
                dispatcher,
                attempt,
                ticket,
                session_id=session_id,
                direct=path not in KEPT_BY_ROUTER,
            )
        except ServerUnavailableError as error:
            better = await explain_unavailable(fleet, error)
            raise better from better.__cause__
    check_answered(content, reply, url)
    version = (reply.get("metadata") or {}).get("weight_version")
    if isinstance(version, str):
        # Another engine object may have sent newer weights: the next key is theirs.
        fleet.change_weights(lambda weights: weights.observe(version))
    usage = reply.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    dispatcher.counters.count(
        int(usage.get("prompt_tokens") or 0),
        int(details.get("cached_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
    )
    return reply


async def _send_until_whole(
    dispatcher: Dispatcher,
    attempt: Callable[[str], Awaitable[_Attempt]],
    ticket: InFlightRequest,
    *,
    session_id: str | None,
    direct: bool,
) -> tuple[dict[str, Any], str]:
    """Sends a request, again after each update that aborts it."""
    while True:
        async with dispatcher.in_flight.turn(ticket.deadline):
            reply, url, weights = await dispatcher.send(
                attempt, ticket, ticket.deadline, session_id=session_id, direct=direct
            )
        try:
            return check_choices(reply, url), url
        except GenerationAbortedError as error:
            updated = dispatcher.fleet.weights.abort_epoch > weights.abort_epoch
            if ticket.aborted or not updated:
                raise error.replace(requested=ticket.aborted) from None
        ticket.restarts += 1
        dispatcher.counters.retries += 1


def check_choices(reply: Any, url: str) -> dict[str, Any]:
    """Returns an answer whose choices are all whole; raises for any other."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not choices:
        raise ServerUnavailableError(f"{url} answered {reply!r:.200}, without choices.")
    length = (reply.get("usage") or {}).get("completion_tokens") or 0
    for choice in choices:
        reason = FinishReason(
            type=str(choice.get("finish_reason")), matched=choice.get("matched_stop")
        )
        check_finished(reason, length, url, FINISHED)
    return dict(reply)


def check_answered(
    content: Mapping[str, Any], reply: Mapping[str, Any], url: str
) -> None:
    """Raises :class:`UnsupportedByServerError` if an answer lacks a requested field.

    A server ignores a field that its version does not know, or that it was started
    without.
    """
    places = [reply, reply.get("sglext") or {}]
    for choice in reply.get("choices") or ():
        places += [choice, choice.get("meta_info") or {}, choice.get("sglext") or {}]
    answered = {name for place in places for name in place if place[name] is not None}
    for option, field in ANSWERED_BY.items():
        if content.get(option) and field not in answered:
            raise UnsupportedByServerError(
                f"{option}={content[option]!r} asks for {field!r}, and the answer of "
                f"the server at {url} has none. Start the server with "
                f"enable_{option}=True where its SGLang has that argument, or use a "
                f"newer SGLang, or leave {option} out."
            )
