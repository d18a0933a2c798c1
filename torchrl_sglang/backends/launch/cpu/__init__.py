"""SGLang on a machine without an accelerator.

SGLang runs on a plain CPU in a separate environment, which
:mod:`torchrl_sglang.cli.cpu.install` builds, with a few flags and a small entry module,
``launch.py``. The functions here return the command, the variables and the flags; they
start no process and do not import SGLang.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchrl_sglang.errors import ConfigurationError

DEFAULT_VERSION = "0.5.23"
"""The SGLang version of the environment itself."""

VERSIONS = (DEFAULT_VERSION, "0.5.20")
"""Versions with the same dependencies; 0.5.20 has no update sessions."""

PYTHON_VARIABLE = "TORCHRL_SGLANG_PYTHON"
"""Environment variable with the path of another interpreter for SGLang."""

INSTALL_COMMAND = "python -m torchrl_sglang.cli.cpu.install"


def check_version(version: str) -> str:
    """Returns a version of SGLang for CPU."""
    if version not in VERSIONS:
        raise ConfigurationError(
            f"SGLang {version} is not known to run on CPU; choose one of "
            f"{', '.join(VERSIONS)}."
        )
    return version


def engine_python(
    version: str | None = None, python: str | os.PathLike[str] | None = None
) -> Path:
    """Returns the interpreter of the engine environment.

    ``version`` is a member of :data:`VERSIONS`. By default the interpreter comes from
    :data:`INSTALL_COMMAND`.
    """
    interpreter = _find_python() if python is None else Path(python)
    overlay = _overlay(interpreter, version)
    if overlay is not None and not overlay.is_dir():
        raise ConfigurationError(
            f"SGLang {version} is not installed in {overlay.parent}. Install it with "
            f"`{INSTALL_COMMAND} --version {version} --prefix {overlay.parent}`."
        )
    return interpreter


def engine_environment(
    version: str | None = None, python: str | os.PathLike[str] | None = None
) -> dict[str, str]:
    """Returns a server's replacements of the trainer's variables."""
    overlay = _overlay(engine_python(version, python), version)
    return {
        # Otherwise, the rotary embedding looks for another engine's kernels.
        "SGLANG_USE_CPU_ENGINE": "1",
        # Spinning threads take the cores from the threads that they wait for: beside
        # one other busy process, a batch took 50 times as long.
        "OMP_WAIT_POLICY": "passive",
        # A CUDA build of torch brings NCCL, which several ranks would use for a group
        # of GPUs.
        "SGLANG_NCCL_SO_PATH": os.devnull,
        # Never the trainer's: its packages are built against another torchvision.
        "PYTHONPATH": "" if overlay is None else str(overlay),
    }


def launch_command(
    version: str | None = None, python: str | os.PathLike[str] | None = None
) -> list[str]:
    """Returns the command of a server, without its flags."""
    launcher = Path(__file__).with_name("launch.py")
    return [str(engine_python(version, python)), str(launcher)]


def default_server_args() -> dict[str, object]:
    """Returns a CPU server's own arguments, under SGLang's names."""
    return {
        "device": "cpu",
        # Exact log-probs, and faster than bfloat16 on a processor without AMX.
        "dtype": "float32",
        # There is no device to overlap with.
        "disable_overlap_schedule": True,
        # Otherwise an idle scheduler polls on a core.
        "sleep_on_idle": True,
        # SGLang compares the free memory after the start with this share of the earlier
        # free memory, and counts other processes' allocations as its own.
        "mem_fraction_static": 0.99,
        # Limits the KV cache, whatever the machine's memory: 32 times 2,048 tokens.
        "max_total_tokens": 65_536,
        # Constrained decoding is not used in rollouts, and its backends load slowly.
        "grammar_backend": "none",
        # Nothing is compiled or captured on CPU; a warm-up only takes two seconds.
        "skip_server_warmup": True,
        # The other backends are kernels for accelerators.
        "lora_backend": "torch_native",
    }


def _find_python() -> Path:
    if named := os.environ.get(PYTHON_VARIABLE):
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
    """Returns the folder with another version, which shadows the environment's."""
    if version is None or check_version(version) == DEFAULT_VERSION:
        return None
    return python.parent.parent / f"sglang-{version}"
