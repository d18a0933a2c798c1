"""When a request is sent again, and after how long."""

from __future__ import annotations

from torchrl_sglang.backends.generation.dispatch import retry_delay
from torchrl_sglang.errors import ServerUnavailableError


def test_only_transient_errors_are_retried():
    for transient in (True, False):
        error = ServerUnavailableError("no", transient=transient)
        assert (retry_delay(error, 1, 5) is not None) == transient


def test_delays_grow_up_to_a_limit():
    error = ServerUnavailableError("no", transient=True)
    for attempt in range(1, 20):
        delay = retry_delay(error, attempt, 20)
        limit = min(0.1 * 2 ** (attempt - 1), 5.0)
        assert limit / 2 <= delay <= limit
    assert retry_delay(error, 20, 20) is None
    assert retry_delay(error, 1, 1) is None
