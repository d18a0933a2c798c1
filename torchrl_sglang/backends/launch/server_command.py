"""Engine arguments to a command line: pure, no I/O.

Arguments go through under SGLang's own names (``mem_fraction_static=0.8`` becomes
``--mem-fraction-static 0.8``); vLLM's are translated by the table of
``vllm_arguments.py``; a name that the server does not know is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from torchrl_sglang.backends.launch.server_flags import ServerFlag
from torchrl_sglang.backends.launch.vllm_arguments import (
    ARGUMENTS,
    Inert,
    Refused,
    Renamed,
)
from torchrl_sglang.backends.support.checks import nearest, to_python
from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "VLLM_NAMES",
    "check_names",
    "inert_arguments",
    "to_flags",
    "translate_vllm_names",
]

VLLM_NAMES: dict[str, str] = {
    name: row.to
    for name, row in ARGUMENTS.items()
    if isinstance(row, Renamed) and row.to != name
}
"""vLLM's (and TorchRL's AsyncVLLM's) name -> SGLang's."""


def translate_vllm_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``arguments`` under SGLang's names, without those that are inert.

    Raises:
        ConfigurationError: if the same argument is given under two names, or one asks
            for what a server started here cannot do.

    Examples:
        >>> translate_vllm_names({"max_model_len": 4096, "enforce_eager": True})
        {'context_length': 4096, 'disable_cuda_graph': True}
    """
    translated: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in arguments.items():
        row = ARGUMENTS.get(name, Renamed(to=name))
        if isinstance(row, Inert):
            continue
        if isinstance(row, Refused):
            # By type too: 1 == True, and only one of them says what holds anyway.
            if any(type(value) is type(own) and value == own for own in row.unless):
                continue
            raise ConfigurationError(
                f"{name}={value!r} cannot be given to an SGLang server that is started "
                f"here. {row.reason}"
            )
        if row.to in translated:
            raise ConfigurationError(
                f"{origin[row.to]!r} and {name!r} both set SGLang's {row.to!r}; "
                f"give one of them."
            )
        given = value if value is None or row.convert is None else row.convert(value)
        translated[row.to] = given
        origin[row.to] = name
    return translated


def inert_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns those arguments that change nothing, each with the reason.

    Examples:
        >>> inert_arguments({"swap_space": 4, "tp_size": 2})
        {'swap_space': 'SGLang computes a retracted request again and swaps nothing out.'}
    """  # noqa: E501 - A doctest's output is one line.
    rows = ((name, ARGUMENTS.get(name)) for name in arguments)
    return {name: row.reason for name, row in rows if isinstance(row, Inert)}


def check_names(
    arguments: Mapping[str, Any], flags: Mapping[str, ServerFlag] | None
) -> None:
    """Refuses a name that the server does not know, unless its value is False.

    Args:
        arguments: under SGLang's names.
        flags: those of the server; ``None`` if they are unknown, and the server has to
            decide itself.

    Raises:
        ConfigurationError: with the nearest name that it does know.
    """
    for name, value in arguments.items():
        if not name.isidentifier():
            raise ConfigurationError(
                f"{name!r} is not the name of an engine argument; write it with "
                f"underscores, like 'mem_fraction_static'."
            )
        # A switch that is off asks for nothing, whether this version has it or not.
        if flags is None or name in flags or to_python(value) is False:
            continue
        meant = nearest(name, [*flags, *ARGUMENTS])
        hint = f"did you mean {meant!r}?" if meant else "see SGLang's own list."
        raise ConfigurationError(
            f"{name!r} is not an argument of this SGLang's server; {hint}"
        )


def to_flags(
    arguments: Mapping[str, Any], flags: Mapping[str, ServerFlag] | None = None
) -> list[str]:
    """Returns the command line flags for ``arguments``.

    ``True`` becomes a bare flag; ``False`` and ``None`` leave it out, but a flag with a
    ``--no-`` form takes that for ``False``; a list becomes several values, a mapping
    JSON, and a :class:`torch.dtype` its name.

    Args:
        arguments: under SGLang's names.
        flags: those of the server, where they are known.

    Raises:
        ConfigurationError: if a name is not an identifier or a value has no text form.

    Examples:
        >>> to_flags({"tp_size": 2, "disable_radix_cache": True, "log_level": None})
        ['--tp-size', '2', '--disable-radix-cache']
    """
    check_names(arguments, None)
    line: list[str] = []
    for name, given in arguments.items():
        value = to_python(given)
        known = (flags or {}).get(name, ServerFlag(flag="--" + name.replace("_", "-")))
        if value is False and known.negatable:
            line.append("--no-" + known.flag.removeprefix("--"))
        if value is None or value is False:
            continue
        if value is True:
            line.append(known.flag)
        elif isinstance(value, (list, tuple)):
            line += [known.flag, *(_text(name, item) for item in value)]
        else:
            text = _text(name, value)
            # argparse takes a separate value that begins with a dash for a flag.
            line += [f"{known.flag}={text}"] if text[:1] == "-" else [known.flag, text]
    return line


def _text(name: str, value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, (str, int, float)) or hasattr(value, "__fspath__"):
        return str(value)
    raise ConfigurationError(
        f"The engine argument {name}={value!r} has no form on a command line; give a "
        f"string, a number, a boolean, a list of them, or a mapping."
    )
