"""Sharing installed packages between two environments, by hard links.

The engine needs the same torch as the trainer, several gigabytes in a build for an
accelerator. Hard links store it once; an upgrade in one environment leaves the other
unchanged.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Collection, Iterable
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

__all__ = ["installed_closure", "link_distributions"]


def installed_closure(name: str, without: Collection[str]) -> list[Distribution] | None:
    """Returns an installed distribution and all that it requires; None: incomplete.

    ``without`` are names to leave out, with what only they require.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    left_out = set(map(canonicalize_name, without))
    found: dict[str, Distribution] = {}
    # Names, each without an extra and with each extra that is required.
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
            applies = marker is None or marker.evaluate({"extra": extra})
            if applies and required not in left_out:
                new = {(required, name) for name in ("", *requirement.extras)} - asked
                asked |= new
                waiting += new
    return list(found.values())


def link_distributions(
    distributions: Iterable[Distribution], site_packages: Path
) -> bool:
    """Links distributions into another environment's folder of packages.

    Files of the same names are replaced. Bytecode and console scripts, which name their
    interpreter, are left out. Returns False, with nothing changed, where hard links are
    not possible, as between two file systems.
    """
    # Beside the target, so that a move is a rename.
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
