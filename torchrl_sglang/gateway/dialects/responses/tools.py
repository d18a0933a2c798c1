"""Tools of a request to ``/v1/responses``.

A model sees only functions, in the form of chat completions: a custom tool is a
function with a text argument, and a function's namespace is a prefix of its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.errors import ConfigurationError

INPUT = "input"
"""Argument of a custom tool."""

_LEFT_OUT = ("web_search", "tool_search")
"""Tools of OpenAI's models always declared by Codex; they are not offered."""

_TOLD = ("name", "description", "parameters", "strict")
"""Fields of a function in the prompt, in this order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A tool under the client's and the model's name."""

    name: str
    """The client's name."""
    namespace: str | None = None
    """The client's namespace of the tool, if any."""
    is_custom: bool = False
    """Whether it takes a text instead of arguments."""
    declared: Mapping[str, Any]
    """Function for the model."""


def read_tools(tools: Any) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Returns the tools of a request, and their fields without effect."""
    tools = tools or []
    if not isinstance(tools, list):
        raise ConfigurationError(f"tools={tools!r:.200} must be a list.")
    offered: list[Mapping[str, Any]] = []
    ignored: list[str] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind in _LEFT_OUT:
            ignored.append(f"tools.{kind}")
            continue
        for _ in _tools(tool, f"tools[{index}]"):
            pass
        form = tool.get("format")
        if kind == "custom" and form and form.get("type") == "grammar":
            ignored.append("tools.format")
        offered.append(tool)
    return offered, list(dict.fromkeys(ignored))


def declare(offered: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns tools in the form of chat completions."""
    by_name = find_tools(offered)
    return [{"type": "function", "function": t.declared} for t in by_name.values()]


def find_tools(offered: Sequence[Mapping[str, Any]]) -> dict[str, Tool]:
    """Returns tools by the model's names."""
    by_name: dict[str, Tool] = {}
    for index, declaration in enumerate(offered):
        for tool in _tools(declaration, f"tools[{index}]"):
            name = model_name(tool.name, tool.namespace)
            if name in by_name:
                raise ConfigurationError(
                    f"tools[{index}] is the second one with the name {name!r}; give "
                    f"each another name."
                )
            by_name[name] = tool
    return by_name


def model_name(name: str, namespace: str | None) -> str:
    """Returns the model's name of a tool."""
    return f"{namespace}__{name}" if namespace else name


def _tools(given: Any, where: str, namespace: str | None = None) -> Iterator[Tool]:
    kind = given.get("type") if isinstance(given, Mapping) else None
    name: Any = given.get("name") if isinstance(given, Mapping) else None
    if kind in ("function", "custom", "namespace") and not _is_text(name):
        raise ConfigurationError(
            f"{where} is of type {kind} and has the name {name!r:.50}; give it a name."
        )
    if kind == "function":
        yield Tool(name=name, namespace=namespace, declared=_function(given, namespace))
    elif kind == "custom":
        declared = _custom(given, namespace, where)
        yield Tool(name=name, namespace=namespace, is_custom=True, declared=declared)
    elif kind == "namespace" and namespace is None:
        inner = given.get("tools")
        if not isinstance(inner, list):
            raise ConfigurationError(f"{where}.tools must be a list.")
        for index, tool in enumerate(inner):
            yield from _tools(tool, f"{where}.tools[{index}]", name)
    else:
        raise ConfigurationError(
            f"{where} has the type {kind!r:.50}; tools are of type function, custom or "
            f"namespace. OpenAI's servers, which run the others, are not here: offer a "
            f"function of your own instead."
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _function(given: Mapping[str, Any], namespace: str | None) -> dict[str, Any]:
    fields = {key: given[key] for key in _TOLD if given.get(key) is not None}
    return {**fields, "name": model_name(given["name"], namespace)}


def _custom(
    given: Mapping[str, Any], namespace: str | None, where: str
) -> dict[str, Any]:
    """Returns a function with a text argument."""
    form = given.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, Mapping) else None
    description = str(given.get("description") or "")
    if kind == "grammar":
        syntax, grammar = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not _is_text(grammar):
            raise ConfigurationError(
                f"{where}.format of type grammar must have a definition, and a syntax "
                f"that is lark or regex, got {syntax!r:.50}."
            )
        words = "regular expression" if syntax == "regex" else "Lark grammar"
        description += f"\n\nThe {INPUT} has to match this {words}:\n{grammar}"
    elif kind != "text":
        raise ConfigurationError(
            f"{where}.format={form!r:.100} must be of type text or grammar."
        )
    return {
        "name": model_name(given["name"], namespace),
        "description": description.strip(),
        "parameters": {
            "type": "object",
            "properties": {INPUT: {"type": "string"}},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }
