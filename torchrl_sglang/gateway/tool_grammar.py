"""Sampling parameters for a choice of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchrl_sglang.chat.call_grammars import (
    CALL_FORMATS,
    ToolChoice,
    find_format,
    find_marks,
    response_grammar,
)
from torchrl_sglang.chat.tool_calls import REASONING_MARKS
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.requests.sampling import SAMPLING_PARAMETERS

GRAMMARS = frozenset(
    name for name, row in SAMPLING_PARAMETERS.items() if row.needs_grammar
)
"""Sampling parameters for grammars; a request has at most one."""

MOST_CHARACTERS, MOST_LEVELS = 200_000, 100
"""Most characters of a grammar, and levels of brackets. Servers compile grammars beside
their scheduler, without a limit: 2,000 levels took minutes and gigabytes."""

_LITERALS = {
    "regex": re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL),
    "ebnf": re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', re.DOTALL),
}
"""Kind of grammar -> its literals, whose brackets do not count."""


def check_grammar(name: str, text: str) -> None:
    """Raises :class:`ConfigurationError` if a grammar is too long, or too deep."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigurationError(
            f"{name} has {len(text)} characters; give up to {MOST_CHARACTERS}."
        )
    literals = _LITERALS.get(name)
    levels = _levels_of_json(text) if literals is None else _levels(text, literals)
    if levels > MOST_LEVELS:
        raise ConfigurationError(
            f"{name} has {levels} levels of brackets or more; give up to {MOST_LEVELS}."
        )


def _levels(text: str, literals: re.Pattern[str]) -> int:
    depth = deepest = 0
    for bracket in re.findall("[()]", literals.sub("", text)):
        depth += 1 if bracket == "(" else -1
        deepest = max(deepest, depth)
    return deepest


def _levels_of_json(text: str) -> int:
    """Returns the levels of JSON; 0 for invalid JSON, which a server refuses."""
    try:
        layer = _nested([json.loads(text)])
    except ValueError:
        return 0
    except RecursionError:
        return MOST_LEVELS + 1
    for level in range(MOST_LEVELS + 1):
        if not layer:
            return level
        layer = _nested(
            child
            for node in layer
            for child in (node.values() if isinstance(node, dict) else node)
        )
    return MOST_LEVELS + 1


def _nested(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (dict, list))]


def with_choice(
    params: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    call_parser: str | None,
    reasoning_parser: str | None,
    prompt: str | None,
    has_grammar: bool,
) -> dict[str, Any]:
    """Returns sampling parameters to enforce a choice of tools."""
    schema = params.get("json_schema")
    if not tools or (call_parser is None and not choice.required):
        # No calls are possible.
        return dict(params)
    if choice.is_free and (
        schema is None or not _is_known(call_parser, reasoning_parser)
    ):
        return dict(params)
    cause = ", ".join(choice.fields) or "response_format beside tools"
    calls, marks = find_format(call_parser), find_marks(reasoning_parser)
    if not has_grammar:
        raise UnsupportedByServerError(
            f"{cause} needs a grammar backend, and the server was started without one; "
            f"start it with grammar_backend='xgrammar', or make the gateway with "
            f"tool_choice='auto', which leaves choices to the model."
        )
    grammars = {name for name in GRAMMARS - {"json_schema"} if params.get(name)}
    if grammars:
        raise ConfigurationError(
            f"{cause} is kept to by a grammar, and the request has one of its own, "
            f"{', '.join(sorted(grammars))}; give one of the two."
        )
    grammar = response_grammar(
        tools,
        choice,
        calls=calls,
        marks=marks,
        thinks=marks is not None and (prompt or "").rstrip().endswith(marks[0]),
        schema=None if schema is None else json.loads(schema),
    )
    check_grammar("structural_tag", grammar)
    remaining = {name: params[name] for name in params if name != "json_schema"}
    return {**remaining, "structural_tag": grammar}


def _is_known(call_parser: str | None, reasoning_parser: str | None) -> bool:
    """Returns whether a grammar supports calls after reasoning."""
    reasons = reasoning_parser is None or reasoning_parser in REASONING_MARKS
    return call_parser in CALL_FORMATS and reasons
