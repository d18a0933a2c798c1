"""Payloads and replies of SGLang's ``/generate``. Pure.

No reply that lacks requested log-probs passes :func:`parse_completion`: a log-prob is
never invented.

Source: ``GenerateReqInput`` in ``sglang/srt/managers/io_struct.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from torchrl_sglang.backends.client.http import Response
from torchrl_sglang.backends.generation.request import GenerateRequest
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerUnavailableError,
)
from torchrl_sglang.types import Completion, ServerCapabilities, VersionSpan

__all__ = [
    "ROUTING_KEY_HEADER",
    "finished_reply",
    "parse_completion",
    "reply_position",
    "response_limit",
    "to_payload",
]

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""A router with a keyed policy sends requests with equal values of this header to one
server."""

STREAM_INTERVAL = 2**30
"""Tokens between two events of a response: only its first token and its end come."""

NAN_STOP = "NaN happened"
"""The stop text that SGLang reports when it sampled from logits that are NaN."""


def to_payload(
    requests: Sequence[GenerateRequest],
    capabilities: ServerCapabilities,
    *,
    cache_key: str,
    rids: Sequence[str],
    adapters: Sequence[str | None] = (),
    stream: bool = False,
) -> dict[str, Any]:
    """Returns the JSON content of one ``/generate`` call for one or more requests.

    ``cache_key`` separates prefix-cache entries, ``rids`` and ``adapters`` are the
    server's names, and ``stream`` sends each response when it is finished.
    """
    rows = []
    for index, request in enumerate(requests):
        own = not request.score_response
        row = {
            "input_ids": list(request.input_ids),
            "sampling_params": _limited_params(request, capabilities, stream),
            "return_logprob": request.return_prompt_logprobs
            or (request.wants_logprobs and own),
            "top_logprobs_num": request.top_logprobs if own else 0,
            "logprob_start_len": _logprob_start(request),
            "extra_key": cache_key,
            "rid": rids[index],
        }
        if any(adapters):
            row["lora_path"] = adapters[index]
        rows.append(row)
    if len(rows) == 1:
        # The router takes lists for several prompts only.
        return {**rows[0], "stream": stream}
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {**columns, "stream": stream}


def _limited_params(
    request: GenerateRequest, capabilities: ServerCapabilities, stream: bool
) -> dict[str, Any]:
    """Returns sampling parameters that are cut to what the context has room for."""
    params = dict(request.sampling_params)
    limit = response_limit(request, capabilities)
    if params.get("max_new_tokens") is not None:
        limit = min(params["max_new_tokens"], limit)
    params["max_new_tokens"] = limit
    if "min_new_tokens" in params:
        params["min_new_tokens"] = min(params["min_new_tokens"], limit)
    if stream:
        params["stream_interval"] = STREAM_INTERVAL
    return params


def response_limit(request: GenerateRequest, capabilities: ServerCapabilities) -> int:
    """Returns the largest possible number of response tokens."""
    longest = capabilities.max_context
    if request.score_response:
        # Prompt and response are sent as a prompt afterwards.
        longest = min(longest, capabilities.max_prompt)
    return longest - len(request.input_ids)


def _logprob_start(request: GenerateRequest) -> int:
    if request.scored_from is not None:
        return request.scored_from
    return 0 if request.return_prompt_logprobs else -1


def finished_reply(event: Any, url: str) -> dict[str, Any] | None:
    """Returns an event if it ends a response; raises the error that it may hold."""
    if isinstance(event, dict) and isinstance(event.get("error"), dict):
        status = event["error"].get("code")
        Response(
            url=f"{url}/generate",
            status=status if isinstance(status, int) else 500,
            body=orjson.dumps(event),
        ).raise_for_status()
    try:
        finished = event["meta_info"]["finish_reason"]
    except (KeyError, TypeError) as error:
        raise _malformed(event, url) from error
    return None if finished is None else event


def reply_position(reply: Mapping[str, Any], size: int, url: str) -> int:
    """Returns the position in its batch that a reply of a stream belongs to."""
    position = reply.get("index")
    if type(position) is int and 0 <= position < size:
        return position
    # The server does not number the reply to a single request.
    if position is None and size == 1:
        return 0
    raise _malformed(reply, url)


