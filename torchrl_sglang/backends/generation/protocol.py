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
    "CUT_SHORT",
    "ROUTING_KEY_HEADER",
    "STREAM_INTERVAL",
    "cut_short",
    "finished",
    "parse_completion",
    "response_limit",
    "to_payload",
]

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""A router with a keyed policy sends requests with equal values of this header to one
server."""

CUT_SHORT = "cut_short"
"""Marks a reply that is not whole, because its server has ended."""

STREAM_INTERVAL = 128
"""Tokens between two events of a stream: what is lost with a server is less."""

NAN_STOP = "NaN happened"
"""The stop text that SGLang reports when it sampled from logits that are NaN."""


def to_payload(
    request: GenerateRequest,
    capabilities: ServerCapabilities,
    *,
    cache_key: str,
    rid: str,
    adapter: str | None = None,
    stream: bool = False,
) -> dict[str, Any]:
    """Returns the JSON content of a ``/generate`` call."""
    own = not request.score_response
    start = 0 if request.return_prompt_logprobs else -1
    payload: dict[str, Any] = {
        "input_ids": list(request.input_ids),
        "sampling_params": _limited_params(request, capabilities),
        "return_logprob": request.return_prompt_logprobs
        or (request.wants_logprobs and own),
        "top_logprobs_num": request.top_logprobs if own else 0,
        "logprob_start_len": (
            start if request.scored_from is None else request.scored_from
        ),
        "extra_key": cache_key,
        "rid": rid,
    }
    if stream and payload["sampling_params"]["max_new_tokens"] > STREAM_INTERVAL:
        payload["stream"] = True
        payload["sampling_params"]["stream_interval"] = STREAM_INTERVAL
    return payload if adapter is None else {**payload, "lora_path": adapter}


def _limited_params(
    request: GenerateRequest, capabilities: ServerCapabilities
) -> dict[str, Any]:
    """Returns sampling parameters that are cut to what the context has room for."""
    params = dict(request.sampling_params)
    limit = response_limit(request, capabilities)
    if params.get("max_new_tokens") is not None:
        limit = min(params["max_new_tokens"], limit)
    params["max_new_tokens"] = limit
    if "min_new_tokens" in params:
        params["min_new_tokens"] = min(params["min_new_tokens"], limit)
    return params


def response_limit(request: GenerateRequest, capabilities: ServerCapabilities) -> int:
    """Returns the largest possible number of response tokens."""
    longest = capabilities.max_context
    if request.score_response:
        # Prompt and response are sent as a prompt afterwards.
        longest = min(longest, capabilities.max_prompt)
    return longest - len(request.input_ids)


def finished(event: Response | None, url: str) -> Any:
    """Returns the reply in a stream's last event; raises the error that it holds."""
    reply = None if event is None else event.json()
    if isinstance(reply, dict) and isinstance(reply.get("error"), dict):
        status = reply["error"].get("code")
        Response(
            url=url,
            status=status if isinstance(status, int) else 500,
            body=orjson.dumps(reply),
        ).raise_for_status()
    return reply


def cut_short(event: Any, error: Exception) -> Any:
    """Returns the reply of a server that ended, from its latest event."""
    try:
        reason = {"type": "abort", "message": str(error)}
        meta = {**event["meta_info"], "finish_reason": reason}
        # Lists can have grown since the event was made.
        names = ("output_token_logprobs", "output_top_logprobs")
        lists = {name: meta[name] for name in names if meta.get(name)}
        ids = event["output_ids"]
        length = min(meta["completion_tokens"], len(ids), *map(len, lists.values()))
        meta |= {name: values[:length] for name, values in lists.items()}
        meta["completion_tokens"] = length
        ids = ids[:length]
        return {**event, "output_ids": ids, "meta_info": meta, CUT_SHORT: True}
    except (KeyError, TypeError):
        raise error from None


def parse_completion(
    reply: Mapping[str, Any],
    request: GenerateRequest,
    *,
    vocab_size: int,
    server: str,
    sent_version: str | None = None,
) -> Completion:
    """Returns the completion in a reply; raises an error for any other reply.

    An error for an abort has the tokens until then.
    """
    try:
        read = _Reply(reply, vocab_size, server)
        try:
            read.check_end()
        except GenerationAbortedError as error:
            raise error.replace(partial=read.partial(request, sent_version)) from None
        return read.completion(request, sent_version)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ServerUnavailableError(
            f"{server} sent a malformed reply ({error!r}): {reply!r:.300}"
        ) from error


