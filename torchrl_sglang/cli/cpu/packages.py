"""Installing packages with uv, or with pip where there is no uv or where it fails.

It takes the arguments of ``pip install``, and ``--python PATH`` before them for another
environment than that of the Python that runs it::

    python -m torchrl_sglang.cli.cpu.packages --requirement requirements.txt

uv is several times as fast, but ignores pip's configuration, which may name a machine's
indexes and folders of packages; they are passed to uv as its own settings.

This module needs the standard library only: it installs everything else.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrl_sglang.errors import ConfigurationError

ERROR_TAIL_LINES = 20
"""Lines of an installer's output in an error."""

PIP_SECTIONS = (":env:", "install", "global")
"""The sections of pip's configuration that ``pip install`` reads, strongest first."""


def install_packages(python: Path, arguments: Sequence[str | Path]) -> None:
    """Installs packages into the environment of an interpreter, which needs no pip."""
    words = list(map(str, arguments))
    # An installer must see only the environment that it changes.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip"]
    has_pip, configuration = _run([*pip, "config", "list"], variables)
    # The user's settings for uv override those for pip.
    if has_pip:
        settings = uv_settings(configuration, _default_index())
        variables = {**settings, **variables}
    installers: dict[str, list[str]] = {}
    # In this environment or on the search path.
    folders = [str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")]
    if uv := shutil.which("uv", path=os.pathsep.join(folders)):
        installers["uv"] = [uv, "pip", "install", "--quiet", "--python", str(python)]
    if has_pip:
        quiet = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
        # Few of torch's modules are ever imported, so none is compiled ahead.
        into = ["--python", str(python), "install", "--no-compile"]
        installers["pip"] = [*pip, *into, *quiet]
    failure = ""
    for tool, command in installers.items():
        done, output = _run([*command, *words], variables)
        if done:
            return
        lines = output.strip().splitlines()
        print(f"{tool} failed: {''.join(lines[-1:])}", file=sys.stderr)
        failure = f"{tool}'s last lines were:\n" + "\n".join(lines[-ERROR_TAIL_LINES:])
    if not failure:
        raise ConfigurationError(
            f"{sys.executable} has neither uv nor pip to install packages with. Run "
            f"`{sys.executable} -m ensurepip`, or install uv."
        )
    raise RuntimeError(
        f"`{' '.join(words)}` could not be installed for {python}. Run this again once "
        f"the cause is removed. {failure}"
    )


def uv_settings(pip_configuration: str, default_index: str) -> dict[str, str]:
    """Returns variables with which uv finds packages where pip, so configured, does."""
    lines = (line.partition("=") for line in pip_configuration.splitlines())
    values = {key: value for key, _, value in lines}

    def words(option: str) -> list[str]:
        keys = (f"{section}.{option}" for section in PIP_SECTIONS)
        value = next((values[key] for key in keys if key in values), "''")
        return str(ast.literal_eval(value)).split()

    settings: dict[str, str] = {}
    *first, last = [
        *(words("index-url") or [default_index]),
        *words("extra-index-url"),
    ]
    if last != default_index:
        # pip takes the best version of any index, and among equals the file with the
        # most specific tags; uv that of the first index, which has to be pip's first.
        settings["UV_INDEX"] = " ".join(first)
        settings["UV_DEFAULT_INDEX"] = last
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if words("find-links"):
        settings["UV_FIND_LINKS"] = ",".join(words("find-links"))
    if words("no-index"):
        settings["UV_NO_INDEX"] = words("no-index")[0]
    return settings


def _default_index() -> str:
    """Returns the URL of pip's default index, which no pip command prints."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return ""
    return str(PyPI.simple_url)


def _run(command: Sequence[str], variables: dict[str, str]) -> tuple[bool, str]:
    """Runs a command; returns whether it succeeded, and its output."""
    done = subprocess.run(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode == 0, done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_sglang.cli.cpu.packages",
        description="Install packages with uv or pip; takes `pip install`'s arguments.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--python",
        type=Path,
        default=sys.executable,
        help="interpreter of the environment (default: %(default)s)",
    )
    options, words = parser.parse_known_args(arguments)
    try:
        install_packages(options.python, words)
    except (ConfigurationError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
