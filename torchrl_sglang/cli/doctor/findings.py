"""What ``doctor`` says: one finding for each thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["GIB", "Finding", "ok", "problem", "warning"]

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """What was looked at, in a word or two."""
    level: Literal["ok", "warning", "problem"]
    """Whether it is as it should be."""
    message: str
    """What was found; a sentence."""
    remedy: str = ""
    """What to do about it; a sentence, empty if there is nothing to do."""


def ok(check: str, message: str) -> Finding:
    """Returns a finding that asks for nothing."""
    return Finding(check=check, level="ok", message=message)


def warning(check: str, message: str, remedy: str) -> Finding:
    """Returns a finding that some users should do something about."""
    return Finding(check=check, level="warning", message=message, remedy=remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """Returns a finding that keeps something from working."""
    return Finding(check=check, level="problem", message=message, remedy=remedy)
