"""Launching SGLang where there is no accelerator.

SGLang runs on a plain CPU, given an environment of its own, a few flags and a small
entry module. This package supplies all three, so that demos and tests meet the real
engine: :mod:`.install` builds the environment, :mod:`.launch` is what its Python runs,
and the functions here tell the trainer's process how to start it. They read the file
system and decide; nothing here starts a process or imports SGLang.

A server's command line is :func:`launch_command` and its flags. Its environment has
:func:`engine_environment` beyond that of a server on a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "DEFAULT_VERSION",
    "VERSIONS",
    "default_server_args",
    "engine_environment",
    "engine_python",
    "launch_command",
    "lora_server_args",
]

DEFAULT_VERSION = "0.5.23"
"""The SGLang that the environment's own packages hold."""

VERSIONS = (DEFAULT_VERSION, "0.5.20")
"""What runs on the one set of dependencies; 0.5.20 is before update sessions."""

PYTHON_VARIABLE = "TORCHRL_SGLANG_PYTHON"
"""The environment variable that names another interpreter to run SGLang with."""

INSTALL_COMMAND = "python -m torchrl_sglang.backends.launch.cpu.install"


def engine_python(
    version: str | None = None, python: str | os.PathLike[str] | None = None
) -> Path:
    """Return the interpreter of the engine environment.

    Args:
        version (str, optional): the SGLang to run, one of :data:`VERSIONS`.
            Defaults to :data:`DEFAULT_VERSION`.
        python (path, optional): an interpreter that has SGLang, to use instead of the
            one that :mod:`.install` made.

    Raises:
        ConfigurationError: if the version is unknown or is not installed.
    """
    found = _find_python() if python is None else Path(python)
    overlay = _overlay(found, version)
    if overlay is not None and not overlay.is_dir():
        raise ConfigurationError(
            f"SGLang {version} is not installed in {overlay.parent}. Install it with "
            f"`{INSTALL_COMMAND} --version {version} --prefix {overlay.parent}`."
        )
    return found


def engine_environment(
    version: str | None = None, python: str | os.PathLike[str] | None = None
) -> dict[str, str]:
    """Return what a server's environment has beyond, or instead of, the trainer's.

    Args:
        version (str, optional): as in :func:`engine_python`.
        python (path, optional): as in :func:`engine_python`.
    """
    overlay = _overlay(engine_python(version, python), version)
    return {
        # Without it, the rotary embedding looks for another engine's kernels.
        "SGLANG_USE_CPU_ENGINE": "1",
        # Threads that spin while they wait for one another take the cores from those
        # they wait for: beside one other busy process, a batch took 50 times as long.
        "OMP_WAIT_POLICY": "passive",
        # Never the trainer's: its packages are built against another torchvision.
        "PYTHONPATH": "" if overlay is None else str(overlay),
    }


def launch_command(
    version: str | None = None, python: str | os.PathLike[str] | None = None
) -> list[str]:
    """Return the command that starts a server once flags are appended to it.

    Args:
        version (str, optional): as in :func:`engine_python`.
        python (path, optional): as in :func:`engine_python`.
    """
    launcher = Path(__file__).with_name("launch.py")
    return [str(engine_python(version, python)), str(launcher)]


def default_server_args() -> dict[str, object]:
    """Return the arguments that a server on CPU needs, under SGLang's own names."""
    return {
        "device": "cpu",
        # Exact log-probs, and faster than bfloat16 on a processor without AMX.
        "dtype": "float32",
        # There is no device whose work could overlap with the scheduler's.
        "disable_overlap_schedule": True,
        # Otherwise an idle scheduler keeps one core busy polling.
        "sleep_on_idle": True,
        # A share of the machine's memory: the trainer lives on the same one.
        "mem_fraction_static": 0.05,
        # Bounds the key-value cache, whatever the machine's memory: 32 sequences of
        # 2,048 tokens.
        "max_total_tokens": 65_536,
        # Constrained decoding is not used in rollouts, and its backends load slowly.
        "grammar_backend": "none",
        # Nothing is compiled or captured on CPU, so a warm-up only costs two seconds.
        "skip_server_warmup": True,
    }


def lora_server_args() -> dict[str, object]:
    """Return what a server on CPU needs beyond that where it takes LoRA adapters."""
    # The other backends are kernels for accelerators.
    return {"lora_backend": "torch_native"}


def _find_python() -> Path:
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigurationError(
                f"{PYTHON_VARIABLE} names {named}, which does not exist. Correct it, "
                f"or unset it and run `{INSTALL_COMMAND}`."
            )
        return Path(named).absolute()
    python = Path(sys.prefix) / "sglang-cpu" / "bin" / "python"
    if not python.is_file():
        raise ConfigurationError(
            f"There is no SGLang for this CPU: {python} does not exist. Create its "
            f"environment with `{INSTALL_COMMAND}`, or name an interpreter that has "
            f"SGLang in {PYTHON_VARIABLE}."
        )
    return python


def _overlay(python: Path, version: str | None) -> Path | None:
    """Return the folder that shadows the environment's own SGLang, if one must."""
    if version is None or version == DEFAULT_VERSION:
        return None
    if version not in VERSIONS:
        raise ConfigurationError(
            f"SGLang {version} is not known to run on CPU; choose one of "
            f"{', '.join(VERSIONS)}."
        )
    return python.parent.parent / f"sglang-{version}"
