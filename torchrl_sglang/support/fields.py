"""Dataclasses whose fields document and check the arguments of another class."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_type_hints

P = ParamSpec("P")
Owner = TypeVar("Owner")
Arguments = TypeVar("Arguments")


def check_fields(arguments: Any) -> None:
    """Applies the checks in the annotations of a dataclass, and stores their results.

    ``steps: Annotated[int | None, check_count]`` is checked by
    ``check_count("steps", steps)``, unless it is None.
    """
    for name, hint in get_type_hints(type(arguments), include_extras=True).items():
        value = getattr(arguments, name)
        is_optional = type(None) in get_args(getattr(hint, "__origin__", hint))
        for check in getattr(hint, "__metadata__", ()):
            if value is not None or not is_optional:
                object.__setattr__(arguments, name, check(name, value))


def from_fields(
    kind: Callable[P, Arguments],
) -> Callable[
    [Callable[[Owner, Arguments], None]], Callable[Concatenate[Owner, P], None]
]:
    """Makes a constructor of a dataclass take the fields of the dataclass instead."""
    hints = get_type_hints(kind)
    parameters = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(kind).parameters.items()
    ]

    def decorate(
        init: Callable[[Owner, Arguments], None],
    ) -> Callable[Concatenate[Owner, P], None]:
        @functools.wraps(init)
        def made(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, kind(*args, **kwargs))

        owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.Signature([owner, *parameters], return_annotation=None)
        vars(made)["__signature__"] = signature
        return made

    return decorate


def with_arguments(docstring: str | None, kind: type) -> str | None:
    """Returns a docstring with the section ``Args`` of a dataclass, before ``Raises``.

    The documentation of a field is the string below it in the source, without which
    the docstring stays as it is.
    """
    try:
        (class_node,) = ast.parse(inspect.getsource(kind)).body
    except OSError:
        return docstring
    assert isinstance(class_node, ast.ClassDef)
    texts = {
        node.target.id: " ".join(str(below.value.value).split())
        for node, below in pairwise(class_node.body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }
    lines = ["Args:"]
    for field in fields(kind):
        text = f"{field.name}: {texts[field.name]}"
        if field.default not in (None, MISSING):
            text += f" Defaults to ``{field.default!r}``."
        lines += textwrap.wrap(
            text,
            84,
            initial_indent=4 * " ",
            subsequent_indent=8 * " ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    section = textwrap.indent("\n".join(lines), 4 * " ")
    start, raises, end = (docstring or "").partition("    Raises:\n")
    return f"{start}{section}\n\n{raises}{end}"
