"""Versions of packages, and the commit of a working directory."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torchrl_sglang", "torchrl", "tensordict", "torch", "transformers", "peft")

GIT_SECONDS = 5.0
"""Timeout of git, such as on a slow file system."""


def read_software(folder: str) -> dict[str, str]:
    """Returns versions that a run depends on, and the commit of a folder, if any."""
    values = {"version.python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            values[f"version.{name}"] = version(name)
    if commit := _commit(folder):
        values["commit"] = commit
    return values


def _commit(folder: str) -> str:
    """Returns the commit of a folder; ``-dirty`` marks changes of tracked files."""
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
