"""Runs groups on an event loop in a thread of its own, and hands them to a consumer.

This module applies the decisions of :class:`.GroupPool` on groups and batches, and of
:class:`.GroupFailures` on groups that failed.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_sglang.collectors.runtime.contract import (
    GroupMaker,
    KeepsGroup,
    ScoresGroup,
)
from torchrl_sglang.collectors.runtime.group_events import GroupEvents
from torchrl_sglang.collectors.runtime.stats import (
    Ages,
    Mark,
    Meter,
    beyond_graphs,
    compare,
    find_bottleneck,
)
from torchrl_sglang.collectors.scheduling.failures import GroupFailures, origin
from torchrl_sglang.collectors.scheduling.group_pool import GroupPool, ReadyGroup
from torchrl_sglang.collectors.scheduling.pace import LATELY_BATCHES
from torchrl_sglang.collectors.scheduling.prompts import PromptStream
from torchrl_sglang.errors import (
    CollectionError,
    CollectionTimeoutError,
    ConfigurationError,
    ServerError,
    TaskError,
    UserFunctionError,
    WeightSyncStateError,
)
from torchrl_sglang.observer import PhaseEnded
from torchrl_sglang.support.blocking import BlockingCalls, DaemonExecutor
from torchrl_sglang.support.histogram import SECONDS, Histogram
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.tracing import span
from torchrl_sglang.support.user_code import describe, first_error, user_code

STEP_TIMEOUT_SECONDS = 600.0
"""Timeout of reading a prompt, of the layout of a group, and of the replay buffer."""

MOST_FILTERED = 10
"""Groups of so many updates in a row that ``keep_group`` rejects end a collection."""

ON_WAIT_SECONDS = 1.0
"""Interval between two calls of ``on_wait`` by a consumer that waits."""

KEPT_ERRORS = 16
"""Number of recent errors that statistics report."""

MOST_THREADS = 256
"""Threads of the event loop's default executor, which ``asyncio.to_thread`` uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete:
    """A complete group."""

    group: Any
    """The group as its :class:`.GroupMaker` made it."""
    rows: list[TensorDictBase]
    """Turns of the group in TorchRL's layout."""
    kept: bool = True
    """Whether the group is trained on."""


