"""Replies of SGLang's ``/generate``: their schema, and the completions in them. Pure.

No reply that lacks requested log-probs passes :func:`parse_completion`: a log-prob is
never invented.

Source: ``_handle_batch_output`` in ``sglang/srt/managers/tokenizer_manager.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from torchrl_sglang.backends.client.http import NOT_JSON, HttpResponse
from torchrl_sglang.errors import (
    GenerationAbortedError,
    NotFiniteError,
    RequestRefusedError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.requests.plan import RequestPlan
from torchrl_sglang.requests.token_columns import LOG_PROBS, TokenColumn
from torchrl_sglang.requests.token_values import (
    concatenate,
    same_values,
    to_token_values,
    unknown_values,
)
from torchrl_sglang.types import (
    Adapter,
    Completion,
    TokenLayout,
    TokenValues,
    VersionSpan,
)

NAN_STOP = "NaN happened"
"""SGLang's stop text after sampling from NaN logits."""

ABORTED_EARLY = "Aborted by AbortReq"
"""Message of SGLang, with status 400, for a request that was aborted before its grammar
was compiled (``abort_requests`` in ``sglang/srt/constrained/grammar_manager.py``).
"""


# A reply holds an entry for each token. As objects that Python's garbage collector
# tracks, those of some hundred replies make it walk through the whole process.
class LogProbEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A log-prob: ``[log-prob, token id, text]``."""

    log_prob: float | None
    """``None`` for the first prompt token, and where the logits are NaN."""
    token_id: int


class Span(msgspec.Struct, frozen=True, gc=False):
    """The tokens that one version of the weights generated."""

    version: str | int
    start: int
    end: int


class FinishReason(msgspec.Struct, frozen=True, gc=False):
    """Reason of a response's end."""

    type: str
    matched: Any = None
    """The stop token id or stop string."""
    message: str | None = None
    status_code: int | None = None


class MetaInfo(msgspec.Struct, gc=False):
    """Facts that a server reports with a response."""

    finish_reason: FinishReason | None
    """``None`` in a stream, until the response has ended."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None
    queue_time: float | None = None
    """In seconds; servers with ``enable_metrics`` report it, and the next one."""
    first_token_latency: float | None = None
    weight_version: str | int | None = None
    """Version when the response ended."""
    weight_versions: list[Span] | None = None
    input_token_logprobs: list[LogProbEntry] | None = None
    output_token_logprobs: list[LogProbEntry] | None = None
    input_top_logprobs: list[list[LogProbEntry] | None] | None = None
    output_top_logprobs: list[list[LogProbEntry] | None] | None = None


class Reply(msgspec.Struct, gc=False):
    """A reply of ``/generate``, or one event of its stream."""

    output_ids: list[int]
    meta_info: MetaInfo
    text: str | None = None
    columns: dict[str, Any] = msgspec.field(default_factory=dict, name=" ")
    """Fields of ``meta_info`` that requested columns come in; no part of the JSON."""


class _RawReply(msgspec.Struct, gc=False):
    """A reply whose facts are not decoded."""

    output_ids: list[int]
    meta_info: dict[str, msgspec.Raw]


_DECODER = msgspec.json.Decoder(Reply)
_RAW_DECODER = msgspec.json.Decoder(_RawReply)


def decode_reply(answer: HttpResponse, plan: RequestPlan) -> Reply:
    """Returns the reply in a body; raises the error that a stream's event holds."""
    try:
        reply = _DECODER.decode(answer.body)
        if plan.columns:
            fields = _RAW_DECODER.decode(answer.body).meta_info
            for column, _ in plan.columns:
                if column.field in fields:
                    written = fields[column.field]
                    reply.columns[column.name] = msgspec.json.decode(
                        written, type=column.field_type
                    )
        return reply
    except NOT_JSON as problem:
        content = answer.json()
        error = content.get("error") if isinstance(content, dict) else None
        if isinstance(error, dict):
            status = error.get("code")
            HttpResponse(
                url=answer.url,
                status=status if isinstance(status, int) else 500,
                body=answer.body,
            ).raise_for_status()
        raise ServerUnavailableError(
            f"{answer.url} sent a malformed reply ({problem}): {content!r:.300}"
        ) from problem


