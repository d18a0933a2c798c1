"""Selection of a server for a request: in turn, by session, failed servers last."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Collection, Sequence

from torchrl_sglang.backends.fleet.replica import Replica

MAX_SESSIONS = 4096
"""Most sessions with a remembered server; a prefix cache holds fewer."""

MOST_COMPARED = 32
"""Most servers whose sessions are compared for a new session."""

_NEVER = 4


class Routing:
    """Chooses servers in turn, a server per session, failed servers last.

    The cost of a choice does not grow with the number of servers. Sessions refer to a
    server by its constant rank.
    """

    def __init__(self, sessions: dict[str, int] | None = None) -> None:
        self.sessions = sessions or {}
        """Session -> rank of the server with its prefix."""
        self._counts = Counter(self.sessions.values())
        self._failed_at: dict[str, float] = {}
        self._turn = 0

    def failed(self, url: str) -> None:
        """Records a failed request to a server."""
        self._failed_at[url] = time.monotonic()

    def choose(
        self, replicas: Sequence[Replica], session: str | None, avoid: Collection[str]
    ) -> Replica | None:
        """Returns a serving server, preferably none to ``avoid``.

        A new session gets the server with the fewest sessions among the next in turn.
        """
        if session is None:
            places = self._next(replicas, avoid, 1)
            return self._take(replicas, places[0]) if places else None
        # Most recently used last: the oldest are forgotten first.
        home = self.sessions.pop(session, None)
        chosen = _find(replicas, home)
        if chosen is None or self._rank(chosen, avoid) > 0:
            places = self._next(replicas, avoid, MOST_COMPARED)
            if home is not None:
                self._counts[home] -= 1
            if not places:
                return None
            if all(replicas[place].rank != home for place in places):
                place = min(
                    places, key=lambda index: self._counts[replicas[index].rank]
                )
                chosen = self._take(replicas, place)
            assert chosen is not None
            self._counts[chosen.rank] += 1
        self.sessions[session] = chosen.rank
        while len(self.sessions) > MAX_SESSIONS:
            self._counts[self.sessions.pop(next(iter(self.sessions)))] -= 1
        return chosen

    def _take(self, replicas: Sequence[Replica], place: int) -> Replica:
        """Returns the server at a position; its successor has the next turn."""
        self._turn = place + 1
        return replicas[place]

    def _next(
        self, replicas: Sequence[Replica], avoid: Collection[str], most: int
    ) -> list[int]:
        """Returns the positions of the best servers, in turn."""
        by_preference: dict[int, list[int]] = {}
        for step in range(len(replicas)):
            index = (self._turn + step) % len(replicas)
            rank = self._rank(replicas[index], avoid)
            if rank < _NEVER:
                by_preference.setdefault(rank, []).append(index)
            if len(by_preference.get(0, ())) == most:
                break
        return by_preference[min(by_preference)] if by_preference else []

    def _rank(self, replica: Replica, avoid: Collection[str]) -> int:
        """Returns 0 for the best choice."""
        if replica.state != "serving":
            return _NEVER
        failed_at = self._failed_at.get(replica.url)
        soon = failed_at is not None and time.monotonic() < failed_at + 1.0
        return 2 * (replica.url in avoid) + soon


def _find(replicas: Sequence[Replica], rank: int | None) -> Replica | None:
    """Returns the server of a rank in a list in order of ranks; ``None``: removed."""
    if rank is None:
        return None
    place = bisect.bisect_left(replicas, rank, key=lambda replica: replica.rank)
    is_present = place < len(replicas) and replicas[place].rank == rank
    return replicas[place] if is_present else None
