"""Sharing installed packages between two environments, by hard links.

The engine's environment needs the same torch as the trainer's, which takes several
gigabytes where it is a build for an accelerator. Hard links put it into both and on the
disk once. Neither environment sees the other's packages, and what is upgraded or
removed in one stays as it is in the other.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

__all__ = ["installed_closure", "link_distributions"]


def installed_closure(name: str, without: Collection[str]) -> list[Distribution] | None:
    """Return an installed distribution and those that it requires, directly or not.

    Args:
        name (str): the distribution, in this Python's environment.
        without (collection of str): names to leave out, with what only they require.

    Returns:
        list of Distribution: the distributions, or ``None`` if one is not installed.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    left_out = set(map(canonicalize_name, without))
    found: dict[str, Distribution] = {}
    # Names, each without an extra and with each one that is asked for.
    asked = {(canonicalize_name(name), "")}
    waiting = list(asked)
    while waiting:
        current, extra = waiting.pop()
        try:
            found[current] = importlib.metadata.distribution(current)
        except PackageNotFoundError:
            return None
        for requirement in map(Requirement, found[current].requires or ()):
            required, marker = canonicalize_name(requirement.name), requirement.marker
            if required in left_out or not (
                marker is None or marker.evaluate({"extra": extra})
            ):
                continue
            new = {(required, name) for name in ("", *requirement.extras)} - asked
            asked |= new
            waiting += new
    return list(found.values())


def link_distributions(
    distributions: Iterable[Distribution], site_packages: Path
) -> bool:
    """Link the files of distributions into another environment.

    What was there under the same names is replaced. Console scripts are left out, for
    they name the interpreter of their own environment.

    Args:
        distributions (iterable of Distribution): what to link.
        site_packages (Path): the other environment's folder of packages.

    Returns:
        bool: whether it was done. ``False``, with nothing changed, if the other
        environment is on another file system or linking is not permitted.
    """
    # Beside the target, so that moving it there is a renaming.
    staging = site_packages.with_name(".linking")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        for distribution in distributions:
            for path in _package_files(distribution):
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


def _package_files(distribution: Distribution) -> Iterator[str]:
    """Yield the files below the folder of packages, without compiled bytecode."""
    for path in distribution.files or ():
        if path.parts[0] != ".." and path.suffix != ".pyc":
            yield str(path)
