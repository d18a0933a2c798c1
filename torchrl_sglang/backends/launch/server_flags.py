"""Flags of an SGLang server: read from its source, checked, and written.

The engine can live in another interpreter and have any version, so its arguments are
read from its source files. These are parsed and never imported: an import takes seconds
and needs packages that the trainer does not have.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.launch.vllm_arguments import ARGUMENTS
from torchrl_sglang.backends.support.checks import nearest, to_python
from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "ServerFlag",
    "check_names",
    "find_flags",
    "parse_flags",
    "read_flags",
    "to_flags",
]

FIND_TIMEOUT_SECONDS = 60.0
"""Timeout for an interpreter to locate its sglang package; it takes 0.1 s."""

_FIND = (
    # find_spec of a top-level package imports nothing.
    "import importlib.util as u; s = u.find_spec('sglang'); "
    "print(*(s.submodule_search_locations if s else ()), sep='\\n')"
)


class ServerFlag(NamedTuple):
    """One option of a server's command line."""

    flag: str
    """The option with its dashes."""
    negatable: bool = False
    """Whether it has a ``--no-`` form."""


_FOUND: dict[tuple[str, str], Mapping[str, ServerFlag]] = {}
"""Interpreter and its search path -> flags; they do not change while we run."""


def find_flags(python: str, environment: Mapping[str, str]) -> Mapping[str, ServerFlag]:
    """Returns argument name -> flag of an interpreter's SGLang; none: unknown."""
    key = (python, environment.get("PYTHONPATH", ""))
    if key not in _FOUND:
        found = map(read_flags, _find_packages(python, environment))
        _FOUND[key] = next(filter(None, found), {})
        if not _FOUND[key]:
            torchrl_logger.debug(f"The arguments of {python}'s sglang are unknown.")
    return _FOUND[key]


def _find_packages(python: str, environment: Mapping[str, str]) -> list[Path]:
    try:
        done = subprocess.run(
            [python, "-c", _FIND],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FIND_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        torchrl_logger.debug(f"{python} does not tell where sglang is: {error}")
        return []
    return list(map(Path, done.stdout.splitlines()))


def read_flags(package: Path) -> Mapping[str, ServerFlag]:
    """Returns the flags of the ``sglang`` package in a folder; none: not understood."""
    # Older versions define all of them in the first file, newer ones in the folder.
    files = [
        package / "srt" / "server_args.py",
        *sorted((package / "srt" / "arg_groups").rglob("*.py")),
    ]
    try:
        flags = parse_flags(file.read_text() for file in files)
    except (OSError, SyntaxError, ValueError) as error:
        torchrl_logger.debug(f"{package} cannot be read: {error}")
        return {}
    return flags if "model_path" in flags else {}


def parse_flags(sources: Iterable[str]) -> dict[str, ServerFlag]:
    """Returns argument name -> flag, as defined in Python source texts.

    A flag is an ``add_argument`` call or a field ``name: A[type, metadata, ...]``.
    """
    flags: dict[str, ServerFlag] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign):
                flags |= _flags_of_field(node)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                flags |= _by_name(map(_value, node.args), _is_negatable(node))
    return flags


def _flags_of_field(field: ast.AnnAssign) -> dict[str, ServerFlag]:
    name, annotation = ast.unparse(field.target), field.annotation
    if not (
        isinstance(annotation, ast.Subscript)
        and ast.unparse(annotation.value) in ("A", "Annotated")
        and isinstance(annotation.slice, ast.Tuple)
    ):
        return {}
    calls = [item for item in annotation.slice.elts if isinstance(item, ast.Call)]
    options = {o.arg: _value(o.value) for call in calls for o in call.keywords}
    if options.get("no_cli") is True:
        return {}
    flag = options.get("cli_name") or "--" + name.replace("_", "-")
    negatable = any(map(_is_negatable, calls))
    found = _by_name([flag, *(options.get("aliases") or ())], negatable)
    return {**found, name: ServerFlag(flag, negatable)}


def _by_name(flags: Iterable[Any], negatable: bool) -> dict[str, ServerFlag]:
    return {
        flag.removeprefix("--").replace("-", "_"): ServerFlag(flag, negatable)
        for flag in flags
        if isinstance(flag, str) and flag.startswith("--")
    }


def _is_negatable(call: ast.Call) -> bool:
    return any(
        option.arg == "action" and "BooleanOptionalAction" in ast.unparse(option.value)
        for option in call.keywords
    )


def _value(node: ast.expr) -> Any:
    """Returns the value of a literal, and ``None`` for any other expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def check_names(arguments: Mapping[str, Any], flags: Mapping[str, ServerFlag]) -> None:
    """Refuses an argument that the server does not have, unless its value is False."""
    for name, value in arguments.items():
        if not name.isidentifier():
            raise ConfigurationError(
                f"{name!r} is not the name of an engine argument; write it with "
                f"underscores, like 'mem_fraction_static'."
            )
        # A switch that is off changes nothing, whether this version has it or not.
        if not flags or name in flags or to_python(value) is False:
            continue
        # argparse would accept the beginning of a name.
        near = nearest(name, [*flags, *ARGUMENTS])
        hint = f"did you mean {near!r}?" if near else "see SGLang's own list."
        raise ConfigurationError(
            f"{name!r} is not an argument of this SGLang's server; {hint}"
        )


def to_flags(
    arguments: Mapping[str, Any], flags: Mapping[str, ServerFlag]
) -> list[str]:
    """Returns the command line of arguments that have SGLang's names.

    ``True`` becomes a bare flag, ``False`` its ``--no-`` form or nothing, ``None``
    nothing, a list several values, a mapping JSON, and a :class:`torch.dtype` its name.
    """
    line: list[str] = []
    for name, given in arguments.items():
        value = to_python(given)
        known = flags.get(name, ServerFlag("--" + name.replace("_", "-")))
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
