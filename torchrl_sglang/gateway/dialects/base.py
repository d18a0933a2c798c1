"""``Dialect``: endpoints, and the form of requests, answers and errors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.gateway.request import Request, Usage
from torchrl_sglang.gateway.session import Turn

THINKING = ("enable_thinking", "thinking")
"""Variables of chat templates for whether a model thinks."""


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
    """Writes the answers to one request."""

    @abc.abstractmethod
    def answer(self, turns: Sequence[Turn], usage: Usage) -> dict[str, Any]:
        """Returns the whole answer, as JSON."""

    @abc.abstractmethod
    def events(self, turns: Sequence[Turn], usage: Usage) -> Iterator[bytes]:
        """Yields the answer as server-sent events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """An address of a dialect to which clients post JSON."""

    path: str
    """Such as ``"/v1/chat/completions"``; sessions have it behind their own path."""
    read: Callable[[Any], Request]
    """Reads a body; raises ``ConfigurationError`` for what is wrong or unsupported."""
    write: Callable[[Request, AnswerInfo], Writer] | None = None
    """Makes the writer of the answers; ``None``: nothing is generated."""
    count: Callable[[int], dict[str, Any]] | None = None
    """Answers with the number of tokens of the prompt, where nothing is generated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error, before it is spelt."""

    status: int
    """Status code of HTTP."""
    message: str
    """A sentence for the client's user."""
    kind: str
    """Such as ``"invalid_request_error"``, a word that all dialects share."""
    code: str | None = None
    """Such as ``"context_length_exceeded"``."""
    too_long: tuple[int, int] | None = None
    """Tokens of the prompt and most tokens of one, if that is why."""


class Dialect(abc.ABC):
    """A protocol of clients.

    A gateway takes others, too: ``Gateway(engine, dialects=[*DIALECTS, Mine()])``.
    """

    endpoints: Sequence[Endpoint]
    """Addresses to which clients post."""

    @abc.abstractmethod
    def error(self, failure: Failure) -> dict[str, Any]:
        """Returns the content of an error."""

    def key(self, headers: Mapping[str, str]) -> str | None:
        """Returns the API key of a request; names of headers are case-insensitive."""
        if key := headers.get("x-api-key"):
            return key
        kind, _, key = headers.get("Authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" and key.strip() else None
