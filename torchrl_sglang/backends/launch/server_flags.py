"""The flags that a given SGLang takes, read from its source without importing it.

The engine may live in another interpreter and may be of any version, so the only
honest list of its arguments is in its own files. They are parsed, never run: importing
SGLang takes seconds and packages that the trainer does not have.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrl._utils import logger as torchrl_logger

__all__ = ["ServerFlag", "find_flags", "parse_flags", "read_flags"]

FIND_TIMEOUT_SECONDS = 60.0
"""Budget for an interpreter to say where its sglang is; its start takes 0.1 s."""

_FIND = (
    # find_spec of a top-level package imports nothing.
    "import importlib.util as u; s = u.find_spec('sglang'); "
    "print(*(s.submodule_search_locations if s else ()), sep='\\n')"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFlag:
    """One option of a server's command line."""

    flag: str
    """As it is written, with its dashes."""
    negatable: bool = False
    """Whether a ``--no-`` form of it switches it off."""


def find_flags(
    python: str, environment: Mapping[str, str]
) -> Mapping[str, ServerFlag] | None:
    """Returns the flags of the SGLang that an interpreter would run.

    Args:
        python: the interpreter.
        environment: the environment that it would run in.

    Returns:
        The flags under the names of arguments, or ``None`` if they cannot be told; the
        server is then left to decide.
    """
    key = (python, environment.get("PYTHONPATH", ""))
    if key not in _FOUND:
        _FOUND[key] = _find_flags(python, environment)
    return _FOUND[key]


_FOUND: dict[tuple[str, str], Mapping[str, ServerFlag] | None] = {}
"""What was found for an interpreter and its search path; neither changes meanwhile."""


def _find_flags(
    python: str, environment: Mapping[str, str]
) -> Mapping[str, ServerFlag] | None:
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
        torchrl_logger.debug(f"The arguments of {python}'s sglang are unknown: {error}")
        return None
    for folder in done.stdout.splitlines():
        flags = read_flags(Path(folder))
        if flags is not None:
            return flags
    torchrl_logger.debug(f"The arguments of {python}'s sglang are unknown: not found.")
    return None


def read_flags(package: Path) -> Mapping[str, ServerFlag] | None:
    """Returns the flags of the SGLang in a folder, or ``None`` if it is not one.

    Args:
        package: folder of the package ``sglang``.
    """
    # Older versions hold all in the first file, newer ones most of it in the folder.
    files = [
        package / "srt" / "server_args.py",
        *sorted((package / "srt" / "arg_groups").rglob("*.py")),
    ]
    try:
        flags = parse_flags(file.read_text() for file in files)
    except (OSError, SyntaxError, ValueError) as error:
        torchrl_logger.debug(f"{package} cannot be read: {error}")
        return None
    # Without this one, the source has a form that is not understood.
    return flags if "model_path" in flags else None


def parse_flags(sources: Iterable[str]) -> dict[str, ServerFlag]:
    r"""Returns the flags that these source texts define, under their names. Pure.

    A flag is either an annotated field of ``ServerArgs``, or of one of the classes that
    it is put together from, or an ``add_argument`` call.

    Examples:
        >>> parse_flags(["class ServerArgs:\n    tp_size: A[int, 'help'] = 1"])
        {'tp_size': ServerFlag(flag='--tp-size', negatable=False)}
    """
    flags: dict[str, ServerFlag] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and _holds_fields(node):
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign):
                        flags.update(_of_field(statement))
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                written = [text for item in node.args if (text := _flag_text(item))]
                flags.update(_named(written, _is_negatable(node)))
    return flags


def _holds_fields(node: ast.ClassDef) -> bool:
    return node.name == "ServerArgs" or any(
        isinstance(statement, ast.Assign)
        and any(
            isinstance(target, ast.Name) and target.id == "_NS_PATH"
            for target in statement.targets
        )
        for statement in node.body
    )


def _of_field(statement: ast.AnnAssign) -> dict[str, ServerFlag]:
    annotation, target = statement.annotation, statement.target
    if not (
        isinstance(target, ast.Name)
        and isinstance(annotation, ast.Subscript)
        and isinstance(annotation.value, ast.Name)
        and annotation.value.id in ("A", "Annotated")
        and isinstance(annotation.slice, ast.Tuple)
    ):
        return {}
    flag = "--" + target.id.replace("_", "-")
    aliases: list[str] = []
    negatable = False
    for metadata in annotation.slice.elts[1:]:
        if not isinstance(metadata, ast.Call):
            continue
        negatable = negatable or _is_negatable(metadata)
        for keyword in metadata.keywords:
            value = keyword.value
            if keyword.arg == "no_cli" and _constant(value) is True:
                return {}
            if keyword.arg == "cli_name" and (text := _flag_text(value)):
                flag = text
            if keyword.arg == "aliases" and isinstance(value, (ast.List, ast.Tuple)):
                aliases += [text for item in value.elts if (text := _flag_text(item))]
    return {
        **_named([flag, *aliases], negatable),
        target.id: ServerFlag(flag=flag, negatable=negatable),
    }


def _named(flags: list[str], negatable: bool) -> dict[str, ServerFlag]:
    return {
        flag.removeprefix("--").replace("-", "_"): ServerFlag(
            flag=flag, negatable=negatable
        )
        for flag in flags
    }


def _is_negatable(call: ast.Call) -> bool:
    return any(
        keyword.arg == "action" and "BooleanOptionalAction" in ast.dump(keyword.value)
        for keyword in call.keywords
    )


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _flag_text(node: ast.expr) -> str | None:
    text = _constant(node)
    return text if isinstance(text, str) and text.startswith("--") else None
