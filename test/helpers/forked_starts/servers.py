"""Servers on CPU, as ``preloaded.py`` imports and runs them: by SGLang's own Python."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import sys
from typing import Any

ENDS_AS_A_TREE = True
"""A server that is asked to end has half a second, and a fork keeps nothing to save."""


def load(launcher: str) -> None:
    """Imports what a server imports until it is ready."""
    spec = importlib.util.spec_from_file_location("launch", launcher)
    assert spec is not None
    assert spec.loader is not None
    launch: Any = importlib.util.module_from_spec(spec)
    sys.modules["launch"] = launch
    spec.loader.exec_module(launch)
    launch.prepare_process()
    for name in (
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.registry",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
    ):
        importlib.import_module(name)


def run(arguments: list[str]) -> None:
    """Runs the server as its launcher does, with forks in place of further imports."""
    launch: Any = sys.modules["launch"]
    sys.argv = arguments
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [folder for folder in folders if folder and folder not in sys.path]
    # What is spawned after all imports the launcher.
    sys.modules["__main__"].__file__ = arguments[0]
    multiprocessing.set_start_method("fork", force=True)
    # Its value was read by the import.
    name = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    sampler = importlib.import_module("sglang.srt.layers.sampler")
    setattr(sampler, name, os.environ.get(name, "").lower() in ("true", "1"))
    # SGLang asks for "spawn".
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    os.register_at_fork(after_in_child=launch.die_with_parent)
    launch.die_with_parent()
    launch.main(arguments[1:])
