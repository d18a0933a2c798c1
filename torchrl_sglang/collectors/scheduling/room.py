"""How many requests servers have at once, so that the others can be ordered. Pure.

The order of requests is decided when they are sent. So a server gets as many as it runs
and a few to go on with: a place that becomes free is taken by the next of its queue at
once, without a message in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.types import ServerLoad

SPARE_SHARE = 16
"""One in so many requests waits in a server's queue."""

FEWEST_SPARE = 2
"""Fewest requests that wait in a server's queue."""


def most_in_flight(
    servers: Sequence[ServerLoad], in_flight: int, before: int | None
) -> int:
    """Returns how many requests to have in flight.

    Args:
        servers: what they do now.
        in_flight: requests of this process among theirs.
        before: what was returned last; ``None``: nothing yet.

    Raises:
        UnsupportedByServerError: if a server does not tell how many it runs.
    """
    limits = [server.limit for server in servers if server.limit is not None]
    if len(limits) < len(servers):
        raise UnsupportedByServerError(
            "request_order='longest' needs servers that tell how many requests they "
            "run at once, and one does not: start it with max_running_requests=..., "
            "or leave request_order out."
        )
    room = sum(limits)
    spare = max(room // SPARE_SHARE, FEWEST_SPARE * len(servers))
    running = sum(server.running for server in servers)
    queued = sum(server.queued for server in servers)
    if running + queued > in_flight + spare:
        # Others' requests wait, too: who sends less than they do has to wait longer.
        return room + spare
    if queued > spare and running < room:
        # Their memory is full before that number runs.
        return max(in_flight - (queued - spare), len(servers))
    if before is not None and before < room + spare:
        return min(max(before, in_flight + spare - queued), room + spare)
    return room + spare
