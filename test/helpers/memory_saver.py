"""A memory saver for servers on CPU, which stands in for the one of GPUs.

It is as strict as the real one: what pauses or resumes a kind of memory twice ends.
Memory is not given back, but every weight is lost that has no backup.
"""

from __future__ import annotations

from pathlib import Path

from torchrl_sglang.backends.launch.cpu import engine_python

MEMORY_SAVER = """
import gc, os
from contextlib import contextmanager

import torch


class Saver:
    enabled, hook_mode, paused, kept = True, None, set(), set()

    @contextmanager
    def region(self, tag="default", enable_cpu_backup=False):
        if enable_cpu_backup:
            self.kept.add(tag)
        yield

    cuda_graph = disable = region

    def pause(self, tag=None):
        if tag in self.paused:
            os._exit(1)
        self.paused.add(tag)
        if tag == "weights" and tag not in self.kept:
            for found in gc.get_objects():
                if isinstance(found, torch.nn.Parameter):
                    found.data.fill_(float("nan"))

    def resume(self, tag=None):
        if tag not in self.paused:
            os._exit(1)
        self.paused.remove(tag)


torch_memory_saver = Saver()
configure_subprocess = torch_memory_saver.region
"""


def write_saver_python(folder: Path) -> Path:
    """Writes an interpreter that has SGLang and the stand-in; returns its path."""
    (folder / "torch_memory_saver.py").write_text(MEMORY_SAVER)
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {engine_python()} "$@"\n'
    )
    python.chmod(0o755)
    return python