class Collection:
    """Keeps groups running, within the bounds of a pool.

    It refers to nothing of its owner, which may be dropped while this runs. ``keeps``
    returns whether a complete group is trained on, by its rows. ``score`` returns the
    rows of such a group with further columns, in a thread. ``asleep`` returns the tags
    of the engine's released memory: groups wait until there are none.
    """

    def __init__(
        self,
        pool: GroupPool[Complete],
        prompts: PromptStream,
        groups: GroupMaker,
        *,
        max_in_flight: int | None,
        max_retries: int,
        engine_seconds: float,
        events: GroupEvents,
        keeps: KeepsGroup | None = None,
        score: ScoresGroup | None = None,
        asleep: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self.pool = pool
        self.events = events
        self.groups = groups
        self.changed = threading.Condition()
        self.running = Meter()
        self.trainer_waits = Meter()
        self.ages = Ages()
        self.group_seconds = Histogram(SECONDS)
        self.tokens = 0
        self.failed = 0
        self.filtered = 0
        self.retried = 0
        self.errors: deque[str] = deque(maxlen=KEPT_ERRORS)
        self._prompts = prompts
        self._reader = BlockingCalls("torchrl_sglang-prompts", 1)
        self._layout = BlockingCalls("torchrl_sglang-layout", 1)
        self._max_in_flight = max_in_flight
        self._failures = GroupFailures(
            max_retries=max_retries, engine_seconds=engine_seconds
        )
        self._engine_seconds = engine_seconds
        self._unfinished: dict[int, int] = {}
        self._keeps, self._score = keeps, score
        self._filtered_in_a_row = 0
        self._asleep = asleep
        # Of all groups that wait for memory, one looks.
        self._looks = asyncio.Lock()
        self._more_at = math.inf
        self._wanted = 0
        # When the trainer got its last batches.
        self._marks: deque[Mark] = deque(maxlen=LATELY_BATCHES)
        self._marked = 0
        self._writing = False
        self._paused = False
        self._stopped = False
        self._logged: set[tuple[type[BaseException], str, int]] = set()
        self._error: BaseException | None = None
        self._why = ""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None

    # The consumer's side, in any thread.

    @property
    def alive(self) -> bool:
        """Whether groups are being made."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread, once."""
        with self.changed:
            if self._thread is not None or self._stopped:
                return
            self._thread = threading.Thread(
                target=self._run, name="torchrl_sglang-collector", daemon=True
            )
            for meter in (self.running, self.trainer_waits, self.groups.generating):
                meter.restart()
            self._marks.append(self._mark())
            self._thread.start()

    def stop(self) -> None:
        """Tells the thread to end; does not wait for it."""
        with self.changed:
            never_ran = self._thread is None and not self._stopped
            self._stopped = True
            self.changed.notify_all()
        if never_ran:
            self._close()
        self._notify_loop()

    def end(self, error: BaseException, why: str = "") -> None:
        """Ends the collection with an error, which consumers raise."""
        with self.changed:
            if self._error is None:
                self._error, self._why = error, why
            self._stopped = True
            self.changed.notify_all()
        self._notify_loop()

    def join(self, timeout: float | None) -> bool:
        """Waits for the thread to end; returns whether it did."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def pause(self) -> None:
        """Starts no more groups, and has none written to a buffer in the background."""
        with self.changed:
            self._paused = True
            if not self.changed.wait_for(
                lambda: not self._writing or self._stopped, STEP_TIMEOUT_SECONDS
            ):
                raise CollectionTimeoutError(
                    f"The replay buffer has not taken a group within "
                    f"{STEP_TIMEOUT_SECONDS:g} s."
                )

    def resume(self) -> None:
        """Starts groups again."""
        with self.changed:
            self._paused = False
            self.changed.notify_all()
        self._notify_loop()

    def check(self) -> None:
        """Raises the error that ended the collection, if one did."""
        if self._error is not None:
            raise CollectionError(
                f"The collector has ended: {self._why}{_text(self._error)}"
            ) from origin(self._error)

    def set_version(self, version: int) -> None:
        """Begins a new policy version."""
        with self.changed:
            early = self.pool.running + self.pool.ready if self.pool.in_order else 0
            if early:
                self.end(
                    CollectionError(
                        f"The weights changed while {early} groups of the version "
                        f"before were not taken, and how far those were depends on "
                        f"timing. With deterministic=True, take batches_per_update "
                        f"batches between two weight updates."
                    )
                )
            self.pool.set_version(version)
            self._mark_batch()
            self.changed.notify_all()
        self._notify_loop()

    def take(
        self,
        size: int,
        *,
        timeout: float,
        demand: bool = True,
        on_wait: Callable[[], object] | None = None,
    ) -> list[ReadyGroup[Complete]]:
        """Returns the groups of a batch; none at the end.

        Their prompts are not done before :meth:`close`. Without ``demand`` they are
        taken in the background, not during a pause, and the pool's bound holds.
        ``on_wait`` is called each second while there are not enough, in this thread.
        """
        deadline = time.monotonic() + timeout
        look_at = time.monotonic() + ON_WAIT_SECONDS
        with self.changed, self._waits(size, demand=demand):
            if demand:
                self.pool.pace.ask(size)
            while True:
                self.check()
                held = self._paused and not demand
                groups = None if held else self.pool.take(size)
                if groups is not None:
                    self._count(groups)
                    positions = [group.position for group in groups]
                    self.events.taken(positions, self.pool.version)
                    self._writing = not demand
                    if demand:
                        self.pool.pace.get()
                    self._mark_batch()
                    break
                if self.pool.ended or self._stopped:
                    return []
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    raise CollectionTimeoutError(
                        f"No batch of {size} groups was complete within {timeout:g} s: "
                        f"{self.pool.ready} are complete, {self.pool.running} run and "
                        f"{self.pool.stale} were too old."
                        f"{self._last_error()}"
                    )
                self.changed.wait(min(seconds_left, ON_WAIT_SECONDS))
                if on_wait is not None and time.monotonic() >= look_at:
                    look_at = time.monotonic() + ON_WAIT_SECONDS
                    # Others may go on meanwhile.
                    self.changed.release()
                    try:
                        on_wait()
                    finally:
                        self.changed.acquire()
        self._notify_loop()
        return groups

    def close(self, groups: Sequence[ReadyGroup[Complete]]) -> None:
        """Ends the prompts of groups that the consumer has."""
        with self.changed:
            self.pool.close(group.position for group in groups)
            self._writing = False
            self.changed.notify_all()

    def stats(self, down: str = "", graphs_up_to: int | None = None) -> dict[str, Any]:
        """Returns statistics of the groups; see :meth:`.AsyncLLMCollector.stats`."""
        _, engine_idle = self.groups.generating.mean_and_idle()
        trainer_waits, _ = self.trainer_waits.mean_and_idle()
        with self.changed:
            lately = self._lately()
        bottleneck = find_bottleneck(lately, self.pool.limits.max_staleness, down)
        requests = lately["conversations_in_flight"]
        in_flight = self.groups.generating.value
        seconds = self.running.seconds
        return {
            "groups_running": self.pool.running,
            "groups_ready": self.pool.ready,
            "groups_stale": self.pool.stale,
            "groups_retried": self.retried,
            "groups_failed": self.failed,
            "groups_filtered": self.filtered,
            "conversations_in_flight": in_flight,
            "conversations_waiting": self.running.value - in_flight,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / seconds if seconds else 0.0,
            "group_seconds": self.group_seconds.read(),
            "engine_idle": engine_idle,
            "trainer_waits": min(trainer_waits, 1.0),
            "age": dict(self.ages.total),
            "age_in_flight": dict(self.ages.in_flight),
            "age_in_queue": dict(self.ages.in_queue),
            "lately": lately,
            "bottleneck": bottleneck + beyond_graphs(requests, graphs_up_to),
            "errors": list(self.errors),
        }

    def _mark(self) -> Mark:
        return Mark(
            tokens=self.tokens,
            taken=self.ages.total.total(),
            ages=sum(age * count for age, count in self.ages.total.items()),
            running=self.running.totals(),
            generating=self.groups.generating.totals(),
        )

    def _mark_batch(self) -> None:
        """Begins the recent past anew after the first batch: start-up is not of it."""
        batches = self.pool.pace.batches
        if batches != self._marked:
            if batches == 1:
                self._marks.clear()
            self._marks.append(self._mark())
            self._marked = batches

    def _lately(self) -> dict[str, float]:
        current = self._mark()
        earlier = self._marks[0] if self._marks else current
        waits = self.pool.pace.trainer_waits
        if waits is None:
            # Until the first batch.
            waits = min(self.trainer_waits.mean_and_idle()[0], 1.0)
        return compare(earlier, current, waits)

    @contextmanager
    def _waits(self, size: int, *, demand: bool) -> Iterator[None]:
        """Counts a consumer that waits for groups, and not the writer of a buffer."""
        demanded = size if demand else 0
        self._wanted += demanded
        self.trainer_waits.add(int(demand))
        self._notify_loop()
        start = time.time()
        try:
            yield
        finally:
            if demand:
                wait = PhaseEnded(name="wait", start=start, end=time.time())
                self.events.publish(wait)
            self._wanted -= demanded
            self.trainer_waits.add(-int(demand))

    def _last_error(self) -> str:
        return f" The last error was: {self.errors[-1]}" if self.errors else ""

    def _count(self, groups: Sequence[ReadyGroup[Complete]]) -> None:
        for group in groups:
            for version, count in self.groups.spans(group.content.group):
                self.ages.add(version, group.version, self.pool.version, count)

    def _notify_loop(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:
                # The loop of the consumer has ended.
                return

    # The loop's side, in its own thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                # An agent that blocks in asyncio.to_thread() keeps nothing from ending.
                executor = DaemonExecutor("torchrl_sglang-to-thread", MOST_THREADS)
                runner.get_loop().set_default_executor(executor)
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - Consumers raise it.
            self.end(error)
        finally:
            self._close()
            with self.changed:
                self._stopped = True
                self.changed.notify_all()

    def _close(self) -> None:
        self._reader.close()
        self._layout.close()
        self.groups.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = wake = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()
        slots = asyncio.Semaphore(self._max_in_flight or 2**31)
        try:
            while not self._stopped:
                wake.clear()
                for position in self._admit():
                    self._unfinished[position] = self.groups.size
                    self.running.add(self.groups.size)
                    task = asyncio.create_task(self._run_group(position, slots))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await self._sleep(wake)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sleep(self, wake: asyncio.Event) -> None:
        """Waits until something changed, or until groups may start by themselves."""
        seconds = max(self._more_at - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                await wake.wait()
        except TimeoutError:
            return

    def _admit(self) -> list[int]:
        """Starts as many groups as may start, and returns their positions."""
        self._more_at = math.inf
        if self._paused:
            return []
        if time.monotonic() < self._failures.not_before:
            # After a failure of the engine.
            self._more_at = self._failures.not_before
            return []
        with self.changed:
            free, seconds = self.pool.due(self._wanted)
            self._more_at = time.monotonic() + seconds
            if self._max_in_flight is not None:
                slots = self._max_in_flight - self.running.value
                free = min(free, math.ceil(max(slots, 0) / self.groups.size))
            started = [self.pool.start() for _ in range(free)]
            self.events.started(started, self.pool.version)
            return started

    async def _run_group(self, position: int, slots: asyncio.Semaphore) -> None:
        @asynccontextmanager
        async def turn() -> AsyncIterator[None]:
            async with slots:
                yield
            self._finish(position, 1)

        try:
            with user_code():
                complete = await self._make_group(position, turn)
        except asyncio.CancelledError:
            with self.changed:
                self.pool.give_up(position, retry=True)
            raise
        except BaseException as error:  # noqa: BLE001 - User functions raise anything.
            self._fail(position, first_error(error))
        else:
            self._complete(position, complete)
        finally:
            self._finish(position, self._unfinished[position])
            del self._unfinished[position]
            with self.changed:
                self.changed.notify_all()

    async def _make_group(
        self, position: int, turn: Callable[[], Any]
    ) -> Complete | None:
        """Returns a complete group; ``None`` if there is no prompt for it."""
        task = await self._fetch(position)
        if task is None:
            return None
        await self._wait_for_memory()
        start, version = time.monotonic(), self.pool.version
        with span("group", prompt=position, policy_version=version) as traced:
            group = await self.groups.run(
                position, task, lambda: self.pool.version, turn
            )
            # While the engine generates, so that no trainer waits for it.
            rows = await self._layout.run(
                lambda: self.groups.write(group), seconds=STEP_TIMEOUT_SECONDS
            )
            is_kept = self._keeps is None or await self._keeps(
                rows, self._layout, STEP_TIMEOUT_SECONDS
            )
            if is_kept and self._score is not None:
                rows = await self._scored(self._score, rows)
            traced.set(conversations=self.groups.size, turns=len(rows), kept=is_kept)
        self.group_seconds.add(time.monotonic() - start)
        return Complete(group=group, rows=rows, kept=is_kept)

    async def _scored(
        self, score: ScoresGroup, rows: list[TensorDictBase]
    ) -> list[TensorDictBase]:
        """Returns the rows of a group with the columns of ``score``."""
        try:
            scored = await asyncio.to_thread(score, LazyStackedTensorDict(*rows))
        except ConfigurationError as error:
            # The same rows would come again.
            raise TaskError(f"Its rows cannot be scored: {error}") from error
        except ServerError as error:
            # It has waited for its servers itself.
            self.end(error, "nobody scores its groups: ")
            raise
        if not isinstance(scored, TensorDictBase) or len(scored) != len(rows):
            raise UserFunctionError(
                f"score returned {scored!r:.200}; return the rows, with more columns."
            )
        return list(scored.unbind(0))

    async def _fetch(self, position: int) -> Any:
        """Returns a task; the collection ends if no later one could be read either."""
        try:
            return await self._reader.run(
                lambda: self._prompts.fetch(position), seconds=STEP_TIMEOUT_SECONDS
            )
        except TaskError:
            raise
        except (ConfigurationError, UserFunctionError) as error:
            self.end(error)
            raise

    async def _wait_for_memory(self) -> None:
        """Waits while the engine is asleep, with new weights but without its cache."""
        async with self._looks:
            deadline = time.monotonic() + self._engine_seconds
            while tags := self._asleep():
                if time.monotonic() > deadline:
                    error = WeightSyncStateError(
                        f"Groups have waited {self._engine_seconds:g} s for the engine,"
                        f" which is asleep ({', '.join(sorted(tags))}); call wake_up() "
                        f"after the weight update."
                    )
                    self.end(error)
                    raise error
                await asyncio.sleep(0.01)

    def _finish(self, position: int, count: int) -> None:
        """Counts conversations of a group that ended; others may take their place."""
        self._unfinished[position] -= count
        self.running.add(-count)
        assert self._wake is not None
        self._wake.set()

    def _complete(self, position: int, complete: Complete | None) -> None:
        with self.changed:
            if complete is None:
                self.pool.end_of_prompts(position)
                return
            self._failures.complete(position)
            group = complete.group
            tokens = sum(count for _, count in self.groups.spans(group))
            self.tokens += tokens
            self.events.ended(
                position,
                partial(self.groups.record, group),
                version=self.pool.version,
                kept=complete.kept,
                tokens=tokens,
            )
            if not complete.kept:
                self._filter_out(position)
                return
            self._filtered_in_a_row = 0
            self.pool.complete(position, complete, oldest=self.groups.oldest(group))

    def _filter_out(self, position: int) -> None:
        """Drops a complete group; another prompt takes its place."""
        self.pool.give_up(position, retry=False)
        self.filtered += 1
        self._filtered_in_a_row += 1
        limit = MOST_FILTERED * self.pool.limits.groups_per_update
        if self._filtered_in_a_row >= limit:
            self.end(
                CollectionError(
                    f"keep_group has kept none of {limit} complete groups in a row: "
                    f"there is nothing left to train on, or it is too strict."
                )
            )

    def _fail(self, position: int, error: BaseException) -> None:
        """Retries a group, gives it up, or ends the collection."""
        message = f"Prompt {position}: {_text(error)}"
        with self.changed:
            self.errors.append(message)
            verdict = self._failures.failed(position, error, now=time.monotonic())
            self.events.failed(position, message, retried=verdict.retry)
            self.pool.give_up(position, retry=verdict.retry)
            if verdict.retry:
                self.retried += 1
            else:
                self.failed += 1
            if verdict.ends:
                self.end(error, verdict.why)
        if not verdict.retry:
            is_users, kind = isinstance(error, UserFunctionError), _kind_of(error)
            is_new = kind not in self._logged
            self._logged.add(kind)
            torchrl_logger.warning(
                f"The group of prompt {position} was given up after "
                f"{verdict.attempts} attempts: {_text(error)}",
                # Where in the user's function it was raised; once for each place.
                exc_info=origin(error) if is_users and is_new else None,
            )
        elif verdict.engine_began and self._error is None:
            # Once until a group is complete again: all that run fail together.
            torchrl_logger.warning(
                f"The engine failed, and its groups are tried again for "
                f"{self._engine_seconds:g} s: {_text(error)}"
            )


def _kind_of(error: BaseException) -> tuple[type[BaseException], str, int]:
    """Returns the class of an error of a user's function, and where it was raised."""
    error, place = origin(error), ("", 0)
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = frame.f_code.co_filename, line
    return type(error), *place


def _text(error: BaseException) -> str:
    named = isinstance(error, UserFunctionError)
    return str(error) if named else f"{describe(error)}."
