"""Makes the paths among a server's arguments absolute.

A relative path belongs to the current folder of this process. A restarted server, a
remote server, a copy of the engine and another client run in other folders, where the
same path is missing or another model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_READ = re.compile(
    r"^(model|model_name|tokenizer|tokenizer_name|init_expert_location)$"
    r"|(path|paths|file|keyfile|certfile|certs|template)$"
)
"""Arguments for a file or a folder, or something else: a hub name, an SGLang
template."""

_WRITTEN = re.compile(r"(_dir|_folder|storage_path|save_path|export_path)$")
"""Arguments for folders, which need not exist yet."""


def absolute_paths(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments with absolute paths of files and folders."""
    resolved = dict(arguments)
    for name, value in arguments.items():
        if _WRITTEN.search(name):
            resolved[name] = _each(value, written=True)
        elif _READ.search(name):
            resolved[name] = _each(value, written=False)
        elif name == "python" and os.path.dirname(value or ""):
            # A bare name is looked up in PATH.
            resolved[name] = _each(value, written=True)
    return resolved


def _each(value: Any, *, written: bool) -> Any:
    """Returns a path, or the paths in a list or a mapping of LoRA adapters."""
    if isinstance(value, Mapping):
        return {name: _each(path, written=written) for name, path in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each(path, written=written) for path in value]
    if not isinstance(value, (str, os.PathLike)):
        return value
    text = str(os.fspath(value))
    # SGLang takes an adapter as NAME=PATH, too.
    name, equals, path = text.rpartition("=")
    return name + equals + _absolute(path, written=written)


def _absolute(text: str, *, written: bool) -> str:
    path = Path(text).expanduser()
    return str(path.absolute()) if text and (written or path.exists()) else text
