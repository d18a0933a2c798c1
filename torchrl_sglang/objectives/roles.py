"""Names of the agents of a session that have one role. Pure.

The first one has the role's name, and others are ``solver-2`` and so on.
"""

from __future__ import annotations

from collections.abc import Set

LATER_NAME = "{role}-{number}"
"""Name of the second agent of a role, and of later ones."""


def role_of(name: str, names: Set[str]) -> str:
    """Returns an agent's role, if its first agent is among the names.

    Examples:
        >>> role_of("solver-2", {"solver", "solver-2"}), role_of("gpt-5", {"gpt-5"})
        ('solver', 'gpt-5')
    """
    role, _, number = name.rpartition("-")
    return role if number.isdigit() and role in names else name
