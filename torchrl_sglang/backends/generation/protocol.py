"""The generate protocol, as pure functions: checks, requests and replies.

Nothing that a server cannot survive passes :func:`check_request` (a token id outside
the vocabulary kills some versions), and no reply that lacks what was asked for passes
:func:`parse_completion`: a log-probability is never invented.

Format: SGLang's native ``/generate`` (``sglang/srt/managers/io_struct.py``,
``GenerateReqInput``; ``sglang/srt/sampling/sampling_params.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.backends.generation.sampling import check_token_ids
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    RequestRefusedError,
    ServerUnavailableError,
)
from torchrl_sglang.types import (
    Completion,
    LogProbsMode,
    ServerCapabilities,
    VersionSpan,
)

__all__ = [
    "ROUTING_KEY_HEADER",
    "GenerateRequest",
    "check_prompt",
    "check_top_log_probs",
    "parse_completion",
    "to_payload",
]

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""A router with a keyed policy sends requests with equal values of this header to one
server."""

STREAM_INTERVAL = 2**30
"""Tokens between two events of a response: only its first one and its end are sent."""

_NAN = "NaN happened"
"""The stop text that SGLang claims to have matched where a sampled id is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One prompt to continue or to score."""

    input_ids: Sequence[int]
    """Prompt token ids; never empty."""
    sampling_params: Mapping[str, Any]
    """Checked parameters under SGLang's names."""
    return_log_probs: bool = False
    """Ask for the log-probability of every response token."""
    return_prompt_log_probs: bool = False
    """Ask for the log-probability of every prompt token too."""
    top_log_probs: int = 0
    """Ask for this many of the likeliest tokens in each response token's place."""
    logprobs_mode: LogProbsMode = "model"
    """Whose log-probabilities of the response."""
    score_response: bool = False
    """The server's log-probabilities of sampled tokens are not those asked for: the
    response is scored when it is finished, as a prompt is."""
    scored_from: int | None = None
    """Score the tokens of ``input_ids`` behind this position; see
    :func:`.log_probs.to_scoring_request`."""
    request_id: str | None = None
    """Name by which the caller can abort it."""
    session_id: str | None = None
    """Requests of one session go to one server, where their prefix is cached."""
    adapter: str | None = None
    """LoRA adapter to compute it with: a name, ``""`` for none, or ``None`` for the
    engine's default when it is sent."""


def check_prompt(
    input_ids: Sequence[int], capabilities: ServerCapabilities, what: str = "The prompt"
) -> None:
    """Checks one prompt before it can reach a server.

    Raises:
        ConfigurationError: if it is empty, holds an id outside the vocabulary, or
            leaves no room for a response.
    """
    if not isinstance(input_ids, Sequence):
        raise ConfigurationError(
            f"{what} is a {type(input_ids).__name__}; give a list of token ids."
        )
    if len(input_ids) == 0:
        raise ConfigurationError(
            f"{what} is empty; a prompt has at least one token (begin with the "
            f"tokenizer's bos token where there is nothing else)."
        )
    longest = min(capabilities.max_prompt, capabilities.max_context - 1)
    if len(input_ids) > longest:
        raise ConfigurationError(
            f"{what} has {len(input_ids)} tokens, which leaves no room: the server "
            f"takes at most {longest} prompt tokens (context "
            f"{capabilities.max_context}). Shorten it, or start the server with a "
            f"larger context_length."
        )
    check_token_ids(input_ids, capabilities, what)


def check_top_log_probs(number: int, capabilities: ServerCapabilities) -> None:
    """Raises :class:`ConfigurationError` unless so many tokens can be named."""
    largest = capabilities.vocab_size
    if type(number) is not int or not 0 <= number <= largest:
        raise ConfigurationError(
            f"top_logprobs={number!r} is not a number of tokens; give an integer in "
            f"[0, {largest}] (the size of the vocabulary)."
        )


