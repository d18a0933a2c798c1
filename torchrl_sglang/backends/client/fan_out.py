"""Calls many servers with a bounded number of calls in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

AT_ONCE = 256
"""Default limit of calls in flight.

A quarter keeps one process busy, on any network, as a call takes CPU time. The
remainder is for unresponsive servers, whose timeouts run concurrently.
"""

S = TypeVar("S")
T = TypeVar("T")


async def fan_out(
    call: Callable[[S], Awaitable[T]],
    targets: Iterable[S],
    *,
    at_once: int | None = AT_ONCE,
) -> list[T]:
    """Returns the results of ``call`` for all targets, in order.

    A call begins, and so does its timeout, when fewer than ``at_once`` are in flight;
    with ``None`` all begin at once, for servers waiting for each other. The first error
    ends all calls and is raised.
    """
    waiting = list(targets)
    results: dict[int, T] = {}
    numbered = iter(enumerate(waiting))

    async def work() -> None:
        for index, target in numbered:
            results[index] = await call(target)

    count = len(waiting) if at_once is None else min(at_once, len(waiting))
    workers = [asyncio.ensure_future(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
    return [results[index] for index in range(len(waiting))]
