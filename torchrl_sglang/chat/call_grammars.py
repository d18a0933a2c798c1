"""Grammars of the responses under a choice of tools.

A grammar is a structural tag of XGrammar. Calls have the form of the model's own chat
template, so a forced call is parsed, recorded and joined like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_sglang.chat.tool_calls import REASONING_MARKS
from torchrl_sglang.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """Tools for a response to call, and whether a call is required."""

    required: bool = False
    """The response consists of calls, after optional reasoning."""
    names: tuple[str, ...] | None = None
    """Callable tools; ``None``: all offered tools."""
    parallel: bool = True
    """It may make several calls."""
    fields: tuple[str, ...] = field(default=(), compare=False)
    """Fields of the request with the choice."""

    @property
    def is_free(self) -> bool:
        """Whether the model decides alone."""
        return self == FREE


FREE = ToolChoice()
"""The model decides alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """Text format of tool calls for a family of models."""

    begin: str
    """Text before a tool's name."""
    middle: str
    """Text between the name and the arguments."""
    end: str
    """Text behind the arguments."""
    separator: str = "\n"
    """Text between two calls."""
    open: str = ""
    """Text before the first call."""
    close: str = ""
    """Text after the last call."""
    arguments: str = "json_schema"
    """XGrammar's format of the arguments."""


def _mark(name: str) -> str:
    """Returns a token of DeepSeek's."""
    return "<\uff5c" + name.replace("_", "\u2581") + "\uff5c>"


_QWEN = CallFormat(
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
)
_QWEN_XML = CallFormat(
    begin="<tool_call>\n<function=",
    middle=">\n",
    end="\n</function>\n</tool_call>",
    arguments="qwen_xml_parameter",
)

CALL_FORMATS: dict[str, CallFormat] = {
    "qwen": _QWEN,
    "qwen25": _QWEN,
    "hermes": _QWEN,
    "qwen3_coder": _QWEN_XML,
    "llama3": CallFormat(
        begin='{"name": "', middle='", "parameters": ', end="}", separator=";"
    ),
    "mistral": CallFormat(
        begin='{"name": "',
        middle='", "arguments": ',
        end="}",
        separator=", ",
        open="[TOOL_CALLS] [",
        close="]",
    ),
    "deepseekv3": CallFormat(
        begin=_mark("tool_call_begin") + "function" + _mark("tool_sep"),
        middle="\n```json\n",
        end="\n```" + _mark("tool_call_end"),
        open=_mark("tool_calls_begin"),
        close=_mark("tool_calls_end"),
    ),
    "deepseekv31": CallFormat(
        begin=_mark("tool_call_begin"),
        middle=_mark("tool_sep"),
        end=_mark("tool_call_end"),
        separator="",
        open=_mark("tool_calls_begin"),
        close=_mark("tool_calls_end"),
    ),
}
"""SGLang's name of a parser of tool calls -> format of its models."""


def response_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    calls: CallFormat,
    marks: tuple[str, str] | None = None,
    thinks: bool = False,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """Returns the structural tag of the responses under a choice.

    Args:
        tools: offered tools, in OpenAI's form.
        choice: the choice among them.
        calls: format of the model's calls.
        marks: texts before and after its reasoning. Defaults to none: it has none.
        thinks: whether the prompt ends within reasoning.
        schema: JSON schema of a response without calls. Defaults to none: any text.

    Examples:
        >>> tool = {"function": {"name": "now", "parameters": {"type": "object"}}}
        >>> choice = ToolChoice(required=True)
        >>> tag = response_grammar([tool], choice, calls=CALL_FORMATS["qwen25"])
        >>> json.loads(tag)["format"]["type"]
        'tags_with_separator'
    """
    some = _calls(tools, choice, calls)
    if choice.required:
        body = some
    elif schema is not None:
        body = _or(_json(schema), some)
    else:
        body = _text_with_calls(tools, choice, calls)
    free = not choice.required and schema is None
    if marks is not None and (thinks or not free):
        body = _sequence(_reasoning(marks, thinks=thinks), body)
    return json.dumps({"type": "structural_tag", "format": body})


def _calls(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, calls: CallFormat
) -> dict[str, Any]:
    """Returns the format of calls without other text."""
    format_ = {
        "type": "tags_with_separator",
        "tags": [_tag(tool, calls) for tool in _allowed(tools, choice)],
        "separator": calls.separator,
        "at_least_one": True,
        "stop_after_first": not choice.parallel,
    }
    if not calls.open:
        return format_
    return {"type": "tag", "begin": calls.open, "content": format_, "end": calls.close}


def _text_with_calls(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, calls: CallFormat
) -> dict[str, Any]:
    """Returns the format of any text with allowed calls."""
    if calls.open:
        trigger, tags = calls.open, [_calls(tools, choice, calls)]
    else:
        trigger = calls.begin
        tags = [_tag(tool, calls) for tool in _allowed(tools, choice)]
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": bool(calls.open) or not choice.parallel,
    }


def _allowed(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice
) -> list[Mapping[str, Any]]:
    functions = [tool["function"] for tool in tools]
    if choice.names is None:
        return functions
    return [function for function in functions if function["name"] in choice.names]


def _tag(function: Mapping[str, Any], calls: CallFormat) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object"}
    return {
        "type": "tag",
        "begin": calls.begin + function["name"] + calls.middle,
        "content": {"type": calls.arguments, "json_schema": schema},
        "end": calls.end,
    }


def _reasoning(marks: tuple[str, str], *, thinks: bool) -> dict[str, Any]:
    """Returns the format of reasoning, optional unless it has begun."""
    begin, end = marks
    text = {"type": "any_text"}
    tag = {"type": "tag", "begin": begin, "content": text, "end": end}
    breaks = _or(*(_const(text) for text in ("", "\n", "\n\n")))
    if thinks:
        return _sequence({**tag, "begin": ""}, breaks)
    return _or(_const(""), _sequence(tag, breaks))


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _or(*formats: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(formats)}


def _sequence(*formats: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(formats)}


def find_format(parser: str | None) -> CallFormat:
    """Returns the call format of a parser."""
    format_ = CALL_FORMATS.get(parser or "")
    if format_ is None:
        raise ConfigurationError(
            f"Tool calls can be forced, or kept from being several, with a "
            f"tool_call_parser of {', '.join(CALL_FORMATS)}; this gateway has "
            f"tool_call_parser={parser!r}. Leave the choice to the model, or make the "
            f"gateway with tool_choice='auto', which does so for all requests."
        )
    return format_


def find_marks(parser: str | None) -> tuple[str, str] | None:
    """Returns the texts around a parser's reasoning; ``None`` without a parser."""
    if parser is None:
        return None
    marks = REASONING_MARKS.get(parser)
    if marks is None:
        raise ConfigurationError(
            f"Behind reasoning, tool calls can be forced with a reasoning_parser of "
            f"{', '.join(REASONING_MARKS)}; this gateway has "
            f"reasoning_parser={parser!r}. Leave the choice to the model, or make the "
            f"gateway with tool_choice='auto', which does so for all requests."
        )
    return marks
