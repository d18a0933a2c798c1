"""The current and dropped sessions of a gateway, by name and by key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from datetime import UTC, datetime

from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.session import Session

KEY_EXPIRED = "key_expired"
"""Error code of an expired key."""


class SessionRegistry:
    """Finds sessions."""

    def __init__(self, lock: threading.Lock, max_dropped: int = 10_000) -> None:
        self._max_dropped = max_dropped
        self._lock = lock
        self._by_name: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._dropped: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def named(self, name: str) -> Session | None:
        """Returns the session of this name, if any."""
        return self._by_name.get(name)

    def all(self) -> list[Session]:
        """Returns all sessions, oldest first."""
        with self._lock:
            return list(self._by_name.values())

    def add(self, session: Session) -> None:
        """Adds a session. The caller holds the lock."""
        self._by_name[session.name] = self._by_key[session.key] = session
        # The key of a dropped session of this name stays dropped.
        self._dropped.pop(session.name, None)

    def remove(self, session: Session) -> bool:
        """Removes a session; returns whether it was present. The caller holds the lock.

        Its name and key are remembered as dropped.
        """
        if self._by_name.get(session.name) is not session:
            return False
        session.is_dropped = True
        del self._by_name[session.name], self._by_key[session.key]
        self._dropped |= dict.fromkeys((session.name, session.key))
        while len(self._dropped) > 2 * self._max_dropped:
            self._dropped.popitem(last=False)
        return True

    def find(self, *, name: str | None = None, key: str | None = None) -> Session:
        """Returns the session of this name or key."""
        with self._lock:
            session = (
                self._by_name.get(name) if name else self._by_key.get(str(key or ""))
            )
            is_dropped = (name or key) in self._dropped
        if session is not None:
            if not name:
                _check_key(session)
            return session
        description = f"session {name!r}" if name else "session with this key"
        if is_dropped:
            raise GatewayError(
                f"The {description} was dropped, and takes nothing more.", status=410
            )
        raise GatewayError(
            f"There is no {description}; gateway.session() makes one.",
            status=404 if name else 401,
        )


def _check_key(session: Session) -> None:
    """Raises :class:`GatewayError` if the key of a session has expired."""
    if session.expires is not None and session.is_expired:
        expiry = datetime.fromtimestamp(session.expires, UTC)
        raise GatewayError(
            f"The key of the session {session.name!r} expired at {expiry:%F %T} UTC, "
            f"after the gateway's key_seconds; begin another session, or give the "
            f"gateway a greater key_seconds.",
            status=401,
            code=KEY_EXPIRED,
        )
