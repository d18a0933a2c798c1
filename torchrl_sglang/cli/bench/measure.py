"""Servers, loads and clocks of ``bench``, for the scripts in ``benchmarks/``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "collectors": ("GROUP_SIZE", "make_env", "reward"),
    "generation": ("exact_length", "long_tailed"),
    "models": ("BUILT_IN", "Load", "save_model", "server_arguments", "start_engine"),
    "timing": ("Clock", "median_seconds"),
    "transfer": ("random_weights",),
}
"""Modules beside this module, and their names for scripts."""


def __getattr__(name: str) -> Any:
    """Imports a module on demand: some need hundreds of megabytes."""
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"{__package__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