def to_payload(
    requests: Sequence[GenerateRequest],
    capabilities: ServerCapabilities,
    *,
    cache_key: str,
    rids: Sequence[str],
    adapters: Sequence[str | None] = (),
    stream: bool = False,
) -> dict[str, Any]:
    """Returns the JSON content of one ``/generate`` call for a batch of requests.

    Args:
        requests: at least one.
        capabilities: of the server that it goes to.
        cache_key: separates prefix-cache entries; entries of other keys are not seen.
        rids: what the server shall call each request.
        adapters: what the server calls the LoRA adapter of each; by default none. It
            separates prefix-cache entries by them.
        stream: have each response sent when it is finished; its events carry
            ``index``.
    """
    params = []
    for request in requests:
        room = response_room(request, capabilities)
        asked = request.sampling_params.get("max_new_tokens")
        limit = room if asked is None else min(asked, room)
        own = {**request.sampling_params, "max_new_tokens": limit}
        if "min_new_tokens" in own:
            own["min_new_tokens"] = min(own["min_new_tokens"], limit)
        if stream:
            own["stream_interval"] = STREAM_INTERVAL
        params.append(own)
    payload = {
        "input_ids": [list(request.input_ids) for request in requests],
        "sampling_params": params,
        "return_logprob": [
            request.return_prompt_log_probs
            or (wants_log_probs(request) and not request.score_response)
            for request in requests
        ],
        "top_logprobs_num": [
            0 if request.score_response else request.top_log_probs
            for request in requests
        ],
        "logprob_start_len": [_score_start(request) for request in requests],
        "extra_key": [cache_key] * len(requests),
        "rid": list(rids),
        "stream": stream,
    }
    if any(adapters):
        payload["lora_path"] = list(adapters)
    if len(requests) > 1:
        return payload
    # The router takes lists for one prompt only.
    return {
        name: value[0] if isinstance(value, list) else value
        for name, value in payload.items()
    }


def response_room(request: GenerateRequest, capabilities: ServerCapabilities) -> int:
    """Returns the most tokens that the response to a request can have."""
    longest = capabilities.max_context
    if request.score_response:
        # It has to fit in as a prompt afterwards.
        longest = min(longest, capabilities.max_prompt)
    return longest - len(request.input_ids)


def wants_log_probs(request: GenerateRequest) -> bool:
    """Returns whether any log-probability of the response is asked for."""
    return request.return_log_probs or request.top_log_probs > 0


def _score_start(request: GenerateRequest) -> int:
    if request.scored_from is not None:
        return request.scored_from
    return 0 if request.return_prompt_log_probs else -1


def parse_completion(
    reply: Mapping[str, Any],
    request: GenerateRequest,
    *,
    vocab_size: int,
    server: str,
    sent_version: str | None = None,
) -> Completion:
    """Returns what one item of a reply says.

    Args:
        reply: one item of the answer to ``/generate``.
        request: what was asked.
        vocab_size: of the served model.
        server: what messages call the server.
        sent_version: version of the weights when the request was sent. Of a response
            whose server names only the version of its end, another one tells that the
            versions of its tokens are unknown.

    Raises:
        GenerationAbortedError: if the response was cut off.
        RequestRefusedError: if it was aborted because the request is wrong.
        ServerUnavailableError: if the reply lacks something that was asked for.
    """
    try:
        return _parse(reply, request, vocab_size, server, sent_version)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ServerUnavailableError(
            f"{server} sent a malformed reply ({error!r}): {reply!r:.300}"
        ) from error


