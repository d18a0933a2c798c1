"""Weight loaders inside servers, named by ``--custom-weight-loader``.

Each file stands alone: the server's Python, which lacks this package, imports it from
this folder, or from a copy of it.

``torchrl_sglang_loader.py::ACTIONS`` handles the requests of
``weight_update/transports/traced.py``, and ``torchrl_sglang_delta.py::UpdateState``
the constants of ``weight_update/transports/delta_messages.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import TRACED_LOADER, WeightLoader

FOLDER = Path(__file__).parent

ARGUMENT = "custom_weight_loader"
"""SGLang's argument, a list of functions."""


def loader_arguments(
    weight_loader: Any, given: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Returns the arguments of servers with a :data:`.WeightLoader`."""
    if weight_loader not in get_args(WeightLoader):
        raise ConfigurationError(
            f"weight_loader={weight_loader!r} is not one of "
            f"{', '.join(map(repr, get_args(WeightLoader)))}."
        )
    if weight_loader == "sglang":
        return {}
    custom = given.get(ARGUMENT) or []
    loaders = [custom] if isinstance(custom, str) else list(custom)
    return {
        ARGUMENT: [*(name for name in loaders if name != TRACED_LOADER), TRACED_LOADER]
    }


def search_path(arguments: Mapping[str, Any], known: str) -> str:
    """Returns a server's ``PYTHONPATH`` with loaders of this folder."""
    loaders = arguments.get(ARGUMENT) or ()
    names = [loaders] if isinstance(loaders, str) else [str(name) for name in loaders]
    modules = [name.rpartition(".")[0] for name in names]
    if not any(module and (FOLDER / f"{module}.py").is_file() for module in modules):
        return known
    return os.pathsep.join(filter(None, [known, str(FOLDER)]))
