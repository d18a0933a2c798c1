"""The one ordering of weight versions."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["next_version", "version_order"]


def version_order(version: str) -> int:
    """Returns a weight version as a number; a name, such as ``default``, is oldest."""
    return int(version) if version.isdigit() else -1


def next_version(versions: Iterable[str]) -> str:
    """Returns the version after the newest of these."""
    return str(1 + max(0, *map(version_order, versions)))
