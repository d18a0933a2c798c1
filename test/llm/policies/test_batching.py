from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    RequestRefusedError,
)
from torchrl_sglang.policies.batching import Batcher

LONG = 60.0


class Recorder:
    """Doubles numbers, notes the batches, and refuses negative ones."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, items):
        self.batches.append(list(items))
        return [
            RequestRefusedError(f"{item} is negative") if item < 0 else 2 * item
            for item in items
        ]


def submit_all(batcher: Batcher, groups: list[list[int]]) -> list[object]:
    """Submits each group from its own thread; errors are returned as values."""

    def call(group):
        try:
            return batcher.submit(group)
        except RequestRefusedError as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call, groups))


def test_waits_for_the_least_size():
    run = Recorder()
    batcher = Batcher(run, min_size=6, timeout=LONG)
    results = submit_all(batcher, [[1, 2], [3], [4, 5, 6]])
    assert results == [[2, 4], [6], [8, 10, 12]]
    assert [sorted(batch) for batch in run.batches] == [[1, 2, 3, 4, 5, 6]]


def test_the_timeout_ends_the_wait():
    run = Recorder()
    batcher = Batcher(run, min_size=10, timeout=0.2)
    start = time.monotonic()
    assert batcher.submit([1, 2]) == [2, 4]
    assert time.monotonic() - start >= 0.2
    assert run.batches == [[1, 2]]


def test_items_that_go_along_come_back_at_once():
    """Who was taken along by an impatient caller does not sit out its own timeout."""
    run = Recorder()
    patient = Batcher(run, min_size=10, timeout=LONG)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(patient.submit, [1])
        while not len(patient):
            assert not waiting.done()
        patient._timeout = 0.1
        assert patient.submit([2]) == [4]
        assert waiting.result(60) == [2]
    assert run.batches == [[1, 2]]


def test_greatest_size_alone():
    run = Recorder()
    batcher = Batcher(run, max_size=2, timeout=LONG)
    assert batcher.submit([1, 2, 3, 4, 5]) == [2, 4, 6, 8, 10]
    assert [len(batch) for batch in run.batches] == [2, 2, 1]


@pytest.mark.parametrize("size", [6, 9, 11])
def test_the_rest_of_a_call_does_not_wait(size):
    run = Recorder()
    batcher = Batcher(run, min_size=4, max_size=4, timeout=LONG)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(batcher.submit, list(range(size)))
        assert call.result(LONG / 6) == [2 * item for item in range(size)]
    assert [len(batch) for batch in run.batches][:-1] == [4] * (size // 4)


def test_the_rest_of_a_call_that_another_ran_does_not_wait():
    run = Recorder()
    batcher = Batcher(run, min_size=4, max_size=4, timeout=LONG)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(batcher.submit, [1, 2, 3])
        while not len(batcher):
            assert not first.done()
        second = pool.submit(batcher.submit, [4, 5, 6])
        assert second.result(LONG / 6) == [8, 10, 12]
        assert first.result(LONG / 6) == [2, 4, 6]
    assert sorted(len(batch) for batch in run.batches) == [2, 4]


def test_an_error_reaches_only_its_caller():
    run = Recorder()
    batcher = Batcher(run, min_size=4, timeout=LONG)
    good, bad = submit_all(batcher, [[1, 2], [3, -1]])
    assert good == [2, 4]
    assert isinstance(bad, RequestRefusedError)
    assert len(run.batches) == 1
    # And it poisons nothing.
    assert submit_all(batcher, [[5, 6], [7, 8]]) == [[10, 12], [14, 16]]


def test_a_batch_that_fails_as_a_whole():
    def fail(items):
        raise ConnectionError("gone")

    batcher = Batcher(fail, timeout=LONG)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            batcher.submit([1])


def test_no_lock_is_held_while_a_batch_runs():
    """A second batch starts while the first one is still with the engine."""
    both = threading.Barrier(2, timeout=LONG)

    def run(items):
        both.wait()
        return [0] * len(items)

    batcher = Batcher(run, timeout=LONG)
    assert submit_all(batcher, [[1], [2]]) == [[0], [0]]


def test_what_is_told_of_it():
    """Items that wait, and those that the engine has."""
    seen = []

    def run(items):
        seen.append((len(batcher), batcher.running))
        return [0] * len(items)

    batcher = Batcher(run, max_size=2, timeout=LONG)
    batcher.submit([1, 2, 3])
    assert seen == [(1, 2), (0, 1)]
    assert (len(batcher), batcher.running) == (0, 0)


def test_cancel():
    batcher = Batcher(Recorder(), min_size=2, timeout=LONG)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(batcher.submit, [1])
        while not len(batcher):
            assert not call.done()
        batcher.cancel()
        with pytest.raises(GenerationAbortedError, match="was not sent"):
            call.result(LONG)


@pytest.mark.parametrize(
    "arguments",
    [
        {"min_size": 0},
        {"min_size": "2"},
        {"min_size": True},
        {"min_size": 3, "max_size": 2},
        {"max_size": 2.0},
        {"timeout": -1.0},
        {"timeout": None},
        {"timeout": "3"},
    ],
)
def test_wrong_arguments(arguments):
    names = {
        "min_size": "min_batch_size",
        "max_size": "max_batch_size",
        "timeout": "batching_timeout",
    }
    (given, *_) = arguments
    with pytest.raises(ConfigurationError, match=names[given]):
        Batcher(Recorder(), **{"timeout": 1.0, **arguments})
