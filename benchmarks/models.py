"""What the benchmarks' servers are started with on the machine at hand."""

from __future__ import annotations

import os
import shlex
from typing import Any


def server_arguments() -> dict[str, Any]:
    """Returns what this machine's server needs, from SGLANG_BUNDLE_FLAGS."""
    arguments: dict[str, Any] = {}
    name = ""
    for word in shlex.split(os.environ.get("SGLANG_BUNDLE_FLAGS", "")):
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            arguments[name] = True
        else:
            arguments[name] = word
    return arguments
