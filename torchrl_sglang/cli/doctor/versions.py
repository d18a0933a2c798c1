"""Version ranges as this package writes them: pure, and without further packages."""

from __future__ import annotations

import re

__all__ = ["in_range", "release"]

_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*([0-9][0-9.]*)")


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with, without zeros at the end.

    Examples:
        >>> release("2.13.0+cpu"), release("0.5.15.post1")
        ((2, 13), (0, 5, 15))
    """
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def in_range(version: str, specifier: str) -> bool:
    """Returns whether a version lies in a range; any does if the range is empty.

    Examples:
        >>> in_range("2.13.0+cpu", ">=2.11,<3"), in_range("3.0", ">=2.11,<3")
        (True, False)
    """
    own = release(version)
    for operator, text in _CLAUSE.findall(specifier):
        other = release(text)
        holds = {
            ">=": own >= other,
            "<=": own <= other,
            "==": own == other,
            "!=": own != other,
            ">": own > other,
            "<": own < other,
        }[operator]
        if not holds:
            return False
    return True
