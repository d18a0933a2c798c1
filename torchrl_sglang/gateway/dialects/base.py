"""``Dialect``: endpoints, and the format of requests, answers and errors."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.drafts import Draft
from torchrl_sglang.gateway.request import Request, Usage
from torchrl_sglang.gateway.turns import Turn

THINKING = ("enable_thinking", "thinking")
"""Variables of chat templates to enable thinking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerInfo:
    """Facts about an answer beside its turns."""

    name: str
    """24 hexadecimal digits, of this answer alone."""
    created: int
    """Seconds since the epoch."""
    token_text: Callable[[int], str]
    """Returns the text of a token."""


class Writer(abc.ABC):
    """Formats the answers to a request.

    A stream has the events of :meth:`begin`, of :meth:`grow` for each growth of the
    stable prefix, and of :meth:`events` for the remaining part. A dialect may omit the
    first two; then everything comes at the end.
    """

    @abc.abstractmethod
    def answer(self, turns: Sequence[Turn], usage: Usage) -> dict[str, Any]:
        """Returns the whole answer, as JSON."""

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        """Yields the events before the first token; called at most once.

        Args:
            prompt_tokens: tokens of the prompt.
        """
        yield from ()

    def grow(self, number: int, draft: Draft) -> Iterator[bytes]:
        """Yields events for the growth of a response.

        Args:
            number: number of the response, from 0.
            draft: its stable prefix.
        """
        yield from ()

    @abc.abstractmethod
    def events(self, turns: Sequence[Turn], usage: Usage) -> Iterator[bytes]:
        """Yields the answer as server-sent events, or its remaining part."""

    def waiting(self) -> bytes:
        """Returns a keep-alive of a stream without content."""
        return b": waiting\n\n"

    def failed(self, error: Mapping[str, Any]) -> bytes:
        """Returns the events of a failed stream, from :meth:`Dialect.error`."""
        return event(error, "error")


class ItemEvents(abc.ABC):
    """Events of growing items, of which only the last grows."""

    def __init__(self) -> None:
        self._index = -1
        self._streamed = ""

    def grow(self, items: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        """Yields the growth of items; all but the last are complete.

        Raises:
            GatewayError: if their earlier text has changed.
        """
        for index in range(max(self._index, 0), len(items)):
            if index > self._index:
                if self._index >= 0:
                    yield from self._close(items[self._index])
                self._index, self._streamed = index, ""
                yield from self._open(items[index])
            yield from self._delta(items[index])

    def close(self, items: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        """Yields the end of the last item, if any."""
        if items:
            yield from self._close(items[-1])

    def _more(self, text: str) -> str:
        """Returns the new part of the last item's text."""
        new, self._streamed = more(text, self._streamed), text
        return new

    @abc.abstractmethod
    def _open(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the begin of an item."""

    @abc.abstractmethod
    def _delta(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the growth of an item."""

    @abc.abstractmethod
    def _close(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the end of an item, whose growth was yielded."""


def event(content: Mapping[str, Any], kind: str = "") -> bytes:
    """Returns a server-sent event, of a kind if it has a name."""
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + msgspec.json.encode(content) + b"\n\n"


def pop_object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Removes a field that must be an object or None, and returns it."""
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigurationError(f"{name}={value!r:.200} must be an object.")
    return dict(value or {})


def more(text: str, streamed: str) -> str:
    """Returns the growth of a streamed text.

    Raises:
        GatewayError: if its earlier text has changed.
    """
    if not text.startswith(streamed):
        raise GatewayError(
            "The response differs from its streamed part: it had to begin anew. It "
            "is not recorded; ask again.",
            status=503,
        )
    return text[len(streamed) :]


Recall: TypeAlias = Callable[[str], Turn | None]
"""Returns the turn of a named answer, if its session has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """An address of a dialect for POST requests with JSON."""

    path: str
    """Such as ``"/v1/chat/completions"``; sessions have it after their own path."""
    read: Callable[..., Request]
    """Parses a body; raises ``ConfigurationError`` if it is invalid or unsupported."""
    recalls: bool = False
    """Whether ``read`` has a second argument: a :data:`Recall` of the session."""
    write: Callable[[Request, AnswerInfo], Writer] | None = None
    """Makes the writer of the answers; ``None``: nothing is generated."""
    count: Callable[[int], dict[str, Any]] | None = None
    """Returns the answer with the number of prompt tokens, if nothing is generated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A client's request for an earlier answer."""

    id: str
    """Id of the answer in the request."""
    turn: Turn
    """Turn of the answer."""
    query: Mapping[str, str]
    """Parameters in the request's address."""
    token_text: Callable[[int], str]
    """Returns the text of a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """An address of a dialect for requests for earlier answers."""

    path: str
    """Such as ``"/v1/responses/{id}"``; sessions have it after their own path."""
    find: Callable[[str, Recall], Turn]
    """Returns the turn of the answer with an id; raises ``GatewayError`` if none."""
    tell: Callable[[Asked], dict[str, Any]]
    """Returns the content of the answer."""
    forgets: bool = False
    """Delete the answer; its turn stays recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """An address of a dialect that controls the engine, for its owner."""

    method: str
    """Method of HTTP."""
    path: str
    """Such as ``"/pause"``; also accepted behind the path of a session."""
    call: Callable[[Mapping[str, Any], Mapping[str, Any]], Awaitable[Any]]
    """Called with the parameters of the address and the object in the body; returns the
    answer, as JSON or as a text. On the engine's event loop: await the engine's
    methods, or call them in another thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error, before a dialect formats it."""

    status: int
    """Status code of HTTP."""
    message: str
    """A sentence for the client's user."""
    kind: str
    """Common error type of all dialects, such as ``"invalid_request_error"``."""
    code: str | None = None
    """Such as ``"context_length_exceeded"``."""
    param: str | None = None
    """Invalid field of the request, if known."""
    too_long: tuple[int, int] | None = None
    """Number of prompt tokens and its limit, if it was exceeded."""


class Dialect(abc.ABC):
    """A protocol of clients.

    A gateway accepts other dialects: ``Gateway(engine, dialects=[*DIALECTS, Mine()])``.
    """

    endpoints: Sequence[Endpoint]
    """Addresses for POST requests."""
    lookups: Sequence[Lookup] = ()
    """Addresses for requests for earlier answers."""
    controls: Sequence[Control] = ()
    """Addresses that control the engine."""

    @abc.abstractmethod
    def error(self, failure: Failure) -> dict[str, Any]:
        """Returns the content of an error."""

    def key(self, headers: Mapping[str, str]) -> str | None:
        """Returns the API key of a request; names of headers are case-insensitive."""
        if key := headers.get("x-api-key"):
            return key
        kind, _, key = headers.get("Authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" and key.strip() else None
