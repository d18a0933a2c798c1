"""Order of the prompts: the next to start, those that are done, none lost or twice."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class PromptOrder:
    """Hands out positions in the order of prompts, each until it is done.

    A position that is handed out is open until :meth:`close`. Positions that were open
    when the state was saved are handed out again first, in their order.
    """

    def __init__(self, on_close: Callable[[int], None] | None = None) -> None:
        self._on_close = on_close
        self._next = 0
        self._waiting: list[int] = []
        self._open: set[int] = set()

    @property
    def waiting(self) -> int:
        """Number of positions that are to be handed out again."""
        return len(self._waiting)

    @property
    def to_repeat(self) -> Sequence[int]:
        """Positions that are to be handed out again, in no order."""
        return tuple(self._waiting)

    def take(self) -> int:
        """Returns the position to start next, which is open from now on."""
        if self._waiting:
            position = heapq.heappop(self._waiting)
        else:
            position = self._next
            self._next += 1
        self._open.add(position)
        return position

    def put_back(self, position: int) -> None:
        """Has an open position handed out again."""
        self._open.remove(position)
        heapq.heappush(self._waiting, position)

    def close(self, position: int) -> None:
        """Ends an open position: it is never handed out again."""
        self._open.remove(position)
        if self._on_close is not None:
            self._on_close(position)

    def end(self, position: int) -> None:
        """Marks ``position`` as the end of the dataset."""
        self._next = min(self._next, position)

    def state_dict(self) -> dict[str, Any]:
        """Returns the next fresh position and those before it that are not done."""
        return {
            "next": self._next,
            "open": sorted(
                position
                for position in (*self._open, *self._waiting)
                if position < self._next
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was saved."""
        self._next = int(state["next"])
        self._waiting = sorted(int(position) for position in state["open"])
        self._open = set()
