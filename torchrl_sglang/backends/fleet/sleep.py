"""Sleep and wake-up: servers release GPU memory for a trainer on the same GPU.

A server ends when it gets a request to release memory while a request runs, to release
memory twice, or to resume memory without a release. So the order of the calls is::

    sleep:    refuse new requests -> drain or abort -> pause -> release
    wake_up:  resume memory -> continue generation

:attr:`.Replica.released` has each server's released memory. Servers stay paused while
any of them sleeps. Released weights are lost, so inconsistent until the next update.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from torchrl_sglang.backends.client.capabilities import sleep_obstacles
from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.reconcile import FellAsleep, RestartNoticed, WokeUp
from torchrl_sglang.backends.fleet.replica import Replica, format_tags
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.types import PauseMode, ServerCapabilities

MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
"""SGLang's kinds of releasable memory."""

DRAIN_TIMEOUT_SECONDS = 60.0
"""Default timeout for requests to end before a server is put to sleep."""


def check_tags(tags: str | Iterable[str]) -> frozenset[str]:
    """Returns kinds of memory as a set."""
    kinds = frozenset([tags] if isinstance(tags, str) else tags)
    if not kinds or kinds.difference(MEMORY_TAGS):
        raise ConfigurationError(
            f"tags={tags!r} names no memory that can sleep; give one or more of "
            f"{', '.join(map(repr, MEMORY_TAGS))}."
        )
    return kinds


def check_can_sleep(capabilities: ServerCapabilities, url: str) -> None:
    """Checks the servers' options for sleep."""
    if not capabilities.can_sleep:
        name, value, needed = next(sleep_obstacles(capabilities.args))
        raise UnsupportedByServerError(
            f"The server at {url} has {name}={value!r}, so it cannot give memory back; "
            f"start it with {name}={needed!r}."
        )


