"""LocalDirectory: the addresses of an engine's servers on this machine, in a file.

Copies of the engine in other processes read it. There is no file before a server joins
or leaves: a restarted server keeps its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from torchrl_sglang.errors import ServerUnavailableError


class LocalDirectory:
    """Addresses of an engine's servers in a file; see :class:`.Directory`."""

    def __init__(self) -> None:
        name = f"torchrl_sglang_servers_{secrets.token_hex(8)}.json"
        self._path = Path(tempfile.gettempdir(), name)
        self._first: list[str] | None = None
        self._told: list[str] = []
        # With the engine, also where nobody shuts it down.
        self._remove = weakref.finalize(self, _remove, self._path, os.getpid())

    def publish(self, urls: Sequence[str]) -> None:
        """Writes each server's address, by rank, after the first change."""
        now = list(urls)
        if self._first is None:
            self._first = self._told = now
        # Whether a server is down, copies see by themselves.
        changed = len(now) != len(self._first) or not set(now) <= {*self._first, ""}
        if now == self._told or not (changed or self._path.exists()):
            return
        if not self._remove.alive:
            return
        part = self._path.with_suffix(f".{os.getpid()}")
        # Mode 0600: addresses are private to this user.
        with contextlib.suppress(OSError):
            part.touch(mode=0o600)
            part.write_text(json.dumps(now))
            part.replace(self._path)
            self._told = now

    async def urls(self) -> Sequence[str]:
        """Returns the latest published addresses, or raises an SGLangError."""
        try:
            content = await asyncio.to_thread(self._path.read_text)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ServerUnavailableError(
                f"The directory of the servers cannot be read: {error}"
            ) from error
        return tuple(json.loads(content))

    def end(self) -> None:
        """Removes the file for good."""
        self._remove()

    def __getstate__(self) -> dict[str, object]:
        return {"_path": self._path, "_first": None, "_told": []}


def _remove(path: Path, owner: int) -> None:
    # A forked process ends before its parent.
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
