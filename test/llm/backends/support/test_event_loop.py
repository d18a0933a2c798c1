from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.forked_starts import trainer_python
from helpers.waiting import wait_until

from torchrl_sglang.support import event_loop
from torchrl_sglang.support.event_loop import (
    get_loop,
    iterate_sync,
    run_async,
    run_sync,
    submit,
)


async def add(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


async def where() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def fail() -> None:
    raise ValueError("as raised")


def test_results_and_errors_come_back():
    assert run_sync(add(1, 2)) == 3
    with pytest.raises(ValueError, match="as raised"):
        run_sync(fail())
    assert submit(add(1, 2)).result(60) == 3


def test_one_loop_for_all_threads_which_does_not_hold_the_process_up():
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(lambda: run_sync(where())) for _ in range(8)]
    assert {call.result(60) for call in calls} == {get_loop()}
    (thread,) = [t for t in threading.enumerate() if t.name == "torchrl_sglang-loop"]
    assert thread.daemon


def test_it_works_inside_another_loop():
    async def outer() -> tuple[int, bool]:
        return run_sync(add(1, 2)), await where() is get_loop()

    assert asyncio.run(outer()) == (3, False)


def test_results_and_errors_come_back_to_another_loop():
    async def outer() -> list[int]:
        with pytest.raises(ValueError, match="as raised"):
            await run_async(fail())
        assert await run_async(where()) is get_loop()
        return await asyncio.gather(*(run_async(add(i, 1)) for i in range(500)))

    assert asyncio.run(outer()) == list(range(1, 501))
    assert run_sync(run_async(add(1, 2))) == 3


def test_loops_that_come_and_go_get_their_results():
    async def many() -> int:
        return sum(await asyncio.gather(*(run_async(add(i, 0)) for i in range(200))))

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(lambda: asyncio.run(many())) for _ in range(8)]
    assert [call.result(60) for call in calls] == [sum(range(200))] * 8


async def wait_for_ever(started: threading.Event, cancelled: threading.Event) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.set()
        raise


def test_a_cancelled_caller_cancels_its_coroutine():
    started, cancelled = threading.Event(), threading.Event()

    async def outer() -> None:
        task = asyncio.ensure_future(run_async(wait_for_ever(started, cancelled)))
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(outer())
    assert cancelled.wait(60)


def test_a_coroutine_whose_caller_has_gone_still_ends():
    """The caller's loop is closed when the result comes."""
    ended = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            ended.set()

    async def outer() -> weakref.ref[asyncio.AbstractEventLoop]:
        task = asyncio.ensure_future(run_async(slow()))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        return weakref.ref(asyncio.get_running_loop())

    closed = asyncio.run(outer())
    assert ended.wait(60)
    assert asyncio.run(run_async(add(1, 2))) == 3
    # What was posted to the closed loop, or could not be, does not keep it.
    gc.collect()
    assert closed() is None


def test_a_closed_loop_keeps_nothing_that_is_posted_to_it():
    class Mark:
        pass

    loop = asyncio.new_event_loop()
    loop.close()
    for _ in range(2):
        mark = Mark()
        event_loop._post(loop, lambda mark=mark: mark)
        posted = weakref.ref(mark)
        del mark
        assert posted() is None


COLLECTION = """
import asyncio, faulthandler, gc, weakref
from torchrl_sglang.support.event_loop import run_async, submit

faulthandler.dump_traceback_later(60, exit=True)

class Client:
    pass

async def nothing():
    pass

async def main():
    for number in range(300):
        client = Client()
        client.itself = client
        weakref.finalize(client, lambda: submit(nothing()))
        del client
        gc.set_threshold(1 + number % 13, 1, 1)
        await run_async(nothing())
        gc.set_threshold(700, 10, 10)

asyncio.run(main())
print("ended")
"""


def test_finalizers_may_use_the_loop():
    """A client that is collected in the middle of a call closes its connections."""
    done = subprocess.run(
        [trainer_python(), "-c", COLLECTION],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "ended\n", done.stderr


def test_an_error_is_freed_without_the_garbage_collector():
    class Mark:
        pass

    async def outer() -> weakref.ref[Mark]:
        mark = Mark()
        with contextlib.suppress(ValueError):
            await run_async(fail())
        return weakref.ref(mark)

    gc.disable()
    try:
        found = asyncio.run(outer())
        # The background loop's last step may still hold it.
        deadline = time.monotonic() + 10
        while found() is not None:
            assert time.monotonic() < deadline
            run_sync(add(1, 2))
    finally:
        gc.enable()


def test_an_iterator_that_is_collected_on_the_loop_is_closed(monkeypatch):
    closed, problems = threading.Event(), []

    async def count():
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            closed.set()

    async def collect() -> None:
        gc.collect()

    class Holder:
        pass

    monkeypatch.setattr(sys, "unraisablehook", problems.append)
    gc.disable()
    try:
        holder = Holder()
        holder.itself, holder.steps = holder, iterate_sync(count())
        assert next(holder.steps) == 1
        del holder
        run_sync(collect())
    finally:
        gc.enable()
    assert closed.wait(60)
    assert not problems


def test_run_sync_on_its_own_loop_is_refused():
    async def inner() -> int:
        return run_sync(add(1, 2))

    with pytest.raises(RuntimeError, match="own event loop.*await"):
        run_sync(inner())
    assert run_sync(add(1, 2)) == 3


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_what_was_waited_for():
    started, cancelled = threading.Event(), threading.Event()

    def interrupt() -> None:
        main = threading.main_thread().ident
        started.wait(60)
        wait_until(lambda: sys._current_frames()[main].f_code.co_name == "wait")
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_sync(wait_for_ever(started, cancelled))
    thread.join()
    assert cancelled.wait(60)


FORK = """
import os, sys, asyncio, threading
from torchrl_sglang.support import event_loop
from torchrl_sglang.support.event_loop import run_sync, get_loop, submit

async def pid():
    return os.getpid()

parent_loop = get_loop()
never = submit(asyncio.Event().wait())
# Somebody holds the lock at the moment of the fork.
event_loop._lock.acquire()
child = os.fork()
if child == 0:
    good = run_sync(pid()) == os.getpid() and get_loop() is not parent_loop
    os._exit(0 if good else 1)
event_loop._lock.release()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert run_sync(pid()) == os.getpid() and get_loop() is parent_loop
print("both")
"""


def test_a_forked_child_gets_a_loop_of_its_own():
    done = subprocess.run(
        [trainer_python(), "-c", FORK], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "both\n", done.stderr
