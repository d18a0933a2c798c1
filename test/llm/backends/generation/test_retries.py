"""When a request is sent again, and after how long."""

from __future__ import annotations

import pytest

from torchrl_sglang.backends.generation.retries import RetryPolicy
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerDiedError,
    ServerTimeoutError,
    ServerUnavailableError,
)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ServerUnavailableError("no", transient=True), True),
        (ServerUnavailableError("no", transient=False), False),
        (RequestRefusedError("no"), False),
        (ServerTimeoutError("no"), False),
        (ServerDiedError("no"), False),
    ],
)
def test_what_is_sent_again(error, again):
    assert (RetryPolicy().delay(error, 1) is not None) == again


def test_waits_grow_up_to_a_limit():
    policy = RetryPolicy(attempts=20, first_delay=0.1, longest_delay=2.0)
    error = ServerUnavailableError("no", transient=True)
    waits = [policy.delay(error, attempt) for attempt in range(1, 20)]
    for attempt, wait in enumerate(waits):
        limit = min(0.1 * 2**attempt, 2.0)
        assert limit / 2 <= wait <= limit
    assert policy.delay(error, 20) is None
    assert RetryPolicy(attempts=1).delay(error, 1) is None
