"""Texts are shown without the passwords of the addresses in them."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"""(?:(?<=://)[^/\s'"]*|[^/\s'":@]+:[^/\s'"]*)@""")
"""User and password of an address anywhere in a text; the scheme may be missing."""


def hide_passwords(text: object) -> str:
    """Returns a text without the users and passwords of the addresses in it."""
    return _USER_INFO.sub("***@", str(text))
