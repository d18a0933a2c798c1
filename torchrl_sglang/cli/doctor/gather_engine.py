"""Finding out about the Python that SGLang would run in, without importing SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.cli.doctor.facts import EngineFacts
from torchrl_sglang.errors import ConfigurationError

__all__ = ["gather_engine"]

PACKAGES = ("sglang", "sglang-router", "torch", "transformers")

ASK_SECONDS = 60.0
"""Budget for an interpreter to name its packages; its start takes 0.1 s."""

_ASK = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def gather_engine(
    device: Literal["cpu", "cuda"], python: str | None, *, required: str
) -> EngineFacts:
    """Returns which SGLang would be started.

    Args:
        device: what it would run on.
        python: its interpreter; by default what a server would take.
        required: versions that this package is used with.
    """
    interpreter = python or sys.executable
    own: dict[str, str] = {}
    try:
        if device == "cpu":
            interpreter = str(cpu.engine_python(python=python))
            own = cpu.engine_environment(python=python)
        own_python = interpreter != sys.executable
        inherited = inherited_environment(os.environ, own_python=own_python)
        packages = ask_packages(interpreter, {**inherited, **own})
    except ConfigurationError as error:
        return EngineFacts(device=device, python=None, error=str(error))
    folder = Path(interpreter).parent.parent
    return EngineFacts(
        device=device,
        python=interpreter,
        packages=packages,
        required=required,
        generations=tuple(
            version
            for version in cpu.VERSIONS
            if device == "cpu" and (folder / f"sglang-{version}").is_dir()
        ),
    )


def ask_packages(python: str, environment: dict[str, str]) -> dict[str, str | None]:
    """Returns the versions of an interpreter's packages.

    Raises:
        ConfigurationError: if it does not answer.
    """
    try:
        done = subprocess.run(
            [python, "-c", _ASK, *PACKAGES],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=True,
        )
        found: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise ConfigurationError(
            f"{python} cannot be asked for its packages: {''.join(said[-1:])}."
        ) from None
    return found