def _parse(
    reply: Mapping[str, Any],
    request: GenerateRequest,
    vocab_size: int,
    server: str,
    sent_version: str | None,
) -> Completion:
    meta = reply["meta_info"]
    token_ids = reply["output_ids"]
    reason = meta["finish_reason"]
    kind = reason["type"]
    if kind == "abort":
        raise _abort_error(reason, len(token_ids), server)
    if reason.get("matched") == _NAN:
        raise GenerationAbortedError(
            f"{server} ended a response after {len(token_ids)} tokens, the last of "
            f"which is made up: the model's logits were not numbers (NaN). Check the "
            f"weights that were sent last."
        )
    if kind not in ("stop", "length"):
        raise ServerUnavailableError(
            f"{server} ended a response for an unknown reason: {reason!r}."
        )
    if len(token_ids) != meta.get("completion_tokens", len(token_ids)):
        raise ServerUnavailableError(
            f"{server} sent {len(token_ids)} tokens of a response and counts "
            f"{meta['completion_tokens']}; the reply is cut short."
        )
    log_probs = prompt_log_probs = None
    own_scores = not request.score_response
    if request.scored_from is not None:
        scored = request.input_ids[request.scored_from :]
        values = _log_probs(meta, "input_token_logprobs", scored, vocab_size, server)
        log_probs = values[1:]
    elif request.return_log_probs and own_scores:
        log_probs = _log_probs(
            meta, "output_token_logprobs", token_ids, vocab_size, server
        )
    if request.return_prompt_log_probs:
        prompt_log_probs = _log_probs(
            meta, "input_token_logprobs", request.input_ids, vocab_size, server
        )
    top_token_ids = top_log_probs = None
    if request.top_log_probs and own_scores:
        if request.scored_from is None:
            rows = meta.get("output_top_logprobs") or []
        else:
            rows = (meta.get("input_top_logprobs") or [])[1:]
        top_token_ids, top_log_probs = _top_log_probs(
            rows,
            len(token_ids) if request.scored_from is None else len(log_probs or ()),
            request.top_log_probs,
            server,
        )
    final = meta.get("weight_version")
    versions = _version_spans(meta, len(token_ids), sent_version)
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        logprobs_mode=(
            request.logprobs_mode if wants_log_probs(request) and own_scores else None
        ),
        top_token_ids=top_token_ids,
        top_log_probs=top_log_probs,
        prompt_log_probs=prompt_log_probs,
        finish_reason=kind,
        matched_stop=reason.get("matched"),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        versions=versions,
        weight_version=None if final is None else str(final),
        mixed_state=(
            # What is not computed again when the weights change rests on older ones.
            int(meta.get("num_retractions") or 0) < len(versions) - 1
            or (not versions and bool(token_ids))
        ),
        text=reply.get("text"),
    )


def _log_probs(
    meta: Mapping[str, Any],
    key: str,
    token_ids: Sequence[int],
    vocab_size: int,
    server: str,
) -> list[float]:
    # Each entry is [log-prob, token id, text]; the first prompt token has no context.
    entries = meta.get(key)
    if entries is None or len(entries) != len(token_ids):
        found = "none" if entries is None else str(len(entries))
        raise ServerUnavailableError(
            f"{server} was asked for {key} of {len(token_ids)} tokens and sent {found}."
        )
    values = [entry[0] for entry in entries]
    # The server writes the last id of the vocabulary as 0 (its value is the right one).
    last = vocab_size - 1
    if any(
        entry[1] != token and not (token == last and entry[1] == 0)
        for entry, token in zip(entries, token_ids, strict=True)
    ):
        raise ServerUnavailableError(
            f"{server} sent {key} of other tokens than the ones they belong to."
        )
    if values and values[0] is None and key == "input_token_logprobs":
        values[0] = math.nan
    if None in values:
        raise ServerUnavailableError(
            f"{server} left the log-probability at position {values.index(None)} of "
            f"{key} unset, as it does where the logits are not numbers (NaN). Check "
            f"the weights that were sent last."
        )
    return values


def _top_log_probs(
    rows: Sequence[Any], length: int, number: int, server: str
) -> tuple[list[list[int]], list[list[float]]]:
    # For each token a list of [log-prob, token id, text], the likeliest first.
    if len(rows) != length or any(len(row or ()) != number for row in rows):
        raise ServerUnavailableError(
            f"{server} was asked for the {number} likeliest tokens in the place of "
            f"each of {length} and sent {[len(row or ()) for row in rows]!r:.100}."
        )
    return (
        [[int(entry[1]) for entry in row] for row in rows],
        [[float(entry[0]) for entry in row] for row in rows],
    )


def _version_spans(
    meta: Mapping[str, Any], length: int, sent_version: str | None
) -> tuple[VersionSpan, ...]:
    spans = meta.get("weight_versions")
    if spans:
        return tuple(
            VersionSpan(
                version=str(span["version"]), start=span["start"], end=span["end"]
            )
            for span in spans
        )
    version = meta.get("weight_version")
    if version is None or (sent_version is not None and str(version) != sent_version):
        return ()
    return (VersionSpan(version=str(version), start=0, end=length),)


def _abort_error(reason: Mapping[str, Any], length: int, server: str) -> Exception:
    message = reason.get("message") or "Unknown error"
    status = reason.get("status_code")
    if status is not None and 400 <= int(status) < 500:
        refused = RequestRefusedError(
            f"{server} refused the request (HTTP {int(status)}): {message}"
        )
        refused.status = int(status)
        return refused
    return GenerationAbortedError(
        f"{server} aborted a response after {length} tokens ({message}); it is not a "
        f"finished one. Was generation paused with mode 'abort', or the request "
        f"aborted? Send it again."
    )
