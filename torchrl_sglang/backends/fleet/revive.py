"""Gets servers back that do not answer: those that this engine owns are started again.

The supervisor starts what has ended; here is decided, on request, what hangs. A
scheduler that waits in a collective for a trainer that is gone answers nothing, while
its process runs and its HTTP server says that it is well.
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
"""Budget for a scheduler to answer: a step with a long prompt takes seconds."""

POLL_SECONDS = 0.2
"""How often the servers that are being started are looked for."""


async def revive(fleet: Fleet, control: ControlPlane, *, timeout: float) -> None:
    """Returns when every server answers that has not been given up.

    Args:
        fleet: the servers.
        control: calls to them.
        timeout: budget for those that are started again, in seconds.

    Raises:
        ServerTimeoutError: if a server that belongs to somebody else does not answer,
            or if the budget is used up.
        ServerUnavailableError: if one cannot be reached.
        ServerDiedError: if all of them have been started too often.
    """
    deadline = time.monotonic() + timeout
    fleet.notice_deaths()
    asked = {replica.url: replica.process for replica in fleet.replicas}
    outcomes = await control.schedulers_answer(timeout=ANSWER_SECONDS)
    for replica in fleet.replicas:
        error = outcomes.get(replica.url)
        # The supervisor may have started it again meanwhile.
        if (
            error is None
            or not replica.runs
            or replica.process is not asked[replica.url]
        ):
            continue
        if replica.process is None:
            raise type(error)(
                f"{error} This engine does not own the server at {replica.url}, so it "
                f"cannot start it again; its owner has to."
            ) from error
        torchrl_logger.warning(f"{error} The server is started again.")
        fleet.mark_down(replica, str(error))
        await asyncio.to_thread(replica.process.stop)
    # Those of somebody else come back when their owner has started them again.
    owned = [replica for replica in fleet.replicas if fleet.owns(replica)]
    while any(replica.state == "down" for replica in owned):
        if time.monotonic() > deadline:
            reasons = " ".join(r.reason for r in owned if r.state == "down")
            raise ServerTimeoutError(
                f"Servers that were started again are not there after {timeout:g} s. "
                f"{reasons}"
            )
        await asyncio.sleep(POLL_SECONDS)
    if not fleet.urls:
        raise fleet.why_nobody_serves()
