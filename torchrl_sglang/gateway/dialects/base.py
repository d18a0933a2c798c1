"""``Dialect``: endpoints, and the form of requests, answers and errors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.drafts import Draft
from torchrl_sglang.gateway.request import Request, Usage
from torchrl_sglang.gateway.turns import Turn

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
    """Writes the answers to one request.

    A stream has the events of :meth:`begin`, of :meth:`grow` for every more that is
    certain of a response, and of :meth:`events` the rest. A dialect may leave the
    first two out; everything comes at the end then.
    """

    @abc.abstractmethod
    def answer(self, turns: Sequence[Turn], usage: Usage) -> dict[str, Any]:
        """Returns the whole answer, as JSON."""

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        """Yields the events before the first token; called once, or never.

        Args:
            prompt_tokens: tokens of the prompt.
        """
        yield from ()

    def grow(self, number: int, draft: Draft) -> Iterator[bytes]:
        """Yields events of what is new in a response, which is longer each time.

        Args:
            number: of the response, from 0.
            draft: beginning of it.
        """
        yield from ()

    @abc.abstractmethod
    def events(self, turns: Sequence[Turn], usage: Usage) -> Iterator[bytes]:
        """Yields the answer as server-sent events, or what is left of it."""

    def waiting(self) -> bytes:
        """Returns a sign of life in a stream whose answer is not there yet."""
        return b": waiting\n\n"

    def failed(self, failure: Failure, error: Mapping[str, Any]) -> bytes:
        """Returns the events of a stream whose answer failed.

        Args:
            failure: before it is spelt.
            error: as the dialect spells it.
        """
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"


def more(text: str, told: str) -> str:
    """Returns what a text has more than what was told of it.

    Raises:
        GatewayError: if it begins otherwise.
    """
    if not text.startswith(told):
        raise GatewayError(
            "The response is another one than what was streamed of it: it had to begin "
            "anew. It is not recorded; ask again.",
            status=503,
        )
    return text[len(told) :]


Recall: TypeAlias = Callable[[str], Turn | None]
"""Returns the turn whose answer has a name, if its session has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """An address of a dialect to which clients post JSON."""

    path: str
    """Such as ``"/v1/chat/completions"``; sessions have it behind their own path."""
    read: Callable[..., Request]
    """Reads a body; raises ``ConfigurationError`` for what is wrong or unsupported."""
    recalls: bool = False
    """Whether ``read`` has a second argument: a :data:`Recall` of the session."""
    write: Callable[[Request, AnswerInfo], Writer] | None = None
    """Makes the writer of the answers; ``None``: nothing is generated."""
    count: Callable[[int], dict[str, Any]] | None = None
    """Answers with the number of tokens of the prompt, where nothing is generated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """An earlier answer that a client asks for."""

    id: str
    """Id of the answer, as the client says it."""
    turn: Turn
    """Turn of the answer."""
    query: Mapping[str, str]
    """Parameters in the request's address."""
    token_text: Callable[[int], str]
    """Returns the text of a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """An address of a dialect at which clients ask for an earlier answer."""

    path: str
    """Such as ``"/v1/responses/{id}"``; sessions have it behind their own path."""
    find: Callable[[str, Recall], Turn]
    """Returns the turn of the answer with an id; raises ``GatewayError`` if there is
    none."""
    tell: Callable[[Asked], dict[str, Any]]
    """Returns what is answered."""
    forgets: bool = False
    """Delete the answer; its turn stays recorded."""


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
    param: str | None = None
    """Field of the request that is wrong, if one is known."""
    too_long: tuple[int, int] | None = None
    """Tokens of the prompt and most tokens of one, if that is why."""


class Dialect(abc.ABC):
    """A protocol of clients.

    A gateway takes others, too: ``Gateway(engine, dialects=[*DIALECTS, Mine()])``.
    """

    endpoints: Sequence[Endpoint]
    """Addresses to which clients post."""
    lookups: Sequence[Lookup] = ()
    """Addresses at which clients ask for earlier answers."""

    @abc.abstractmethod
    def error(self, failure: Failure) -> dict[str, Any]:
        """Returns the content of an error."""

    def key(self, headers: Mapping[str, str]) -> str | None:
        """Returns the API key of a request; names of headers are case-insensitive."""
        if key := headers.get("x-api-key"):
            return key
        kind, _, key = headers.get("Authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" and key.strip() else None
