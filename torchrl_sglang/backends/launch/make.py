"""Registry of named placements; resolves ``launcher=``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchrl_sglang.backends.launch.launcher import Launcher, Placement
from torchrl_sglang.backends.launch.local import LocalPlacement
from torchrl_sglang.backends.launch.ray_launcher import RayLauncher
from torchrl_sglang.errors import ConfigurationError

PLACEMENTS: Mapping[str, Callable[[], Placement]] = {
    "local": LocalPlacement,
    "ray": RayLauncher,
}
"""Name -> placement."""


def make_launcher(
    launcher: str | Placement,
    num_replicas: int,
    spec: Mapping[str, Any],
    **options: Any,
) -> Launcher:
    """Returns the launcher of an engine's servers; see :meth:`.Placement.bind`."""
    placement: Any = launcher
    if isinstance(launcher, str) and launcher in PLACEMENTS:
        placement = PLACEMENTS[launcher]()
    bind = getattr(placement, "bind", None)
    bound = None
    if callable(bind) and not isinstance(placement, type):
        bound = bind(num_replicas, spec, **options)
    if not isinstance(bound, Launcher):
        raise ConfigurationError(
            f"launcher={launcher!r} is neither {', '.join(map(repr, PLACEMENTS))} nor "
            f"a Placement, such as a RayLauncher, whose bind() returns a Launcher."
        )
    return bound