class _Reply:
    """Reads a reply and checks it."""

    def __init__(self, reply: Mapping[str, Any], vocab_size: int, server: str) -> None:
        self._meta, self._token_ids = reply["meta_info"], reply["output_ids"]
        self._reason: Mapping[str, Any] = self._meta["finish_reason"]
        self._text = reply.get("text")
        self._vocab_size = vocab_size
        self._server = server

    def completion(
        self, request: GenerateRequest, sent_version: str | None
    ) -> Completion:
        """Returns the response that was asked for."""
        meta, length, reason = self._meta, len(self._token_ids), self._reason
        log_probs = prompt_log_probs = top_token_ids = top_log_probs = None
        tops: Sequence[Any] = ()
        own_scores = not request.score_response
        if request.scored_from is not None:
            scored = request.input_ids[request.scored_from :]
            log_probs = self._log_probs("input_token_logprobs", scored)[1:]
            tops, length = (meta.get("input_top_logprobs") or ())[1:], len(log_probs)
        elif own_scores:
            tops = meta.get("output_top_logprobs") or ()
            if request.return_logprobs:
                log_probs = self._log_probs("output_token_logprobs", self._token_ids)
        if request.return_prompt_logprobs:
            prompt = request.input_ids
            prompt_log_probs = self._log_probs("input_token_logprobs", prompt)
        if request.top_logprobs and own_scores:
            rows = self._top_log_probs(tops, length, request.top_logprobs)
            top_token_ids = [[int(entry[1]) for entry in row] for row in rows]
            top_log_probs = [[float(entry[0]) for entry in row] for row in rows]
        final = meta.get("weight_version")
        versions = self._versions(sent_version)
        return Completion(
            token_ids=self._token_ids,
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
                # Unless a retraction recomputed it, the KV cache is of older weights.
                int(meta.get("num_retractions") or 0) < len(versions) - 1
                or (not versions and bool(self._token_ids))
            ),
            text=self._text,
        )

    def partial(
        self, request: GenerateRequest, sent_version: str | None
    ) -> Completion | None:
        """Returns the tokens of an aborted response; ``None`` if they are not known."""
        ids, counted = self._token_ids, self._meta.get("completion_tokens")
        # Some versions send the last token only; and one that is out of the vocabulary
        # would kill the server that is to go on from it.
        if (
            self._reason["type"] != "abort"
            or counted not in (None, len(ids))
            or not all(0 <= token < self._vocab_size for token in ids)
        ):
            return None
        try:
            return self.completion(request, sent_version)
        except (LookupError, TypeError, ValueError, ServerUnavailableError):
            # A request that was aborted in the queue has no log-probs of its prompt.
            return None

    def check_end(self) -> None:
        """Raises an error unless a response ended as it should."""
        reason, length = self._reason, len(self._token_ids)
        kind = reason["type"]
        if kind == "abort":
            raise _abort_error(reason, length, self._server)
        if reason.get("matched") == NAN_STOP:
            raise GenerationAbortedError(
                f"{self._server} ended a response after {length} tokens, the last of "
                f"which is made up: the model's logits were not numbers (NaN). Check "
                f"the weights that were sent last."
            )
        if kind not in ("stop", "length"):
            raise ServerUnavailableError(
                f"{self._server} ended a response for an unknown reason: {reason!r}."
            )
        counted = self._meta.get("completion_tokens", length)
        if length != counted:
            raise ServerUnavailableError(
                f"{self._server} sent {length} tokens of a response and counts "
                f"{counted}; the reply is cut short."
            )

    def _log_probs(self, key: str, token_ids: Sequence[int]) -> list[float]:
        # Each entry is [log-prob, token id, text]; the first prompt token has no
        # context.
        entries = self._meta.get(key)
        if entries is None or len(entries) != len(token_ids):
            found = "none" if entries is None else str(len(entries))
            raise ServerUnavailableError(
                f"{self._server} was asked for {key} of {len(token_ids)} tokens and "
                f"sent {found}."
            )
        values = [entry[0] for entry in entries]
        if [entry[1] for entry in entries] != token_ids and any(
            # The server writes the last id of the vocabulary as 0.
            entry[1] != token and not (token == self._vocab_size - 1 and entry[1] == 0)
            for entry, token in zip(entries, token_ids, strict=True)
        ):
            raise ServerUnavailableError(
                f"{self._server} sent {key} of other tokens than the ones they belong "
                f"to."
            )
        if values and values[0] is None and key == "input_token_logprobs":
            values[0] = math.nan
        if None in values:
            raise ServerUnavailableError(
                f"{self._server} left the log-probability at position "
                f"{values.index(None)} of {key} unset, as it does where the logits are "
                f"not numbers (NaN). Check the weights that were sent last."
            )
        return values

    def _top_log_probs(
        self, rows: Sequence[Any], length: int, number: int
    ) -> Sequence[Any]:
        # One list of [log-prob, token id, text] per position, most probable first.
        if len(rows) != length or any(len(row or ()) != number for row in rows):
            raise ServerUnavailableError(
                f"{self._server} was asked for the top-{number} tokens at {length} "
                f"positions and sent {[len(row or ()) for row in rows]!r:.100}."
            )
        return rows

    def _versions(self, sent_version: str | None) -> tuple[VersionSpan, ...]:
        version, length = self._meta.get("weight_version"), len(self._token_ids)
        spans = self._meta.get("weight_versions")
        if not spans:
            # The server names the last version only; others may have come before.
            if version is None or sent_version not in (None, str(version)):
                return ()
            spans = [{"version": version, "start": 0, "end": length}]
        return tuple(
            VersionSpan(version=str(s["version"]), start=s["start"], end=s["end"])
            for s in spans
        )


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
