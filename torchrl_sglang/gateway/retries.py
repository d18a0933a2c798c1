"""Matches requests to their answers, including repeated requests."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

KEPT = 256
"""Most repeatable requests of a session."""

LOST = 8
"""Most undelivered answers of requests with the same content."""

KEPT_SECONDS = 600.0
"""Time to keep an answer for a repetition of its request."""

ATTEMPT_HEADERS = {"x-stainless-retry-count": 0, "x-envoy-attempt-count": 1}
"""Header with the count of a client's or proxy's attempts -> its first value."""

Attempt: TypeAlias = tuple[int, ...]
"""Repetitions by each of :data:`ATTEMPT_HEADERS`; later attempts are greater."""


FIRST: Attempt = (0,) * len(ATTEMPT_HEADERS)
"""A first attempt."""


def attempt_of(headers: Mapping[str, str]) -> Attempt:
    """Returns the number of repetitions before a request."""
    return tuple(
        max(int(value) - first, 0) if re.fullmatch("[0-9]{1,9}", value) else 0
        for name, first in ATTEMPT_HEADERS.items()
        for value in [headers.get(name, "")]
    )


def digest_of(headers: Mapping[str, str], content: bytes) -> str:
    """Returns the hash of equal requests."""
    key = headers.get("Idempotency-Key", "").encode(errors="replace")
    return hashlib.sha256(key + b"\0" + content).hexdigest()


@dataclass(eq=False, slots=True)
class Answer:
    """A pending or computed answer."""

    task: asyncio.Future[Any]
    request_id: str = ""
    """Id of its first request."""
    info: Any = None
    """Common facts of all its requests."""
    attempt: Attempt = FIRST
    """Latest attempt of its request."""
    waiting: int = 0
    """Requests waiting for the answer, or receiving it."""
    latest: object = None
    """Identifies the latest request for the answer."""
    delivered: bool = False
    """Whether the latest request has received the answer."""

    @classmethod
    def recorded(cls, result: Any, *, request_id: str, info: Any) -> Answer:
        """Returns a delivered answer."""
        task = asyncio.get_running_loop().create_future()
        task.set_result(result)
        return cls(task, request_id, info, delivered=True)

    def __await__(self) -> Any:
        return asyncio.shield(self.task).__await__()

    @property
    def is_lost(self) -> bool:
        """Whether only a repetition of the request could receive the answer."""
        return self.is_complete and not self.delivered and not self.waiting

    @property
    def is_complete(self) -> bool:
        """Whether the answer has been computed."""
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is None

    @property
    def is_usable(self) -> bool:
        """Whether the answer has been computed, or still can be."""
        task = self.task
        ends = isinstance(task, asyncio.Task) and bool(task.cancelling())
        return self.is_complete or not (task.done() or ends)


@dataclass(eq=False, slots=True)
class _EqualRequests:
    """Requests with the same content."""

    answers: list[Answer]
    """Answers to these requests: all with waiting requests, the latest delivered
    answer, and at most :data:`LOST` lost answers, of which the oldest are dropped
    first."""
    number: int
    """Number of the requests, without repetitions."""
    failures: list[Attempt] = field(default_factory=list)
    """Latest attempts of requests without an answer."""
    latest: float = field(default_factory=time.monotonic)
    """Monotonic time of the latest request."""

    def find(
        self, attempt: Attempt, is_continued: Callable[[Any], bool]
    ) -> Answer | None:
        """Returns the answer to the request repeated by an attempt.

        ``None`` for the first attempt of a request, or if the request has no answer. An
        attempt repeats an earlier attempt: an undelivered attempt, else a failed
        attempt, else the only attempt. After a continuation, the client has the answer.
        """
        earlier = [answer for answer in self.answers if answer.attempt < attempt]
        for answer in earlier:
            if answer.is_lost:
                return answer
        for failure in self.failures:
            if failure < attempt:
                self.failures.remove(failure)
                return None
        if self.number == len(self.answers) == len(earlier) == 1:
            (answer,) = earlier
            is_seen = answer.is_complete and is_continued(answer.task.result())
            if answer.is_usable and not is_seen:
                return answer
        self.number += 1
        return None

    def settle(self, answer: Answer, withdraw: Callable[[Any], None]) -> None:
        """Withdraws or drops an answer without waiting requests."""
        if answer.waiting:
            return
        if answer.is_lost:
            withdraw(answer.task.result())
        elif not answer.is_complete:
            answer.task.cancel()
            self.answers.remove(answer)
            self.failures = [*self.failures, answer.attempt][-LOST:]
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drops unrepeatable answers: only a lone delivered answer can be repeated."""
        idle = [a for a in self.answers if a.is_complete and not a.waiting]
        for limit, delivered in ((LOST, False), (1, True)):
            for answer in [a for a in idle if a.delivered is delivered][:-limit]:
                self.answers.remove(answer)


