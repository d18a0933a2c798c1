"""Signals become an exception, and a clean-up is not disturbed by them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from torchrl_sglang.cli.interrupts import Interrupted, interruptible, uninterrupted

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def nothing_is_ignored() -> Iterator[None]:
    """A shell or ``nohup`` may have some of them ignored, and tests inherit that."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_interrupts_the_block(number):
    before = [signal.getsignal(each) for each in NUMBERS]
    with pytest.raises(Interrupted) as caught, interruptible():
        os.kill(os.getpid(), number)
    assert caught.value.number == number
    assert isinstance(caught.value, KeyboardInterrupt)
    assert [signal.getsignal(each) for each in NUMBERS] == before


@pytest.mark.parametrize("number", NUMBERS)
def test_a_clean_up_is_finished(number):
    with interruptible():
        with uninterrupted():
            os.kill(os.getpid(), number)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), number)


def test_sigint_counts_where_a_shell_has_it_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(Interrupted), interruptible():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_has_no_handlers():
    ran = []

    def work() -> None:
        with interruptible(), uninterrupted():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran
