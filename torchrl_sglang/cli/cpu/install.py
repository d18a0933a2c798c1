"""Builds the environment in which SGLang runs on a CPU-only machine.

Run once, from the trainer's Python::

    python -m torchrl_sglang.cli.cpu.install [--prefix DIR]

SGLang requires accelerator packages without a use on a CPU, and its ``torchvision``
would break the trainer's transformers. So it has a separate virtual environment, with
the pinned packages of ``requirements.txt``, and is installed without dependencies.
Another version of SGLang shares these packages: its folder goes first on the server's
``PYTHONPATH``.

``torch`` is shared with the trainer by hard links if the versions are equal: it is
stored once, and an upgrade in one environment leaves the other unchanged. Otherwise it
is installed from pip's configured index, or from the wheel index whose URL is in
``TORCHRL_SGLANG_TORCH_INDEX``, which is used only for ``torch``. A build for an
accelerator runs on a CPU, too; it is several gigabytes larger.

Each complete part has a stamp, a digest of its inputs. A second run compares the
stamps, and repeats an interrupted part.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import shutil
import sys
import sysconfig
import venv
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

from torchrl_sglang.backends.launch.cpu import DEFAULT_VERSION, VERSIONS, check_version
from torchrl_sglang.cli.cpu.packages import install_packages
from torchrl_sglang.errors import ConfigurationError

SGLANG = f"sglang=={DEFAULT_VERSION}"
TORCH_VERSION = "2.13.0"
TORCHVISION = "torchvision==0.28.0"
TRITON = "triton==3.7.1"
"""A dependency of torch's builds for CUDA only."""

TORCH_INDEX_VARIABLE = "TORCHRL_SGLANG_TORCH_INDEX"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def install(
    prefix: Path, versions: Sequence[str] = (), *, with_torch: bool = True
) -> bool:
    """Completes the engine environment; returns whether anything was missing.

    ``with_torch=False`` leaves torch to a later call, when the trainer may have a
    shareable torch.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with prefix.with_name(f".{prefix.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"Another process is installing into {prefix}; start again when it has "
                f"ended."
            ) from None
        return _complete(prefix, versions, with_torch)


def _complete(prefix: Path, versions: Sequence[str], with_torch: bool) -> bool:
    packages = _digest(REQUIREMENTS.read_text(), SGLANG, TORCHVISION, sys.version)
    make = functools.partial(_install_packages, prefix)
    parts = [(prefix / ".torchrl-sglang-packages", packages, make)]
    if with_torch:
        index = os.environ.get(TORCH_INDEX_VARIABLE, "")
        torch = _digest(packages, TORCH_VERSION, TRITON, index)
        make = functools.partial(_install_torch, prefix)
        parts.append((prefix / ".torchrl-sglang-torch", torch, make))
    for version in {check_version(version) for version in versions} - {DEFAULT_VERSION}:
        folder, requirement = prefix / f"sglang-{version}", f"sglang=={version}"
        make = functools.partial(_install_overlay, prefix, folder, requirement)
        parts.append((folder / ".torchrl-sglang-complete", requirement, make))
    changed = False
    for stamp, digest, make in parts:
        if not stamp.is_file() or stamp.read_text() != digest:
            make()
            stamp.write_text(digest)
            changed = True
    return changed


def _install_packages(prefix: Path) -> None:
    in_use = prefix.is_dir() and any(prefix.iterdir())
    if in_use and not (prefix / "pyvenv.cfg").is_file():
        raise ConfigurationError(
            f"{prefix} holds something other than a virtual environment. Name an "
            "empty or absent folder with --prefix."
        )
    print(f"Installing {SGLANG} and its requirements ...", flush=True)
    venv.EnvBuilder(clear=True, symlinks=True).create(prefix)
    # The list is complete; SGLang's own requirements are not installed.
    arguments = ("--no-deps", "-r", REQUIREMENTS, SGLANG, TORCHVISION)
    install_packages(_python(prefix), arguments)


def _install_torch(prefix: Path) -> None:
    torch = f"torch=={TORCH_VERSION}"
    print(f"Installing {torch} for SGLang ...", flush=True)
    if not _share_torch(prefix):
        index = os.environ.get(TORCH_INDEX_VARIABLE)
        # A named index may hold torch alone; its dependencies are among the pins.
        source = ("--no-deps", "--index-url", index) if index else ()
        constraints = ("--constraint", REQUIREMENTS)
        install_packages(_python(prefix), (*source, *constraints, torch))
    if not any(_site_packages(prefix).glob("triton-*.dist-info")):
        install_packages(_python(prefix), ("--no-deps", TRITON))


def _share_torch(prefix: Path) -> bool:
    """Links this Python's torch into the environment if the versions are equal."""
    lines = REQUIREMENTS.read_text().splitlines()
    pinned = [line.partition("==")[0] for line in lines if "==" in line]
    distributions = installed_closure("torch", without=pinned)
    if distributions is None:
        return False
    torch = next(d for d in distributions if d.name == "torch")
    # Builds differ after "+", as in "+cpu". An editable build has no files here.
    is_same = torch.version.partition("+")[0] == TORCH_VERSION
    if not is_same or "torch/__init__.py" not in map(str, torch.files or ()):
        return False
    return link_distributions(distributions, _site_packages(prefix))


