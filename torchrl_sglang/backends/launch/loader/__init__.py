"""The weight loader that servers run beside SGLang's own.

``torchrl_sglang_loader.py`` runs in SGLang's Python, where this package is not. The
functions here return the argument and the variable with which a server finds it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import TRACED_LOADER, WeightLoader

ARGUMENT = "custom_weight_loader"
"""SGLang's argument, a list of functions."""


def loader_arguments(
    weight_loader: Any, given: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Returns the arguments of servers with this weight loader.

    Args:
        weight_loader: ``"sglang"``, for SGLang's own, or ``"traced"``.
        given: arguments of the servers, under SGLang's names.

    Raises:
        ConfigurationError: if there is no such loader.
    """
    if weight_loader not in get_args(WeightLoader):
        raise ConfigurationError(
            f"weight_loader={weight_loader!r} is not one of "
            f"{', '.join(map(repr, get_args(WeightLoader)))}."
        )
    if weight_loader == "sglang":
        return {}
    own = given.get(ARGUMENT) or []
    others = [own] if isinstance(own, str) else list(own)
    return {
        ARGUMENT: [*(each for each in others if each != TRACED_LOADER), TRACED_LOADER]
    }


def with_loader(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns a server's variables, with which its Python finds the loader."""
    folder = str(Path(__file__).parent)
    known = variables.get("PYTHONPATH", "")
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(filter(None, (folder, known))),
    }
