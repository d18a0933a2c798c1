"""How many requests servers have at once, so that the others can be ordered. Pure.

The order of requests is decided when they are sent. So a server gets as many as it runs
and a few to go on with: a place that becomes free is taken by the next of its queue at
once, without a message in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.types import ServerLoad

SPARE_SHARE = 16
"""One in so many requests waits in a server's queue."""

FEWEST_SPARE = 2
"""Fewest requests that wait in a server's queue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How many requests servers have at once while their memory is large enough."""

    places: int
    """Requests that they run."""
    spare: int
    """Requests that wait in their queues, to go on with."""

    @property
    def most(self) -> int:
        """Both together."""
        return self.places + self.spare


def room_of(servers: Sequence[ServerLoad]) -> Room:
    """Returns how many requests servers have at once.

    Raises:
        UnsupportedByServerError: if one does not tell how many it runs.
    """
    limits = [server.limit for server in servers if server.limit is not None]
    if len(limits) < len(servers):
        raise UnsupportedByServerError(
            "request_order='longest' needs servers that tell how many requests they "
            "run at once, and one does not: start it with max_running_requests=..., "
            "or leave request_order out."
        )
    places = sum(limits)
    spare = max(places // SPARE_SHARE, FEWEST_SPARE * len(servers))
    return Room(places=places, spare=spare)


def most_in_flight(servers: Sequence[ServerLoad], in_flight: int, before: int) -> int:
    """Returns how many requests to have in flight from now on.

    Less than there is room for, while memory is the limit. That is seen by queues that
    are longer than need be, so that what they hold more is what servers can go on with.

    Args:
        servers: what they do now.
        in_flight: requests of this process among theirs.
        before: the number until now.
    """
    room = room_of(servers)
    running = sum(server.running for server in servers)
    queued = sum(server.queued for server in servers)
    if running + queued > in_flight + room.spare:
        # Others' requests wait, too: who sends less than they do has to wait longer.
        return room.most
    if queued > room.spare and running < room.places:
        return max(in_flight - (queued - room.spare), len(servers))
    more = max(room.spare, in_flight // 4) if queued == 0 else room.spare - queued
    return min(max(before, in_flight + more), room.most)