def decode_tokens(event: HttpResponse) -> list[int] | None:
    """Returns the tokens in an event of a stream; ``None`` of one that has none."""
    try:
        return _RAW_DECODER.decode(event.body).output_ids
    except NOT_JSON:
        return None


def aborted_early(error: RequestRefusedError) -> Reply:
    """Returns the reply that a refusal is if it is an abort; otherwise raises it."""
    if ABORTED_EARLY not in str(error):
        raise error
    reason = FinishReason(type="abort", message=ABORTED_EARLY, status_code=400)
    return Reply(output_ids=[], meta_info=MetaInfo(finish_reason=reason))


def cut_short(reply: Reply, error: Exception) -> Reply:
    """Returns the reply of a server that ended, from its latest event."""
    ids, meta = reply.output_ids, reply.meta_info
    if meta.completion_tokens is None:
        raise error from None
    # Lists can have grown since the event was made.
    lists = (meta.output_token_logprobs, meta.output_top_logprobs)
    sizes = [len(values) for values in lists if values]
    length = min(meta.completion_tokens, len(ids), *sizes)
    meta = msgspec.structs.replace(
        meta,
        finish_reason=FinishReason(type="abort", message=str(error)),
        completion_tokens=length,
        output_token_logprobs=_first(meta.output_token_logprobs, length),
        output_top_logprobs=_first(meta.output_top_logprobs, length),
    )
    return msgspec.structs.replace(reply, output_ids=ids[:length], meta_info=meta)


def _first(values: list[Any] | None, length: int) -> list[Any] | None:
    return values and values[:length]


def parse_completion(
    reply: Reply,
    plan: RequestPlan,
    *,
    server: str,
    sent_version: str | None = None,
    in_place_versions: Collection[str] = (),
    adapter: Adapter | None = None,
) -> Completion:
    """Returns the completion in a reply; an abort's error carries the tokens so far."""
    reader = _Reader(reply, plan, server, sent_version, adapter)
    try:
        reader.check_end()
    except GenerationAbortedError as error:
        raise error.replace(partial=reader.partial()) from None
    completion = reader.completion()
    if in_place_versions and completion.versions:
        # A server that ran out of memory computed some of the KV cache again.
        later = (span.version for span in completion.versions[1:])
        mixed = any(version in in_place_versions for version in later)
        return replace(completion, mixed_state=mixed)
    return completion


