"""Actions: requests of :func:`.reconcile` to the loop of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_sglang.backends.fleet.adapters import DesiredAdapter
from torchrl_sglang.backends.fleet.replica import Replica, ServerHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """Something to be done outside; doing it twice does no harm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Action):
    """Begin to watch the servers; ``at_once``, do not wait for the next check."""

    at_once: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Tell(Action):
    """Log a sentence."""

    text: str
    warning: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class FailRequests(Action):
    """Fail the requests to this address: its connections may stay open."""

    url: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall(Action):
    """Resend the router's requests if the machine of this server may be gone."""

    handle: ServerHandle | None
    """``None``: a server of another owner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publish(Action):
    """Publish the current server addresses for copies of the engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop(Action):
    """Stop a server started too late."""

    handle: ServerHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll(Action):
    """Poll servers out of rotation, and suspected servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirm(Action):
    """Poll the serving servers before this server counts as current."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadAdapter(Action):
    """Load an adapter into servers."""

    adapter: DesiredAdapter
    servers: tuple[Replica, ...]
    timeout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DropAdapter(Action):
    """Have every server drop an adapter."""

    served_as: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart(Action):
    """Start a server again."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelStart(Action):
    """Cancel the start of a server."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Route(Action):
    """Remove servers from the router and add others."""

    remove: frozenset[str]
    add: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRouter(Action):
    """Start the router again for these servers."""

    urls: tuple[str, ...]
