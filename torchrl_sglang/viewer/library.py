"""Vega-Lite as a script, from a Python package."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchrl_sglang.errors import ConfigurationError

PACKAGE = "vl-convert-python"


@cache
def library() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as a script, without a network.

    The package bundles it in seconds, so it is cached in a folder for temporary files,
    writable only by this user.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise ConfigurationError(
            f"The viewer draws with Vega-Lite, which the package {PACKAGE} ships; "
            f"pip install '{PACKAGE}>=1.9,<2'."
        ) from error
    cached = _kept_at()
    if cached is not None:
        with suppress(OSError, UnicodeDecodeError):
            content = cached.read_text(encoding="utf-8")
            if content.endswith(END):
                return content
    # Its types require an argument, and its documentation does not.
    bundle: Any = vl_convert.javascript_bundle
    # Nothing in it may close its element.
    script = str(bundle()).replace("</script", "<\\/script") + END
    if cached is not None:
        with suppress(OSError):
            partial = cached.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(script, encoding="utf-8")
            partial.replace(cached)
    return script


END = "\n// The end of the library.\n"
"""Marks a complete cached script."""


def _kept_at() -> Path | None:
    """Returns the path of the cached script; ``None`` if others could write there."""
    folder = Path(tempfile.gettempdir()) / f"torchrl_sglang-viewer-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o022:
        return None
    return folder / f"vega-{version(PACKAGE)}.js"
