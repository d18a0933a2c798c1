"""Files with prompts, responses or keys, readable only by their owner."""

from __future__ import annotations

import os

FOLDER_MODE = 0o700
"""Permissions of a new folder for such files."""


def for_owner(path: str, flags: int) -> int:
    """Opens a new file for its owner only, as ``open(..., opener=for_owner)``."""
    return os.open(path, flags, 0o600)
