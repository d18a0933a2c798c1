"""Removal of passwords from addresses in texts."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"""(?:(?<=://)[^/\s'"]*|[^/\s'":@]+:[^/\s'"]*)@""")
"""User and password of an address anywhere in a text; the scheme may be missing."""


def hide_passwords(text: object) -> str:
    """Returns a text without users and passwords in its addresses."""
    return _USER_INFO.sub("***@", str(text))
