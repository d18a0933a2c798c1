"""Plugins that run inside servers, which SGLang finds on its ``PYTHONPATH``.

Each file stands alone: the Python of the server, where this package is not, imports it
from this folder, or from wherever the folder was copied to. The folder beside a file,
``*.dist-info``, is what SGLang finds it by (the group ``sglang.srt.plugins``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_sglang.backends.client.drafts import drafts_by_ngrams

FOLDER = Path(__file__).parent


def plugin_path(arguments: Mapping[str, Any], known: str) -> str:
    """Returns the ``PYTHONPATH`` of a server, with this folder if a plugin is for it.

    Args:
        arguments: of the server, under SGLang's names.
        known: its ``PYTHONPATH``.
    """
    if not drafts_by_ngrams(arguments):
        return known
    return os.pathsep.join(filter(None, [known, str(FOLDER)]))