def _malformed(event: Any, url: str) -> ServerUnavailableError:
    return ServerUnavailableError(
        f"{url} sent a malformed reply: {event!r:.300}", status=200
    )


def parse_completion(
    reply: Mapping[str, Any],
    request: GenerateRequest,
    *,
    vocab_size: int,
    server: str,
    sent_version: str | None = None,
) -> Completion:
    """Returns the completion in one item of a reply.

    ``sent_version`` is the weight version when the request was sent. Where the server
    reports only the version at the end and it differs, ``versions`` are unknown.

    Raises:
        GenerationAbortedError: if an abort cut the response off.
        RequestRefusedError: if the server aborted it because the request is wrong.
        ServerUnavailableError: if the reply is malformed or lacks something requested.
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
    meta, token_ids = reply["meta_info"], reply["output_ids"]
    reason = meta["finish_reason"]
    _check_end(reason, meta, len(token_ids), server)
    log_probs = prompt_log_probs = top_token_ids = top_log_probs = None
    own_scores = not request.score_response
    if request.scored_from is not None:
        scored = request.input_ids[request.scored_from :]
        values = _log_probs(meta, "input_token_logprobs", scored, vocab_size, server)
        log_probs = values[1:]
    elif request.return_logprobs and own_scores:
        log_probs = _log_probs(
            meta, "output_token_logprobs", token_ids, vocab_size, server
        )
    if request.return_prompt_logprobs:
        prompt_log_probs = _log_probs(
            meta, "input_token_logprobs", request.input_ids, vocab_size, server
        )
    if request.top_logprobs and own_scores:
        if request.scored_from is None:
            rows, length = meta.get("output_top_logprobs") or [], len(token_ids)
        else:
            rows = (meta.get("input_top_logprobs") or [])[1:]
            length = len(log_probs or ())
        top_token_ids, top_log_probs = _top_log_probs(
            rows, length, request.top_logprobs, server
        )
    final = meta.get("weight_version")
    versions = _version_spans(meta, len(token_ids), sent_version)
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        logprobs_mode=(
            request.logprobs_mode if request.wants_logprobs and own_scores else None
        ),
        top_token_ids=top_token_ids,
        top_log_probs=top_log_probs,
        prompt_log_probs=prompt_log_probs,
        finish_reason=reason["type"],
        matched_stop=reason.get("matched"),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        versions=versions,
        weight_version=None if final is None else str(final),
        mixed_state=(
            # Unless a retraction recomputed it, the KV cache is of the older weights.
            int(meta.get("num_retractions") or 0) < len(versions) - 1
            or (not versions and bool(token_ids))
        ),
        text=reply.get("text"),
    )


def _check_end(
    reason: Mapping[str, Any], meta: Mapping[str, Any], length: int, server: str
) -> None:
    """Raises an error unless a response ended as it should."""
    kind = reason["type"]
    if kind == "abort":
        raise _abort_error(reason, length, server)
    if reason.get("matched") == NAN_STOP:
        raise GenerationAbortedError(
            f"{server} ended a response after {length} tokens, the last of which is "
            f"made up: the model's logits were not numbers (NaN). Check the weights "
            f"that were sent last."
        )
    if kind not in ("stop", "length"):
        raise ServerUnavailableError(
            f"{server} ended a response for an unknown reason: {reason!r}."
        )
    if length != meta.get("completion_tokens", length):
        raise ServerUnavailableError(
            f"{server} sent {length} tokens of a response and counts "
            f"{meta['completion_tokens']}; the reply is cut short."
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
    # One list of [log-prob, token id, text] per position, the most probable first.
    if len(rows) != length or any(len(row or ()) != number for row in rows):
        raise ServerUnavailableError(
            f"{server} was asked for the top-{number} tokens at {length} positions and "
            f"sent {[len(row or ()) for row in rows]!r:.100}."
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
        return RequestRefusedError(
            f"{server} refused the request (HTTP {int(status)}): {message}",
            status=int(status),
        )
    return GenerationAbortedError(
        f"{server} aborted a response after {length} tokens ({message}); it is not "
        f"finished. Was generation paused with mode 'abort', or the request aborted? "
        f"Send it again."
    )