class SleepControl:
    """Puts the servers of an engine to sleep and wakes them up, on the background loop.

    ``in_flight`` returns how many requests of this engine have no response yet;
    ``abort`` ends every request on the servers.
    """

    def __init__(
        self,
        fleet: Fleet,
        control: ControlPlane,
        *,
        in_flight: Callable[[], int],
        abort: Callable[[], Awaitable[Any]],
    ) -> None:
        self._fleet = fleet
        self._control = control
        self._in_flight = in_flight
        self._abort = abort
        # An interrupted call may still run.
        self._lock = asyncio.Lock()

    async def sleep(
        self, tags: frozenset[str], *, abort_first: bool, drain_timeout: float
    ) -> None:
        """Releases memory of every server; see :meth:`.AsyncSGLang.sleep`."""
        async with self._lock:
            if self._fleet.asleep:
                self._fleet.apply(FellAsleep(tags=tags))
            else:
                await self._drain(tags, abort_first, drain_timeout)
            running = self._fleet.state.running
            awake = [replica.rank for replica in running if tags - replica.released]
            if awake:
                await _uncancelled(self._release(awake, tags))

    async def _drain(
        self, tags: frozenset[str], abort_first: bool, timeout: float
    ) -> None:
        """Waits until no request runs, and refuses requests from then on."""
        deadline = time.monotonic() + timeout
        with self._fleet.drain():
            if abort_first:
                await self._abort()
            while True:
                total = 0
                if not abort_first:
                    total = sum(map(sum, await self._control.loads()))
                # Read last: no request begins before the fleet falls asleep.
                in_flight = self._in_flight()
                if not in_flight and not total:
                    self._fleet.apply(FellAsleep(tags=tags))
                    return
                if time.monotonic() >= deadline:
                    raise ServerTimeoutError(
                        f"After {timeout:g} s, {in_flight} request(s) of this engine "
                        f"are in flight and the servers have {total} of all users. "
                        f"Nothing was released, and generation goes on. Give a longer "
                        f"drain_timeout, or abort_first=True."
                    )
                await asyncio.sleep(0.05)

    async def _release(self, ranks: Sequence[int], tags: frozenset[str]) -> None:
        fleet, control = self._fleet, self._control
        try:
            for mode in _pauses(fleet.paused):
                await control.pause(mode)
        except SGLangError as error:
            failures = [error]
        else:
            failures = await self._each("release", ranks, tags)
        replicas = _among(fleet, ranks)
        lost = not control.capabilities.keeps_weights
        if lost and any("weights" in replica.released for replica in replicas):
            reason = "Their memory was released by sleep(), so they hold nothing."
            fleet.change_weights(lambda weights: weights.mark_inconsistent(reason))
        if failures:
            asleep = sum(tags <= replica.released for replica in replicas)
            raise await self._failure(
                failures,
                f"{asleep} of {len(replicas)} servers released {format_tags(tags)}, "
                f"and the engine does not generate. Call sleep() again to complete it, "
                f"or wake_up() to undo it.",
                partly=asleep > 0,
            )

    async def wake_up(self, tags: frozenset[str]) -> None:
        """Resumes memory of every server; see :meth:`.AsyncSGLang.wake_up`."""
        async with self._lock:
            if self._fleet.asleep & tags:
                await _uncancelled(self._resume(tags))

    async def _resume(self, tags: frozenset[str]) -> None:
        fleet, control = self._fleet, self._control
        await self._notice_restarts()
        ranks = [r.rank for r in fleet.state.running if r.released & tags]
        failures = await self._each("resume", ranks, tags)
        asleep = fleet.asleep
        fleet.apply(WokeUp(tags=tags))
        if failures:
            awake = sum(not replica.released & tags for replica in _among(fleet, ranks))
            raise await self._failure(
                failures,
                f"{awake} of {len(ranks)} servers have {format_tags(tags)} again. "
                f"Call wake_up() again.",
                partly=awake > 0,
            )
        if not control.urls:
            # Restarted servers are not paused.
            fleet.paused = False
        elif not fleet.asleep and fleet.weights.inconsistent is None:
            # A weight update continues generation where weights are inconsistent.
            try:
                await control.resume()
            except SGLangError as error:
                fleet.apply(FellAsleep(tags=asleep))
                raise await self._failure(
                    [error],
                    "The memory is back, and generation does not go on. Call "
                    "wake_up() again.",
                    partly=error.partly,
                ) from error

    async def _notice_restarts(self) -> None:
        """Discovers restarts by other owners: a restarted server has its memory.

        SGLang ends on a request to resume memory without a release.
        """

        async def ask(replica: Replica) -> None:
            with suppress(SGLangError):
                start_id = await self._control.start_id(replica.url)
                if start_id and start_id != replica.start_id:
                    event = RestartNoticed(rank=replica.rank, start_id=start_id)
                    self._fleet.apply(event)

        replicas = [
            replica
            for replica in self._fleet.state.running
            if replica.handle is None and replica.start_id and replica.released
        ]
        await fan_out(ask, replicas)

    async def _each(
        self,
        verb: Literal["release", "resume"],
        ranks: Sequence[int],
        tags: frozenset[str],
    ) -> list[SGLangError]:
        """Releases or resumes memory of each server; returns the errors."""

        async def one(rank: int) -> SGLangError | None:
            replica = self._fleet.state.find(rank)
            if replica is None:
                return None
            held = tags & replica.released
            missing = tags - held if verb == "release" else held
            failure: SGLangError | None = None
            try:
                # Weights with a CPU backup are copied.
                await self._control.memory_occupation(
                    verb, missing, url=replica.url, timeout=120.0
                )
            except SGLangError as error:
                if not isinstance(error, ServerTimeoutError):
                    return error
                # The server has the call, and serves it before later calls.
                failure = error
            released = replica.released ^ missing
            self._fleet.learn(replica, lambda now: replace(now, released=released))
            return failure

        outcomes = await fan_out(one, ranks)
        return [failure for failure in outcomes if failure is not None]

    async def _failure(
        self, failures: Sequence[SGLangError], outcome: str, *, partly: bool
    ) -> SGLangError:
        messages = [*map(str, failures), outcome]
        if any(isinstance(failure, ServerUnavailableError) for failure in failures):
            messages += await self._ends()
        return type(failures[0])(" ".join(messages), partly=partly)

    async def _ends(self) -> list[str]:
        """Returns the reasons of ended servers; a process takes a moment to end."""
        fleet = self._fleet
        running = [r.rank for r in fleet.state.running if r.handle is not None]
        deadline = time.monotonic() + 5.0
        while running and time.monotonic() < deadline:
            fleet.notice_deaths()
            replicas = _among(fleet, running)
            if reasons := [r.reason for r in replicas if not r.runs]:
                return reasons
            await asyncio.sleep(0.1)
        return []


def _among(fleet: Fleet, ranks: Sequence[int]) -> list[Replica]:
    replicas = map(fleet.state.find, ranks)
    return [replica for replica in replicas if replica is not None]


def _pauses(paused: bool) -> Sequence[PauseMode]:
    """Returns the pauses after which a scheduler has no request and gets none.

    The first ends running requests and holds new requests back; the second makes a
    scheduler release its last step; the third ends requests without a waiting client,
    such as a health check. A paused scheduler only ends retracted requests.
    """
    pauses: tuple[PauseMode, ...] = ("abort", "retract", "abort")
    return ("retract", *pauses) if paused else pauses


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Waits until the work has ended, even if the wait is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
