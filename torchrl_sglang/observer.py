"""Events that collectors and gateways publish to subscribers.

A subscriber, such as :class:`.RunRecorder`, is a function of one event. It runs in the
publishing thread, several calls may overlap, and it must return at once.

There are many of these objects: msgspec's structs take a quarter of the time of
dataclasses, and the garbage collector does not visit them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import msgspec

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Completion, SyncReport

GROUP_IDS = count(1)
"""Numbers of groups in this process."""


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One response of the policy."""

    messages: Sequence[Mapping[str, Any]]
    """Messages between the previous response and this one."""
    reply: Mapping[str, Any]
    """The response as a message."""
    completion: Completion
    """Tokens, log-probs and weight versions of the response."""
    spans: Sequence[tuple[int, int]]
    """Policy version and number of tokens of each part of the response."""
    prompt_tokens: int
    """Tokens of the prompt."""
    number: int
    """Number of the turn; numbers of a gateway's session ascend."""
    parent: int | None = None
    """Number of the turn that it continues; ``None`` for a first turn."""
    branch: str = ""
    """Why it does not continue the end of an earlier turn, if so."""
    start: float | None = None
    """When its prompt was sent, in seconds since the epoch; ``None`` if unknown."""
    end: float | None = None
    """When its response was complete."""
    reward: float | None = None
    """Reward of this turn alone."""
    is_trained: bool = True
    """Whether the loss includes its tokens."""


class RowRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of a batch."""

    tokens: Sequence[Any]
    """All of its tokens, as one or more lists or arrays."""
    turns: Sequence[int]
    """Numbers of the turns in its response, in their order."""
    reward: float | None = None
    """Its reward; ``None`` without one."""


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A conversation, or an agent's session."""

    turns: Sequence[TurnRecord]
    rows: Sequence[RowRecord]
    """Rows that it has in a batch."""
    reward: float | None
    """Its return; ``None`` without a reward."""
    rewards: Mapping[str, float] = {}
    """Values of the named reward functions."""
    truncated: bool = False
    """Whether the context or the number of turns ended it."""
    trailing: Sequence[Mapping[str, Any]] = ()
    """Messages after its last response."""


class GroupStarted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group has started; its later events refer to this one."""

    position: int
    """Position of its prompt; for a gateway's session, its number."""
    version: int = 0
    """Policy version."""
    name: str = ""
    """Name of a gateway's session."""
    start: float = msgspec.field(default_factory=time.time)
    """When it started, in seconds since the epoch."""
    id: int = msgspec.field(default_factory=partial(next, GROUP_IDS))
    """Number of the group in this process."""


class GroupEnded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The conversations of a group are complete."""

    group: GroupStarted
    responses: Callable[[], Sequence[ResponseRecord]]
    """Returns them; may be called later, in another thread."""
    tokens: int
    """Tokens of all responses."""
    tokenizer: Any
    """Tokenizer of the policy."""
    versions: tuple[int, int]
    """Policy versions at its start and now; of a session, oldest and newest."""
    status: str = "complete"
    """``"complete"``, ``"filtered"`` out of training, or a gateway's ``"session"``."""
    end: float = msgspec.field(default_factory=time.time)
    """When it ended, in seconds since the epoch."""


class GroupFailed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group has failed."""

    group: GroupStarted
    error: str
    retried: bool
    """Whether its prompt starts again."""


class GroupStale(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A complete group became too old before a batch took it."""

    group: GroupStarted


class GroupsTaken(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A batch, or a replay buffer, took groups."""

    number: int
    """Number of the batch, from 1."""
    version: int
    """Policy version."""
    groups: Sequence[GroupStarted]


class WeightsUpdated(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A weight update has ended."""

    version: int
    """Policy version from now on."""
    report: SyncReport | None
    """``None`` for a failed update whose weights servers generated with."""


class PhaseEnded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A phase of the trainer has ended, such as waiting for a batch."""

    name: str
    start: float
    """In seconds since the epoch."""
    end: float


class CollectorStarted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A collector exists."""

    engine: Any
    """Its engine."""
    read: Callable[[], Mapping[str, Any] | None]
    """Returns the collector's current figures; ``None`` after its end."""


Event: TypeAlias = (
    GroupStarted
    | GroupEnded
    | GroupFailed
    | GroupStale
    | GroupsTaken
    | WeightsUpdated
    | PhaseEnded
    | CollectorStarted
)

Subscriber: TypeAlias = Callable[[Event], object]


def check_recorder(recorder: Any) -> Subscriber | None:
    """Returns an argument ``recorder``.

    Raises:
        ConfigurationError: if it is not callable.
    """
    if recorder is None or callable(recorder):
        subscriber: Subscriber | None = recorder
        return subscriber
    raise ConfigurationError(
        f"recorder must be a RunRecorder or another function of an event, got "
        f"{recorder!r}; give RunRecorder(folder)."
    )


class Publisher:
    """Calls a subscriber with events; its first error is logged, and none is raised.

    Args:
        subscriber: takes each event; ``None`` for nobody.
    """

    def __init__(self, subscriber: Subscriber | None = None) -> None:
        self._subscriber = subscriber
        self._has_warned = False

    def __bool__(self) -> bool:
        """Whether there is a subscriber."""
        return self._subscriber is not None

    def __call__(self, event: Event) -> None:
        """Publishes an event."""
        if self._subscriber is None:
            return
        try:
            self._subscriber(event)
        except Exception as error:  # noqa: BLE001 - Subscribers never end a run.
            if not self._has_warned:
                self._has_warned = True
                torchrl_logger.warning(
                    f"The recorder {self._subscriber!r} raised {error!r} on "
                    f"{type(event).__name__}; the run continues, and further errors of "
                    f"this recorder are not logged."
                )