class _Reader:
    def __init__(
        self,
        reply: Reply,
        plan: RequestPlan,
        server: str,
        sent_version: str | None,
        adapter: Adapter | None,
    ) -> None:
        self._sent_version, self._adapter = sent_version, adapter
        self._columns = reply.columns
        self._plan, self._request = plan, plan.request
        self._meta, self._token_ids = reply.meta_info, reply.output_ids
        self._text = reply.text
        self._vocab_size = plan.capabilities.vocab_size
        self._server = server
        if self._meta.finish_reason is None:
            raise ServerUnavailableError(
                f"{server} sent a malformed reply: the response has no finish_reason."
            )
        self._reason = self._meta.finish_reason

    def completion(self) -> Completion:
        """Returns the response that was asked for."""
        request, scored_from = self._request, self._plan.scored_from
        meta, length = self._meta, len(self._token_ids)
        log_probs = prompt_log_probs = top_token_ids = top_log_probs = None
        tops: Sequence[list[LogProbEntry] | None] = ()
        uses_decoding = not self._plan.scores
        if scored_from is not None:
            scored = request.input_ids[scored_from:]
            log_probs = self._log_probs("input_token_logprobs", scored)[1:]
            tops, length = (meta.input_top_logprobs or ())[1:], len(log_probs)
        elif uses_decoding:
            tops = meta.output_top_logprobs or ()
            if request.return_logprobs:
                log_probs = self._log_probs("output_token_logprobs", self._token_ids)
        if request.return_prompt_logprobs:
            prompt = request.input_ids
            prompt_log_probs = self._log_probs("input_token_logprobs", prompt)
        if request.top_logprobs and uses_decoding:
            rows = self._top_entries(tops, length, request.top_logprobs)
            top_token_ids = [[entry.token_id for entry in row] for row in rows]
            top_log_probs = [[_known(entry.log_prob) for entry in row] for row in rows]
        final = meta.weight_version
        versions = self._versions()
        columns, prompt_columns = self._read_columns()
        among_support = columns.pop(LOG_PROBS.name, None)
        if among_support is not None and request.return_logprobs:
            log_probs = among_support.tolist()
        return Completion(
            token_ids=self._token_ids,
            log_probs=log_probs,
            logprobs_mode=(
                request.logprobs_mode
                if request.wants_logprobs and uses_decoding
                else None
            ),
            top_token_ids=top_token_ids,
            top_log_probs=top_log_probs,
            prompt_log_probs=prompt_log_probs,
            columns=columns,
            prompt_columns=prompt_columns,
            finish_reason=self._reason.type,  # type: ignore[arg-type]  # Checked.
            matched_stop=self._reason.matched,
            cached_tokens=meta.cached_tokens or 0,
            versions=versions,
            weight_version=None if final is None else str(final),
            mixed_state=(
                # Unless a retraction recomputed it, the KV cache is of older weights.
                (meta.num_retractions or 0) < len(versions) - 1
                or (not versions and bool(self._token_ids))
            ),
            text=self._text,
            adapter=None if self._adapter is None else self._adapter.name,
            adapter_version=None if self._adapter is None else self._adapter.version,
        )

    def partial(self) -> Completion | None:
        """Returns the tokens of an aborted response; ``None`` if they are not known."""
        ids, counted = self._token_ids, self._meta.completion_tokens
        # Some versions send the last token only; and one that is out of the vocabulary
        # would kill the server that is to go on from it.
        if (
            self._reason.type != "abort"
            # Such a response holds a token after another prompt.
            or ABORTED_EARLY in (self._reason.message or "")
            or counted not in (None, len(ids))
            or not all(0 <= token < self._vocab_size for token in ids)
        ):
            return None
        try:
            return self.completion()
        except (ServerUnavailableError, NotFiniteError):
            # A request that was aborted in the queue has no log-probs of its prompt.
            return None

    def check_end(self) -> None:
        """Raises an error unless a response ended as it should."""
        length = len(self._token_ids)
        check_finished(self._reason, length, self._server)
        counted = self._meta.completion_tokens
        if counted not in (None, length):
            raise ServerUnavailableError(
                f"{self._server} sent {length} tokens of a response and counts "
                f"{counted}; the reply is cut short."
            )

    def _log_probs(self, key: str, token_ids: Sequence[int]) -> list[float]:
        # The first prompt token has no context.
        entries: list[LogProbEntry] | None = getattr(self._meta, key)
        if entries is None or len(entries) != len(token_ids):
            count = "none" if entries is None else str(len(entries))
            raise ServerUnavailableError(
                f"{self._server} was asked for {key} of {len(token_ids)} tokens and "
                f"sent {count}."
            )
        values = [entry.log_prob for entry in entries]
        if [entry.token_id for entry in entries] != token_ids and any(
            # The server writes the last id of the vocabulary as 0.
            entry.token_id != token
            and not (token == self._vocab_size - 1 and entry.token_id == 0)
            for entry, token in zip(entries, token_ids, strict=True)
        ):
            raise ServerUnavailableError(
                f"{self._server} sent {key} of other tokens than the ones they belong "
                f"to."
            )
        if values and values[0] is None and key == "input_token_logprobs":
            values[0] = math.nan
        if None in values:
            raise NotFiniteError(
                f"{self._server} left the log-probability at position "
                f"{values.index(None)} of {key} unset, as it does where the logits are "
                f"not numbers (NaN). Check the weights that were sent last."
            )
        return values  # type: ignore[return-value]  # None of them is None.

    def _top_entries(
        self, rows: Sequence[list[LogProbEntry] | None], length: int, number: int
    ) -> list[list[LogProbEntry]]:
        # One list per position, most probable first.
        entries = [row for row in rows if row is not None and len(row) == number]
        if not len(entries) == len(rows) == length:
            raise ServerUnavailableError(
                f"{self._server} was asked for the top-{number} tokens at {length} "
                f"positions and sent {[len(row or ()) for row in rows]!r:.100}."
            )
        return entries

    def _read_columns(self) -> tuple[dict[str, TokenValues], dict[str, TokenValues]]:
        request, capabilities = self._request, self._plan.capabilities
        length = len(self._token_ids)
        prompt_length = len(request.input_ids) - request.columns_from
        response, prompt = {}, {}
        for column, layout in self._plan.columns:
            start = prompt_length if column.of_prompt else 0
            if column.of_request is not None:
                value = column.of_request(request.sampling_params, capabilities)
                response[column.name] = same_values(layout, length, value)
                continue
            if not start + length:
                response[column.name] = unknown_values(layout, 0)
                continue
            if column.late and self._ended_early(column):
                # The request that goes on asks for them.
                continue
            values = self._read_column(column, layout, start + length)
            values = self._forget_recomputed(column, values, start)
            response[column.name] = values[start:]
            if column.of_prompt:
                prompt[column.name] = values[:start]
        return response, prompt

    def _read_column(
        self, column: TokenColumn, layout: TokenLayout, length: int
    ) -> TokenValues:
        if column.name not in self._columns:
            raise ServerUnavailableError(
                f"{self._server} was asked for {column.name!r} of {length} tokens and "
                f"sent no {column.field!r}."
            )
        count = length - column.late
        try:
            rows = column.read(self._columns[column.name], count)
            if isinstance(rows, np.ndarray) and rows.ndim == 1 and layout.shape:
                rows = rows.reshape(-1, *layout.shape)
            if self._reason.type == "abort":
                # Lists can have grown since the response was cut.
                rows = rows[:count]
            if len(rows) != count:
                raise ValueError(f"it has {len(rows)} entries")
            values = to_token_values(rows, layout)
            return concatenate([values, unknown_values(layout, length - count)])
        except (LookupError, OverflowError, TypeError, ValueError) as error:
            raise ServerUnavailableError(
                f"{self._server} was asked for {column.name!r} of {length} tokens, and "
                f"{column.field!r} of its reply is not that: {error}."
            ) from error

    def _ended_early(self, column: TokenColumn) -> bool:
        """Returns whether the server ended before it could report a column."""
        return self._reason.type == "abort" and column.name not in self._columns

    def _forget_recomputed(
        self, column: TokenColumn, values: TokenValues, start: int
    ) -> TokenValues:
        """Leaves out values that a server computed again with newer weights.

        Another process has updated the weights: this one would have aborted the
        request.
        """
        spans = self._meta.weight_versions or ()
        if not (column.late and self._meta.num_retractions and len(spans) > 1):
            return values
        # The first token of a span was computed from the one before it.
        newest = start + max(spans[-1].start - 1, 0)
        forgotten = unknown_values(values.layout, newest - start)
        return concatenate([values[:start], forgotten, values[newest:]])

    def _versions(self) -> tuple[VersionSpan, ...]:
        version, length = self._meta.weight_version, len(self._token_ids)
        spans = self._meta.weight_versions
        if not spans:
            # The server names the last version only; others may have come before.
            if version is None or self._sent_version not in (None, str(version)):
                return ()
            spans = [Span(version=version, start=0, end=length)]
        return tuple(
            VersionSpan(version=str(span.version), start=span.start, end=span.end)
            for span in spans
        )


