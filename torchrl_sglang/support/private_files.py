"""Files with prompts, responses or keys, which their owner alone may read."""

from __future__ import annotations

import os

FOLDER_MODE = 0o700
"""Permissions of a folder that is made for such files."""


def for_owner(path: str, flags: int) -> int:
    """Opens a file, for ``open(..., opener=for_owner)``; its owner alone may read it.

    The permissions of a file that is there stay.

    Examples:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "texts")
        >>> open(path, "w", opener=for_owner).close()
        >>> oct(os.stat(path).st_mode)[-3:]
        '600'
    """
    return os.open(path, flags, 0o600)
