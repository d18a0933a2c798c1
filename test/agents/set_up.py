"""Makes the environments of the clients, each from its own pins: ``.agents/NAME``.

``python test/agents/set_up.py [NAME ...]``. What cannot be installed here leaves the
reason in ``.agents/NAME.missing``, and its tests are skipped with that reason.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from torchrl_sglang.cli.cpu.packages import install_packages

REQUIREMENTS = Path(__file__).parent / "requirements"
ENVIRONMENTS = Path(__file__).parents[2] / ".agents"
INSTALL_SECONDS = 600
REASON_LETTERS = 300


class NotInstalledError(Exception):
    """An environment cannot be made here."""


def names() -> list[str]:
    """Returns the names of all clients with an environment of their own."""
    python = [path.stem for path in REQUIREMENTS.glob("*.txt")]
    return sorted([*python, *(path.parent.name for path in _package_files())])


def set_up(name: str) -> None:
    """Makes an environment, unless it is there already.

    Raises:
        NotInstalledError: if a package or a program for it is not to be had.
    """
    pins = REQUIREMENTS / f"{name}.txt"
    is_python = pins.exists()
    if not is_python:
        pins = REQUIREMENTS / name / "package.json"
    folder = ENVIRONMENTS / name
    stamp = folder / ".complete"
    made_of = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == made_of:
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        (_install_python if is_python else _install_node)(folder, pins)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NotInstalledError(_last_words(error)) from error
    stamp.write_text(made_of)


def _package_files() -> list[Path]:
    return list(REQUIREMENTS.glob("*/package.json"))


def _install_python(folder: Path, pins: Path) -> None:
    venv.create(folder, with_pip=False, symlinks=True)
    # Pins are complete; those of libraries have their packages in the tests' own.
    arguments = ["--no-deps", "--requirement", pins]
    install_packages(folder / "bin/python", arguments)


def _install_node(folder: Path, pins: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NotInstalledError("There is no node with npm on this machine.")
    folder.mkdir(parents=True)
    shutil.copy(pins, folder)
    subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--loglevel=error"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_SECONDS,
        check=True,
    )


def _last_words(error: Exception) -> str:
    output = getattr(error, "output", None) or str(error)
    return " ".join(output.split())[-REASON_LETTERS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=names(), metavar="NAME")
    ENVIRONMENTS.mkdir(exist_ok=True)
    for name in parser.parse_args().names:
        missing = ENVIRONMENTS / f"{name}.missing"
        missing.unlink(missing_ok=True)
        try:
            set_up(name)
        except NotInstalledError as error:
            missing.write_text(str(error))
            print(f"{name} is left out: {error}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
