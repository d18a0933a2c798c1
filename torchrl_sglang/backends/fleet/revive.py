"""Restarts servers that hang, on request; the supervisor restarts those that end.

A scheduler that waits in a collective for a trainer that is gone answers nothing, while
its process runs and its HTTP server reports that it is healthy.
"""

from __future__ import annotations

import asyncio
import time

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.errors import ServerTimeoutError

__all__ = ["revive"]

ANSWER_SECONDS = 20.0
"""Timeout for a scheduler to answer: a step with a long prompt takes seconds."""

POLL_SECONDS = 0.2
"""Interval between looks for the servers that are being started."""


async def revive(fleet: Fleet, control: ControlPlane, *, timeout: float) -> None:
    """Returns when every server answers that is not lost; see AsyncSGLang.revive."""
    deadline = time.monotonic() + timeout
    fleet.notice_deaths()
    asked = {replica.url: replica.handle for replica in fleet.replicas}
    outcomes = await control.schedulers_answer(timeout=ANSWER_SECONDS)
    for replica in fleet.replicas:
        error = outcomes.get(replica.url)
        # The supervisor may have started it again meanwhile.
        same = replica.handle is asked[replica.url]
        if error is None or not replica.runs or not same:
            continue
        if replica.handle is None:
            raise type(error)(
                f"{error} This engine does not own the server at {replica.url}, so it "
                f"cannot start it again; its owner has to."
            ) from error
        torchrl_logger.warning(f"{error} The server is started again.")
        fleet.mark_down(replica, str(error))
        await asyncio.to_thread(replica.handle.stop)
    # The supervisor starts owned servers again; others wait for their owner.
    while down := [r for r in fleet.replicas if r.state == "down" and fleet.owns(r)]:
        if time.monotonic() > deadline:
            reasons = " ".join(replica.reason for replica in down)
            raise ServerTimeoutError(
                f"Servers that were started again are not there after {timeout:g} s. "
                f"{reasons}"
            )
        await asyncio.sleep(POLL_SECONDS)
    if not fleet.urls:
        raise fleet.no_server_error()
