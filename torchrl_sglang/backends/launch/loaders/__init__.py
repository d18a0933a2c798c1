"""Weight loaders that run inside servers, named by ``--custom-weight-loader``.

Each file stands alone: the Python of the server imports it from this folder, or from
wherever it was copied to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def search_path(arguments: Mapping[str, Any], known: str) -> str:
    """Returns the ``PYTHONPATH`` of a server that may use a loader of this folder.

    Args:
        arguments: of the server, under SGLang's names.
        known: its ``PYTHONPATH``.
    """
    given = arguments.get("custom_weight_loader") or ()
    names = [given] if isinstance(given, str) else [str(name) for name in given]
    modules = [name.rpartition(".")[0] for name in names]
    if not any(module and (FOLDER / f"{module}.py").is_file() for module in modules):
        return known
    return os.pathsep.join(filter(None, [known, str(FOLDER)]))