def _known(log_prob: float | None) -> float:
    return math.nan if log_prob is None else log_prob


def check_finished(
    reason: FinishReason,
    length: int,
    server: str,
    finished: Collection[str] = ("stop", "length"),
) -> None:
    """Raises an error unless a response of this length came to its own end."""
    if reason.type == "abort":
        raise _abort_error(reason, length, server)
    if reason.matched == NAN_STOP:
        raise NotFiniteError(
            f"{server} ended a response after {length} tokens, the last of which is "
            f"made up: the model's logits were not numbers (NaN). Check the weights "
            f"that were sent last."
        )
    if reason.type not in finished:
        raise ServerUnavailableError(
            f"{server} ended a response for an unknown reason: {reason!r}."
        )


def _abort_error(reason: FinishReason, length: int, server: str) -> SGLangError:
    message, status = reason.message or "no reason given", reason.status_code
    if ABORTED_EARLY in message:
        length, status = 0, None
    if status is not None and 400 <= status < 500:
        return RequestRefusedError(
            f"{server} refused the request (HTTP {status}): {message}", status=status
        )
    if status is not None and status >= 500:
        # An answer that is not streamed has this status as its own.
        return ServerUnavailableError(
            f"{server} failed (HTTP {status}): {message}", transient=True, status=status
        )
    return GenerationAbortedError(
        f"{server} aborted a response after {length} tokens ({message}); it is not "
        f"finished. Was generation paused with mode 'abort', or the request aborted? "
        f"Send it again."
    )
