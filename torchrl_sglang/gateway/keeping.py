"""Stores turns in their session, after the session file."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.branches import BranchReason
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.store import Store
from torchrl_sglang.gateway.turns import Turn


@dataclass(kw_only=True)
class TurnCounts:
    """Counts of recorded turns, including dropped sessions."""

    turns: int = 0
    """Responses."""
    tokens: int = 0
    """Their tokens."""
    branches: Counter[BranchReason] = field(default_factory=Counter)
    """Requests with a new branch, by reason."""

    def add(self, turns: Sequence[Turn]) -> None:
        """Counts the turns of a request."""
        branch = turns[0].branch
        self.turns += len(turns)
        self.tokens += sum(len(turn.completion.token_ids) for turn in turns)
        if branch is not None:
            self.branches[branch.reason] += 1


class Keeper:
    """Adds turns to sessions and removes them, in their store, too."""

    def __init__(self, lock: threading.Lock) -> None:
        self.store: Store | None = None
        self.counts = TurnCounts()
        self._lock = lock

    async def keep(
        self, session: Session, turns: Sequence[Turn], *, new: int = 0
    ) -> None:
        """Adds turns to their session, after the store.

        If that fails, none of them is kept. ``new``: how many, from the end, are
        counted. A request without a session is only counted.
        """
        if not session.name:
            with self._lock:
                self.counts.add(turns)
            return
        origin = turns[0].prompt.origin
        with self._lock:
            # A client has seen the turns it continues.
            turns = [*_unkept(session, origin), *turns]
            pinned = turns if origin is None else [origin, *turns]
            session.pinned += pinned
        try:
            if self.store is not None:
                await self._save(session, turns)
            with self._lock:
                check_takes_turns(session)
                for turn in turns:
                    if turn not in session:
                        session.add(turn)
                if new:
                    self.counts.add(turns[-new:])
        finally:
            with self._lock:
                for turn in pinned:
                    session.pinned.remove(turn)

    async def _save(self, session: Session, turns: Sequence[Turn]) -> None:
        """Writes turns to the store, and removes them if the call is cancelled."""
        assert self.store is not None
        try:
            await self.store.save_turns(session, turns)
        except asyncio.CancelledError:
            with self._lock:
                alone = [t for t in turns if session.pinned.count(t) == 1]
                gone = [turn for turn in alone if turn not in session]
            if self.store is not None:
                self.store.delete_turns(session, gone)
            raise

    def withdraw(self, session: Session, turns: Sequence[Turn]) -> None:
        """Removes turns unseen by any client."""
        with self._lock:
            # Other turns continue pinned turns: their clients have seen them.
            loose = [turn for turn in turns if turn not in session.pinned]
            gone = [turn for turn in loose if session.remove(turn)]
            if self.store is not None and gone:
                self.store.delete_turns(session, gone)

    async def unname(self, session: Session, turn: Turn) -> None:
        """Removes the name of a turn's answer, also in the store."""
        with self._lock:
            session.unname(turn)
        if self.store is not None:
            await self.store.save_turns(session, [turn])

    async def written(self) -> None:
        """Waits until all changes are in the store."""
        if self.store is not None:
            await self.store.written()

    async def writable(self) -> None:
        """Checks that the store can be written."""
        if self.store is not None and self.store.has_failed:
            await self.store.written()


def check_takes_turns(session: Session) -> None:
    """Raises :class:`GatewayError` for a dropped session."""
    if session.is_dropped:
        raise GatewayError(
            f"The session {session.name!r} was dropped, and takes nothing more.",
            status=410,
        )


def _unkept(session: Session, turn: Turn | None) -> list[Turn]:
    """Returns this turn and its missing predecessors, oldest first."""
    missing: list[Turn] = []
    while turn is not None and turn not in session:
        missing.append(turn)
        turn = turn.prompt.origin
    return missing[::-1]
