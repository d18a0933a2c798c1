"""Sleep and wake-up: GPU memory that servers give back for a while.

It stands between :class:`~torchrl_sglang.AsyncSGLang` and the control plane. A server
ends when it is asked to release memory while a request is in it, to release what it has
released, or to resume what it has not; so nothing is sent that it does not survive::

    sleep:    no new calls → drain or abort → pause → release
    wake_up:  resume memory → let generation go on

What each server has released is known by :class:`.fleet.Replica`. Servers are paused
for as long as any of them sleeps. Released weights are weights in doubt, which the next
update heals, as it does after an update that failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from torchrl_sglang.backends.client.capabilities import what_keeps_awake
from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.fleet.membership import Fleet, Replica, in_order
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerTimeoutError,
    SGLangError,
    UnsupportedByServerError,
    WeightSyncStateError,
)
from torchrl_sglang.types import PauseMode, ServerCapabilities

__all__ = ["Memory"]

MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
"""The kinds of memory that SGLang can release."""

DRAIN_TIMEOUT_SECONDS = 60.0
"""Default budget for requests to end before a server is put to sleep."""

DRAIN_POLL_SECONDS = 0.05
"""How often it is looked whether they have."""

MEMORY_TIMEOUT_SECONDS = 120.0
"""Budget for a server to release or resume memory; backed up weights are copied."""

T = TypeVar("T")


def check_tags(tags: str | Iterable[str]) -> frozenset[str]:
    """Returns kinds of memory as a set.

    Raises:
        ConfigurationError: if one is unknown, or there is none.
    """
    wanted = frozenset([tags] if isinstance(tags, str) else tags)
    unknown = wanted.difference(MEMORY_TAGS)
    if unknown or not wanted:
        raise ConfigurationError(
            f"tags={tags!r} names no memory that can sleep; give one or more of "
            f"{', '.join(map(repr, MEMORY_TAGS))}."
        )
    return wanted


def check_can_sleep(capabilities: ServerCapabilities, url: str) -> None:
    """Checks that memory of the servers can be released.

    Raises:
        UnsupportedByServerError: if they were not started for it.
    """
    if not capabilities.can_sleep:
        name, value, needed = next(what_keeps_awake(capabilities.server_args))
        raise UnsupportedByServerError(
            f"The server at {url} has {name}={value!r}, so it cannot give memory back; "
            f"start it with {name}={needed!r}."
        )


def check_weights_awake(asleep: frozenset[str]) -> None:
    """Checks that there is memory that an update of the weights can be written to.

    Raises:
        WeightSyncStateError: if the weights are asleep.
    """
    if "weights" in asleep:
        raise WeightSyncStateError(
            "The weights are asleep, and an update would have no memory to go to; call "
            "wake_up('weights') first."
        )


class Memory:
    """Puts the servers of an engine to sleep. Used from the background loop only.

    Args:
        fleet: the servers, and what of their memory is released.
        control: control calls to them.
        under_way: returns how many requests of this engine have no answer yet.
        abort: ends every request on the servers.
    """

    def __init__(
        self,
        fleet: Fleet,
        control: ControlPlane,
        *,
        under_way: Callable[[], int],
        abort: Callable[[], Awaitable[Any]],
    ) -> None:
        self._fleet = fleet
        self._control = control
        self._under_way = under_way
        self._abort = abort
        # Who was interrupted may still be at it.
        self._turn = asyncio.Lock()

    async def sleep(
        self, tags: frozenset[str], *, abort_first: bool, drain_timeout: float
    ) -> None:
        """Releases memory of every server; see :meth:`.AsyncSGLang.sleep`."""
        async with self._turn:
            fleet = self._fleet
            if fleet.asleep:
                replicas = fleet.fall_asleep(tags)
            else:
                replicas = await self._drain(tags, abort_first, drain_timeout)
            lacking = [each for each in replicas if tags - each.released]
            if lacking:
                await _to_the_end(self._release(lacking, tags))

    async def _drain(
        self, tags: frozenset[str], abort_first: bool, budget: float
    ) -> list[Replica]:
        """Waits until nothing runs; from then on the fleet takes no more requests."""
        fleet, deadline = self._fleet, time.monotonic() + budget
        fleet.draining = True
        try:
            if abort_first:
                await self._abort()
            while True:
                others = 0
                if not abort_first:
                    loads = await self._control.loads()
                    others = sum(running + queued for running, queued in loads)
                # Asked last, so that nothing begins before the fleet falls asleep.
                own = self._under_way()
                if not own and not others:
                    return fleet.fall_asleep(tags)
                if time.monotonic() >= deadline:
                    raise ServerTimeoutError(
                        f"After {budget:g} s, {own} request(s) of this engine are "
                        f"under way and the servers have {others} of all users. "
                        f"Nothing was released, and generation goes on. Give a longer "
                        f"drain_timeout, or abort_first=True."
                    )
                await asyncio.sleep(DRAIN_POLL_SECONDS)
        finally:
            fleet.draining = False

    async def _release(self, replicas: Sequence[Replica], tags: frozenset[str]) -> None:
        fleet, control = self._fleet, self._control

        async def one(replica: Replica) -> None:
            missing = tags - replica.released
            try:
                await control.release_memory_occupation(
                    missing, urls=[replica.url], timeout=MEMORY_TIMEOUT_SECONDS
                )
            except ServerTimeoutError:
                # It has the call, and will come to it before any later one.
                replica.released |= missing
                raise
            replica.released |= missing

        try:
            for mode in _pauses(control):
                await control.pause(mode)
        except SGLangError as error:
            failures = [error]
        else:
            failures = await _each(one, replicas)
        lost = not control.capabilities.keeps_weights
        if lost and any("weights" in replica.released for replica in replicas):
            fleet.doubt = "Their memory was released by sleep(), so they hold nothing."
        if failures:
            asleep = [replica for replica in replicas if tags <= replica.released]
            raise self._failure(
                failures,
                f"{len(asleep)} of {len(replicas)} servers released "
                f"{in_order(tags)}, and the engine does not generate. Call sleep() "
                f"again to complete it, or wake_up() to undo it.",
                partly=bool(asleep),
            )

    async def wake_up(self, tags: frozenset[str]) -> None:
        """Resumes memory of every server; see :meth:`.AsyncSGLang.wake_up`."""
        async with self._turn:
            if self._fleet.asleep & tags:
                await _to_the_end(self._resume(tags))

    async def _resume(self, tags: frozenset[str]) -> None:
        fleet, control = self._fleet, self._control
        replicas = [r for r in fleet.replicas if r.runs and r.released & tags]

        async def one(replica: Replica) -> None:
            missing = replica.released & tags
            try:
                await control.resume_memory_occupation(
                    missing, urls=[replica.url], timeout=MEMORY_TIMEOUT_SECONDS
                )
            except ServerTimeoutError:
                replica.released -= missing
                raise
            replica.released -= missing

        failures = await _each(one, replicas)
        before = fleet.asleep
        fleet.wake_up(tags)
        if failures:
            awake = [replica for replica in replicas if not replica.released & tags]
            raise self._failure(
                failures,
                f"{len(awake)} of {len(replicas)} servers have {in_order(tags)} "
                f"again. Call wake_up() again.",
                partly=bool(awake),
            )
        if not control.urls:
            # Those that are started again are not paused.
            control.pausing.paused = False
        # Weights in doubt are not generated with: their update lets generation go on.
        elif not fleet.asleep and fleet.doubt is None:
            try:
                await control.resume()
            except SGLangError as error:
                fleet.fall_asleep(before)
                raise self._failure(
                    [error],
                    "The memory is back, and generation does not go on. Call "
                    "wake_up() again.",
                    partly=error.partly,
                ) from error

    def _failure(
        self, failures: Sequence[SGLangError], outcome: str, *, partly: bool
    ) -> SGLangError:
        self._fleet.notice_deaths()
        reasons = " ".join(str(failure) for failure in failures)
        return type(failures[0])(f"{reasons} {outcome}", partly=partly)


def _pauses(control: ControlPlane) -> Sequence[PauseMode]:
    """Returns the pauses after which nothing is in a scheduler, or comes to it.

    The first one closes the door and ends what is inside. The second has a scheduler
    let go of its last step. The third ends what had no one waiting for it, as a health
    check. A scheduler that is paused already ends only what has been retracted.
    """
    pauses: tuple[PauseMode, ...] = ("abort", "retract", "abort")
    return ("retract", *pauses) if control.pausing.paused else pauses


async def _each(
    call: Callable[[Replica], Coroutine[Any, Any, None]], replicas: Sequence[Replica]
) -> list[SGLangError]:
    """Calls every server, and returns what failed."""
    outcomes = await asyncio.gather(
        *(call(replica) for replica in replicas), return_exceptions=True
    )
    failures = []
    for outcome in outcomes:
        if isinstance(outcome, SGLangError):
            failures.append(outcome)
        elif outcome is not None:
            raise outcome
    return failures


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Waits for what must not be cut off half-way, also if the waiting is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
