"""What the owner of a gateway and its workers tell and ask each other."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.gateway.store import TurnRow
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.types import ServerCapabilities

# From the owner.


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The first message to a worker."""

    options: bytes
    """Pickled :class:`.ServingOptions`; classes of the user's script are in it."""
    capabilities: ServerCapabilities
    """Capabilities of the engine."""
    model_path: str
    """Name of the model that clients are told."""
    host: str
    """Address to listen on."""
    port: int
    """Port to listen on; 0 for a free one."""
    shares_port: bool = False
    """Whether the owner listens there, too, in the place of a process that ended."""
    owner_url: str
    """Address of the owner, for requests that a worker does not serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddSession:
    """A session that the worker serves from now on."""

    name: str
    """Name of the session."""
    key: str
    """Its key, which no other session ever has."""
    created: float
    """Seconds since the epoch at which it began."""
    expires: float | None
    """Seconds since the epoch at which its key opens it no more."""
    rows: Sequence[TurnRow] = ()
    """Its turns so far, in the order of their numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherSession:
    """A session that another process serves: its key opens no other one."""

    key: str
    """Key of the session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DropSession:
    """A session of any process that was dropped."""

    key: str
    """Key of the session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """Part of the answer to :class:`Generate`: tokens so far."""

    index: int
    """Index of the request."""
    start: int
    """Tokens before these that have been told already, and hold."""
    token_ids: array[int]
    """Tokens behind them."""


# From a worker.


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """The worker serves."""

    port: int
    """Port that it listens on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailed:
    """The worker cannot serve, and ends."""

    reason: str
    """A sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Synchronize:
    """Asks for an answer when all that was told before has been sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentPrompt:
    """Tokens of a prompt, without those that the owner has."""

    parent: int | None
    """Number of the turn whose tokens it begins with."""
    token_ids: array[int]
    """Tokens behind them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Asks for the completions of one session's requests."""

    requests: Sequence[GenerateRequest]
    """Requests, without their prompts."""
    prompts: Sequence[SentPrompt]
    """Prompt of each request; several may have the same one."""
    live: bool
    """Whether tokens are told as they come."""
    timeout: float | None
    """Timeout of all, in seconds."""
    request_timeout: float | None
    """Timeout of each from when it is sent, in seconds."""
    return_exceptions: bool
    """Return the error of a request in its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parse:
    """Asks a parser of the servers what is in a text."""

    path: str
    """Its route."""
    content: Mapping[str, Any]
    """Content of the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepTurns:
    """Asks that turns are kept, before clients see them."""

    key: str
    """Key of their session."""
    rows: Sequence[TurnRow]
    """Turns, each behind the one that it goes on from."""
    new: int
    """How many of them, the last ones, are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WithdrawTurns:
    """Turns that no client has seen."""

    key: str
    """Key of their session."""
    numbers: Sequence[int]
    """Numbers of the turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedTurns:
    """Turns that a client has received."""

    key: str
    """Key of their session."""
    numbers: Sequence[int]
    """Numbers of the turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnnameTurn:
    """Asks that the name of a turn's answer is forgotten."""

    key: str
    """Key of its session."""
    number: int
    """Number of the turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flush:
    """Asks for an answer when everything so far is in the file."""
