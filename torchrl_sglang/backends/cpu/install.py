"""Builds the environment in which SGLang runs on a CPU-only machine.

Run once, from the trainer's Python::

    python -m torchrl_sglang.backends.cpu.install [--version 0.5.20] [--prefix DIR]

SGLang's full requirements are accelerator packages that a CPU does not need, and its
``torchvision`` would break the trainer's transformers. So it gets a virtual environment
of its own, with the pinned packages of ``requirements.txt``, and is itself installed
without dependencies. A further version of SGLang shares these packages: it is put in a
folder beside them, which goes first on its server's ``PYTHONPATH``.

What is complete is stamped with a digest of everything that went into it; a second run
compares stamps and returns, and an interrupted one is made again.

``torch`` comes from pip's configured index. Where that has only accelerator builds, set
``TORCHRL_SGLANG_TORCH_INDEX`` to the URL of a wheel index that has a CPU build; it is
used for ``torch`` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchrl_sglang.backends.cpu import DEFAULT_VERSION, VERSIONS
from torchrl_sglang.errors import ConfigurationError

TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"
TORCH_INDEX_VARIABLE = "TORCHRL_SGLANG_TORCH_INDEX"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")

STAMP = ".torchrl-sglang-complete"
"""The file whose presence, with the right digest, says that a folder is complete."""

ERROR_TAIL_LINES = 20
"""How much of pip's output an error repeats: its last messages say what is wrong."""


def install(prefix: Path, versions: Sequence[str] = ()) -> bool:
    """Make the engine environment complete, and say whether there was work to do.

    Args:
        prefix (Path): the folder of the environment.
        versions (sequence of str, optional): versions of SGLang to install beside
            the default one, each one of :data:`~torchrl_sglang.backends.cpu.VERSIONS`.

    Raises:
        ConfigurationError: if a version is unknown, or the folder is something else.
        RuntimeError: if pip fails.
    """
    for version in versions:
        if version not in VERSIONS:
            raise ConfigurationError(
                f"SGLang {version} is not known to run on CPU; choose one of "
                f"{', '.join(VERSIONS)}."
            )
    overlays = {
        prefix / f"sglang-{version}": f"sglang=={version}"
        for version in dict.fromkeys(versions)
        if version != DEFAULT_VERSION
    }
    with _locked(prefix):
        changed = False
        if not _is_complete(prefix, _environment_digest()):
            _install_environment(prefix)
            changed = True
        for folder, requirement in overlays.items():
            if not _is_complete(folder, requirement):
                _install_overlay(prefix, folder, requirement)
                changed = True
    return changed


def _install_environment(prefix: Path) -> None:
    in_use = prefix.is_dir() and any(prefix.iterdir())
    if in_use and not (prefix / "pyvenv.cfg").is_file():
        raise ConfigurationError(
            f"{prefix} holds something other than a virtual environment. Name an "
            "empty or absent folder with --prefix."
        )
    with _step(f"virtual environment in {prefix}"):
        venv.EnvBuilder(clear=True, with_pip=True).create(prefix)
    index = os.environ.get(TORCH_INDEX_VARIABLE)
    with _step(TORCH):
        # A named index may hold torch alone; its dependencies are among the pins.
        source = ("--no-deps", "--index-url", index) if index else ("-c", REQUIREMENTS)
        _pip_install(prefix, *source, TORCH)
    with _step("pinned packages"):
        _pip_install(prefix, "--no-deps", "-r", REQUIREMENTS)
    with _step(f"sglang=={DEFAULT_VERSION} and {TORCHVISION}"):
        _pip_install(prefix, "--no-deps", f"sglang=={DEFAULT_VERSION}", TORCHVISION)
    _mark_complete(prefix, _environment_digest())


def _install_overlay(prefix: Path, folder: Path, requirement: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with _step(f"{requirement} beside it"):
        _pip_install(prefix, "--no-deps", "--target", folder, requirement)
    _mark_complete(folder, requirement)


def _pip_install(prefix: Path, *arguments: str | Path) -> None:
    """Run ``pip install`` in the environment, quietly unless it fails."""
    command = [str(prefix / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    # pip must see the environment that it installs into and nothing of the trainer's.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--no-input", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-ERROR_TAIL_LINES:])
        raise RuntimeError(
            f"pip could not install {arguments[-1]} into {prefix}; run this again once "
            f"the cause is removed. pip's last lines were:\n{tail}"
        )


def _environment_digest() -> str:
    parts = [
        REQUIREMENTS.read_text(),
        TORCH,
        TORCHVISION,
        DEFAULT_VERSION,
        os.environ.get(TORCH_INDEX_VARIABLE, ""),
        sys.version,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _is_complete(folder: Path, digest: str) -> bool:
    try:
        return (folder / STAMP).read_text() == digest
    except FileNotFoundError:
        return False


def _mark_complete(folder: Path, digest: str) -> None:
    (folder / STAMP).write_text(digest)


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Report one step on one line, with the time that it took."""
    print(f"{what} ... ", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed")
        raise
    print(f"{time.monotonic() - start:.0f} s")


@contextlib.contextmanager
def _locked(prefix: Path) -> Iterator[None]:
    """Let one installation at a time work on a folder; the others then find it done."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with prefix.with_name(f".{prefix.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_sglang.backends.cpu.install",
        description="Create the environment in which SGLang runs on CPU.",
    )
    parser.add_argument(
        "--version",
        nargs="+",
        action="extend",
        default=[],
        choices=VERSIONS,
        help=f"versions of SGLang to install beside {DEFAULT_VERSION}",
    )
    parser.add_argument(
        "--prefix",
        type=Path,
        default=Path(sys.prefix) / "sglang-cpu",
        help="folder of the environment (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    prefix = options.prefix.absolute()
    try:
        changed = install(prefix, options.version)
    except (ConfigurationError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'Ready' if changed else 'Already complete'}: {prefix / 'bin' / 'python'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
