"""Gives each request its own answer, also where a client has to repeat it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

KEPT = 256
"""Most requests of a session that a repetition is expected of."""

LOST = 8
"""Most answers that nobody has received, of requests with the same content."""

KEPT_SECONDS = 600.0
"""Time that an answer is kept for a repetition of its request."""


@dataclass(eq=False, slots=True)
class Answer:
    """An answer that is computed, or has been."""

    task: asyncio.Task[Any]
    request_id: str = ""
    """Name of the first request for it."""
    info: Any = None
    """Facts about it that all requests for it are told."""
    waiting: int = 0
    """Requests that wait for the answer, or receive it."""
    delivered: bool = False
    """Whether a request has received the answer."""

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
        """Whether the answer has been computed, or may yet be."""
        return self.is_complete or not (self.task.done() or self.task.cancelling())


@dataclass(eq=False, slots=True)
class _RepeatedRequest:
    """Requests with the same content."""

    answers: list[Answer] = field(default_factory=list)
    """Answers to these requests, computed or lost."""
    asked: int = 0
    """Requests that repeat no other."""
    failures: int = 0
    """Requests without an answer, which may be repeated yet."""
    latest: float = field(default_factory=time.monotonic)
    """Monotonic time of the latest request."""

    def repeated(self) -> Answer | None:
        """Returns the answer to the request that another one repeats.

        ``None`` if it has none. Where others have the same content, only one whose
        delivery failed can be it, and each answer is given to one repetition.
        """
        for answer in self.answers:
            if answer.is_lost:
                return answer
        if self.failures:
            self.failures -= 1
        elif self.asked == len(self.answers) == 1:
            (answer,) = self.answers
            return answer if answer.is_usable and answer.waiting == 1 else None
        return None


class Answers:
    """The answers of one session. Used from one event loop only.

    A repeated request is one that the client says to be a repetition: with the header
    ``x-stainless-retry-count``, which the clients of OpenAI and Anthropic send, or with
    an ``Idempotency-Key`` that another request had. The same request without these asks
    for another response.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _RepeatedRequest] = OrderedDict()

    @asynccontextmanager
    async def to(
        self,
        headers: Mapping[str, str],
        content: bytes,
        compute: Callable[[], Awaitable[Any]],
        *,
        keep: Callable[[Any], Awaitable[None]],
        withdraw: Callable[[Any], None],
        received: Callable[[Any], None] | None = None,
        request_id: str = "",
        info: Any = None,
    ) -> AsyncIterator[Answer]:
        """Gives an answer to a request. The block delivers it, or raises.

        It is computed no more when nobody waits for it.

        Args:
            headers: of the request.
            content: of the request, its path included.
            compute: makes an answer, and keeps it.
            keep: keeps one that was withdrawn.
            withdraw: of an answer that nobody has received.
            received: is told of an answer that a client has received, each time.
            request_id: names the request, and the answer if it is the first one for it.
            info: facts about the answer, which are those of the first request for it.
        """
        named = headers.get("Idempotency-Key", "")
        entry = self._entry(named.encode(errors="replace") + b"\0" + content)
        repeats = headers.get("x-stainless-retry-count", "0") != "0"
        answer = _known(entry, repeats=repeats, named=bool(named))
        if answer is None or answer.is_lost:
            if answer is not None:
                entry.answers.remove(answer)
                compute = _kept_again(answer.task.result(), keep)
                request_id, info = answer.request_id, answer.info
            answer = Answer(asyncio.ensure_future(_call(compute)), request_id, info)
            entry.answers.append(answer)
        answer.waiting += 1
        try:
            yield answer
            answer.delivered = answer.is_complete
            if received is not None and answer.delivered:
                received(answer.task.result())
        finally:
            answer.waiting -= 1
            entry.failures += not answer.is_complete
            _settle(entry, answer, withdraw, named=bool(named))

    def _entry(self, content: bytes) -> _RepeatedRequest:
        now, name = time.monotonic(), hashlib.sha256(content).digest()
        entry = self._entries.setdefault(name, _RepeatedRequest())
        entry.latest = now
        self._entries.move_to_end(name)
        while len(self._entries) > KEPT or (
            next(iter(self._entries.values())).latest < now - KEPT_SECONDS
        ):
            self._entries.popitem(last=False)
        return entry


def _known(entry: _RepeatedRequest, *, repeats: bool, named: bool) -> Answer | None:
    if named:
        return next((each for each in entry.answers if each.is_usable), None)
    if repeats:
        return entry.repeated()
    entry.asked += 1
    return None


def _settle(
    entry: _RepeatedRequest,
    answer: Answer,
    withdraw: Callable[[Any], None],
    *,
    named: bool,
) -> None:
    """Keeps or forgets an answer when a request that had it has ended."""
    if answer.waiting:
        return
    if answer.is_lost:
        withdraw(answer.task.result())
        lost = [each for each in entry.answers if each.is_lost]
        if len(lost) > LOST:
            entry.answers.remove(lost[0])
        return
    if answer.is_complete and named:
        return
    answer.task.cancel()
    if answer in entry.answers:
        entry.answers.remove(answer)
    if not entry.answers and not entry.failures:
        entry.asked = 0


async def _call(compute: Callable[[], Awaitable[Any]]) -> Any:
    return await compute()


def _kept_again(
    result: Any, keep: Callable[[Any], Awaitable[None]]
) -> Callable[[], Awaitable[Any]]:
    async def compute() -> Any:
        await keep(result)
        return result

    return compute