class Answers:
    """The answers of a session. Used from a single event loop.

    A request with any of :data:`ATTEMPT_HEADERS` may be a repetition; a request with
    the ``Idempotency-Key`` of an earlier request is. An equal request without these
    headers is for another response.

    After a repetition, the client has not seen the answer, whatever its connection has
    received: only the latest attempt counts.
    """

    def __init__(self, kept_seconds: float = KEPT_SECONDS) -> None:
        self._kept_seconds = kept_seconds
        self._entries: OrderedDict[str, _EqualRequests] = OrderedDict()

    @asynccontextmanager
    async def to(
        self,
        headers: Mapping[str, str],
        digest: str,
        compute: Callable[[], Awaitable[Any]],
        *,
        keep: Callable[[Any], Awaitable[None]],
        withdraw: Callable[[Any], None],
        recorded: Callable[[], list[Answer]] = list,
        is_continued: Callable[[Any], bool] = lambda result: False,
        request_id: str = "",
        info: Any = None,
    ) -> AsyncIterator[Answer]:
        """Yields the answer to a request. The block delivers it, or raises.

        Its computation ends when no request waits for it.

        ``keep`` keeps a withdrawn answer again, ``recorded`` returns answers that an
        earlier process has kept.
        """
        entry, attempt = self._entry(digest, recorded), attempt_of(headers)
        if headers.get("Idempotency-Key"):
            usable = (answer for answer in entry.answers if answer.is_usable)
            answer = next(usable, None)
        else:
            answer = entry.find(attempt, is_continued)
        if answer is None or answer.is_lost:
            if answer is not None:
                entry.answers.remove(answer)
                compute = partial(_keep_again, answer.task.result(), keep)
                request_id, info = answer.request_id, answer.info
            answer = Answer(asyncio.ensure_future(compute()), request_id, info)
            entry.answers.append(answer)
        answer.waiting += 1
        answer.delivered, answer.latest = False, (latest := object())
        answer.attempt = attempt
        try:
            yield answer
            if answer.is_complete and answer.latest is latest:
                answer.delivered = True
        finally:
            answer.waiting -= 1
            entry.settle(answer, withdraw)
            if not answer.is_usable:
                await asyncio.wait([answer.task])

    def _entry(
        self, digest: str, recorded: Callable[[], list[Answer]]
    ) -> _EqualRequests:
        """Returns the requests with a digest, without expired requests."""
        now = time.monotonic()
        if (entry := self._entries.get(digest)) is None:
            answers = recorded()
            entry = self._entries[digest] = _EqualRequests(answers, len(answers))
        entry.latest = now
        self._entries.move_to_end(digest)
        while len(self._entries) > KEPT or (
            next(iter(self._entries.values())).latest < now - self._kept_seconds
        ):
            self._entries.popitem(last=False)
        return entry


async def _keep_again(result: Any, keep: Callable[[Any], Awaitable[None]]) -> Any:
    await keep(result)
    return result