def installed_closure(name: str, without: Collection[str]) -> list[Distribution] | None:
    """Returns an installed distribution and its requirements; None: incomplete.

    ``without`` are names to exclude, with their exclusive requirements.
    """
    # The package is not installed yet when the first part is made.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    left_out = set(map(canonicalize_name, without))
    distributions: dict[str, Distribution] = {}
    # Names, each without an extra and with each required extra.
    wanted_names = {(canonicalize_name(name), "")}
    waiting = list(wanted_names)
    while waiting:
        current, extra = waiting.pop()
        try:
            distributions[current] = importlib.metadata.distribution(current)
        except PackageNotFoundError:
            return None
        for requirement in map(Requirement, distributions[current].requires or ()):
            required, marker = canonicalize_name(requirement.name), requirement.marker
            applies = marker is None or marker.evaluate({"extra": extra})
            if applies and required not in left_out:
                new = {(required, n) for n in ("", *requirement.extras)} - wanted_names
                wanted_names |= new
                waiting += new
    return list(distributions.values())


def link_distributions(
    distributions: Iterable[Distribution], site_packages: Path
) -> bool:
    """Links distributions into another environment's folder of packages.

    Files of the same names are replaced. Bytecode and console scripts, which name their
    interpreter, are excluded. Returns False, with nothing changed, if hard links are
    not possible, as between two file systems.
    """
    # Beside the target: a move is a rename.
    staging = site_packages.with_name(".linking")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        for distribution in distributions:
            for path in distribution.files or ():
                if path.parts[0] == ".." or path.suffix == ".pyc":
                    continue
                link = staging / path
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(str(distribution.locate_file(path)), link)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        return False
    for source in staging.iterdir():
        target = site_packages / source.name
        if target.is_dir():
            shutil.rmtree(target)
        source.replace(target)
    staging.rmdir()
    return True


def _install_overlay(prefix: Path, folder: Path, requirement: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    print(f"Installing {requirement} beside it ...", flush=True)
    arguments = ("--no-deps", "--target", folder, requirement)
    install_packages(_python(prefix), arguments)


def _python(prefix: Path) -> Path:
    return prefix / "bin" / "python"


def _site_packages(prefix: Path) -> Path:
    folders = {"base": str(prefix), "platbase": str(prefix)}
    return Path(sysconfig.get_path("purelib", "venv", folders))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_sglang.cli.cpu.install",
        description="Create the environment in which SGLang runs on CPU.",
    )
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    text = f"versions of SGLang to install beside {DEFAULT_VERSION}"
    add("--version", choices=VERSIONS, help=text, **several)
    text = "folder of the environment (default: %(default)s)"
    add("--prefix", type=Path, default=Path(sys.prefix) / "sglang-cpu", help=text)
    text = "leave torch to a later run, when the trainer may have one to share"
    add("--without-torch", action="store_true", help=text)
    options = parser.parse_args(arguments)
    prefix = options.prefix.absolute()
    with_torch = not options.without_torch
    try:
        changed = install(prefix, options.version, with_torch=with_torch)
    except (ConfigurationError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if with_torch:
        state = "Ready" if changed else "Already complete"
        print(f"{state}: {_python(prefix)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
