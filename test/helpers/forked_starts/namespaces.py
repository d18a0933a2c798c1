"""Namespaces of processes: a program is forked into those of its starter."""

from __future__ import annotations

import ctypes
import os

NAMESPACES = ("net", "uts", "mount")
"""Namespaces of a host, as ``nsenter`` calls them."""

_FILES = {"mount": "mnt"}


def namespace_of(pid: int, kind: str) -> str | None:
    """Returns the identity of a process's namespace; ``None`` if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{_FILES.get(kind, kind)}")
    except OSError:
        return None


def enter_namespaces_of(pid: int) -> None:
    """Moves this process, which has no threads, to the namespaces of another one."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in NAMESPACES:
        if namespace_of(pid, kind) == namespace_of(os.getpid(), kind):
            continue
        number = os.open(f"/proc/{pid}/ns/{_FILES.get(kind, kind)}", os.O_RDONLY)
        if libc.setns(number, 0) != 0:
            raise OSError(ctypes.get_errno(), f"The {kind} namespace of {pid}")
        os.close(number)
