"""The mark of a checkpoint that this package wrote, which servers then say they serve.

A server that loaded weights from a folder names that folder as its model from then on.
The folder goes away when newer weights are written; what the server was started with
stays, and the mark tells where that is.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["MARK", "original_model", "write_mark"]

MARK = ".torchrl_sglang"
"""Name of the file in a folder that this package made and may remove."""


def write_mark(folder: Path, model: str) -> None:
    """Marks a folder."""
    (folder / MARK).write_text(json.dumps({"model": model}))


def original_model(path: str) -> str:
    """Returns the model that a checkpoint continues, or ``path`` where it has no mark.

    Examples:
        >>> original_model("Qwen/Qwen3-0.6B")
        'Qwen/Qwen3-0.6B'
    """
    try:
        return str(json.loads((Path(path) / MARK).read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return path
