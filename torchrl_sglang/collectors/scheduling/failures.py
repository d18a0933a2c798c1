"""Decides whether a failed group is retried, given up, or ends the collection.

Pure: it remembers earlier failures, and applies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_sglang.errors import (
    ChatTemplateError,
    GenerationAbortedError,
    RequestRefusedError,
    ServerError,
    TaskError,
    UserFunctionError,
    WeightSyncStateError,
)

BACKOFF_SECONDS = 1.0
"""Wait before groups start after the engine failed."""

MOST_FAILURES = 8
"""Groups in a row that are given up before the collection ends with their error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureVerdict:
    """Verdict on a failed group."""

    retry: bool
    """Whether it starts again."""
    attempts: int
    """How often it has failed."""
    engine_began: bool = False
    """Whether it is the first that the engine failed since a group was complete."""
    ends: bool = False
    """Whether the collection ends with the group's error."""
    why: str = ""
    """What to say before that error."""


@dataclass(slots=True)
class _Attempts:
    since: float
    engines: int = 0
    own: int = 0


class GroupFailures:
    """Failures of the groups that are neither complete nor given up.

    An engine recovers, so its failures are borne for a time; a group's own functions
    and environments may fail a number of times. A chat template that refuses a
    later turn ends the collection: groups without such a turn would be selected, for
    example those in which no response calls a tool. When the engine has failed several
    groups for that long and none was complete meanwhile, it is at fault, and the
    collection ends.
    """

    def __init__(self, *, max_retries: int, engine_seconds: float) -> None:
        self.not_before = 0.0
        """When groups may start again, on the monotonic clock."""
        self._max_retries = max_retries
        self._engine_seconds = engine_seconds
        self._attempts: dict[int, _Attempts] = {}
        self._given_up_in_a_row = 0
        # Groups that the engine failed since one was complete.
        self._engine_failed: set[int] = set()

    def complete(self, position: int) -> None:
        """Forgets the failures of a group that is complete, and those in a row."""
        self._attempts.pop(position, None)
        self._given_up_in_a_row = 0
        self._engine_failed.clear()

    def failed(
        self, position: int, error: BaseException, *, now: float
    ) -> FailureVerdict:
        """Returns the verdict on a failed group."""
        attempts = self._attempts.setdefault(position, _Attempts(now))
        engines = is_engines(error)
        engine_began = engines and not self._engine_failed
        if engines:
            attempts.engines += 1
            self._engine_failed.add(position)
            self.not_before = now + BACKOFF_SECONDS
        else:
            attempts.own += 1
        count = attempts.engines + attempts.own
        if isinstance(origin(error), ChatTemplateError):
            return self._refused(position, count)
        is_task = isinstance(origin(error), TaskError)
        if not is_task and self._may_retry(attempts, now):
            return FailureVerdict(retry=True, attempts=count, engine_began=engine_began)
        if engines and len(self._engine_failed) > 1:
            # The engine is at fault, not this group.
            return FailureVerdict(
                retry=True, attempts=count, engine_began=engine_began, ends=True
            )
        del self._attempts[position]
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row < MOST_FAILURES:
            return FailureVerdict(retry=False, attempts=count)
        return FailureVerdict(
            retry=False,
            attempts=count,
            ends=True,
            why=f"{MOST_FAILURES} groups in a row were given up; the last one, of "
            f"prompt {position}, for: ",
        )

    def _refused(self, position: int, attempts: int) -> FailureVerdict:
        del self._attempts[position]
        return FailureVerdict(
            retry=False,
            attempts=attempts,
            ends=True,
            why=f"training on the groups that the chat template takes would select "
            f"data; in a group of prompt {position}, a conversation cannot go on: ",
        )

    def _may_retry(self, attempts: _Attempts, now: float) -> bool:
        if attempts.own > self._max_retries:
            return False
        lasting = now - attempts.since > self._engine_seconds
        return attempts.engines <= self._max_retries or not lasting


def is_engines(error: BaseException) -> bool:
    """Returns whether an error is an engine's, which recovers, or a group's own."""
    # A function may call an engine, too: a judge, for example.
    error = origin(error)
    engines = (ServerError, GenerationAbortedError, WeightSyncStateError)
    return isinstance(error, engines) and not isinstance(error, RequestRefusedError)


def origin(error: BaseException) -> BaseException:
    """Returns the error that a function of the user raised, if the cause is one."""
    named = isinstance(error, UserFunctionError) and error.__cause__ is not None
    return error.__cause__ or error if named else error
