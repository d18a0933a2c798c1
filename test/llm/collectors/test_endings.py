"""What conversations leave for their end is called once each, whatever happens."""

from __future__ import annotations

import time

import pytest
from helpers.collecting import begin
from helpers.waiting import wait_until

from torchrl_sglang import CollectorTimeouts
from torchrl_sglang.errors import CollectionError


def constant(conversation, task):
    return 1.0


def test_a_shutdown_closes_what_is_open(make):
    """All of it, and side by side."""
    opened, closed = [], []

    def step(conversation, task):
        number = len(opened)
        opened.append(number)

        def close():
            time.sleep(0.2)
            closed.append(number)

        conversation.at_end(close)

    collector = make(
        step=step, rewards=constant, group_size=8, groups_per_batch=1, max_staleness=1
    )
    begin(collector)
    wait_until(lambda: closed)
    collector.shutdown()
    assert sorted(closed) == sorted(opened)


def test_the_last_one_is_first(make):
    order = []

    def step(conversation, task):
        async def network():
            order.append("network")

        conversation.at_end(network)
        conversation.at_end(lambda: order.append("container"))

    collector = make(step=step, rewards=constant, group_size=2)
    batch = next(iter(collector))
    assert batch["next", "done"].all()
    collector.shutdown()
    # Conversations end side by side.
    first = [order.index("network"), order.index("container")]
    assert first == sorted(first, reverse=True)
    assert order.count("network") == order.count("container")


def test_one_that_hangs_keeps_no_shutdown_waiting(make, gate, caplog):
    """What waits behind it is called in a thread."""
    waiting, called = [], []

    def hang():
        waiting.append(1)
        gate.wait()

    def step(conversation, task):
        conversation.at_end(lambda: called.append(1))
        conversation.at_end(hang)

    collector = make(
        step=step,
        rewards=constant,
        group_size=2,
        groups_per_batch=1,
        timeouts=CollectorTimeouts(shutdown=2.0),
    )
    begin(collector)
    wait_until(lambda: len(waiting) >= 2)
    collector.shutdown()
    wait_until(lambda: len(called) >= 2)
    assert "left for their end" in caplog.text


def test_functions_registered_after_the_end_are_called_at_once(make, gate):
    """By a function that took too long, for example."""
    began, called = [], []

    def step(conversation, task):
        began.append(1)
        gate.wait(0.5)
        conversation.at_end(lambda: called.append(1))

    collector = make(
        step=step,
        rewards=constant,
        group_size=2,
        groups_per_batch=1,
        max_retries=0,
        timeouts=CollectorTimeouts(step=0.2),
    )
    with pytest.raises(CollectionError, match="did not return in time"):
        next(iter(collector))
    wait_until(lambda: len(called) == len(began))
