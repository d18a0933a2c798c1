"""Tools that the policy can call between its turns."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, get_type_hints

from torchrl.envs.llm.transforms.tools import ToolCall

from torchrl_sglang.chat import tool_calls as chat
from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.tool_calls import (
    CALL_MARK,
    UnreadableCall,
    behind_reasoning,
    find_calls,
    written_ids,
)
from torchrl_sglang.collectors.groups.user_functions import (
    name_of,
    naming,
    parameters_of,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.texts import replace_halves
from torchrl_sglang.support.tracing import span
from torchrl_sglang.support.user_code import (
    CallTimeoutError,
    describe,
    together,
)

ToolFunctions: TypeAlias = (
    Mapping[str, Callable[..., Any] | tuple[Callable[..., Any], Mapping[str, Any]]]
    | Sequence[Callable[..., Any] | tuple[Callable[..., Any], Mapping[str, Any]]]
)
"""Functions, or pairs of function and schema, or a mapping of names to them."""

_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")
"""The only ids that Mistral's chat templates take."""

CONVERSATION = "conversation"
"""Parameter of a tool that is not the policy's: it gets the conversation."""


def parse_tool_calls(response: str) -> dict[str, Any]:
    """Reads tool calls as Qwen and Hermes models write them.

    ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``, any number of
    times. What cannot be read is not returned, nor are calls in reasoning.

    Examples:
        >>> text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> [(call.tool, call.args) for call in parse_tool_calls(text)["calls"]]
        [('add', {'a': 1})]
    """
    text, calls = find_calls(response)
    readable = [_to_torchrl(call) for call in calls if isinstance(call, chat.ToolCall)]
    return {"text": text, "calls": readable, "meta": {}}


def _to_torchrl(call: chat.ToolCall) -> ToolCall:
    return ToolCall(tool=call.name, args=dict(call.arguments), tag=call.id)


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A tool call of the policy and its result."""

    call: ToolCall | UnreadableCall
    result: str
    """Text of the tool, or an error."""
    id: str
    """Id of the call in its conversation."""

    @property
    def call_message(self) -> dict[str, Any]:
        """The call as the policy's message can hold it."""
        if isinstance(self.call, UnreadableCall):
            written = chat.ToolCall(name="unreadable", arguments={})
        else:
            arguments = _encodable(dict(self.call.args or {}))
            name = _encodable(str(self.call.tool))
            written = chat.ToolCall(name=name, arguments=arguments)
        return written.to_message(self.id)

    @property
    def message(self) -> Message:
        """The message of the role ``"tool"`` with the result."""
        message = {"role": "tool", "content": self.result, "tool_call_id": self.id}
        if not isinstance(self.call, UnreadableCall):
            message["name"] = _encodable(str(self.call.tool))
        return message


def _encodable(value: Any) -> Any:
    """Returns a value of JSON without halves of surrogate pairs.

    A model can write them, and a tokenizer takes none.
    """
    if isinstance(value, str):
        return replace_halves(value)
    if isinstance(value, Mapping):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(item) for item in value]
    return value


def _ids(calls: Sequence[Any], text: str, turn: int, *, any_id: bool) -> list[str]:
    """Returns ids of calls: the model's, or nine letters and digits, as Mistral's.

    They are the same in each run of a deterministic collector. ``any_id``: the chat
    template takes other ids than those nine.
    """
    tags = [getattr(call, "tag", None) for call in calls]
    names = [_encodable(tag) for tag in tags if isinstance(tag, str) and tag]
    fit = any_id or all(map(_MISTRAL_ID.fullmatch, names))
    if not (fit and len(set(names)) == len(names) == len(calls)):
        names = written_ids(text, len(calls))
    return names or [f"t{turn % 1000:03}c{i:04}" for i in range(len(calls))]


def wants_calls_in_message(
    encode: Callable[[list[Message]], Any], system: str | None
) -> bool:
    """Returns whether a chat template takes results only of calls in a message.

    Mistral's do. ``system`` is the message at the beginning of conversations. Raises a
    ConfigurationError if the template refuses messages of tools anyway.
    """
    refused: ConfigurationError | None = None
    for in_message in (False, True):
        try:
            encode(_probe(system, in_message=in_message))
        except ConfigurationError as error:
            refused = refused or error
        else:
            return in_message
    raise ConfigurationError(
        f"tools cannot be used with this chat template, which refuses messages of the "
        f"role 'tool': {refused} Give the policy another chat_template, or leave tools "
        f"out and answer the policy's calls with step, as a user's message."
    ) from refused


def _probe(system: str | None, *, in_message: bool) -> list[Message]:
    """Returns a conversation with two turns that call tools, and one that does not."""
    messages: list[Message] = [{"role": "user", "content": "?"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    for turn, count in enumerate((2, 1), start=1):
        calls = [ToolCall(tool="probe", args={})] * count
        ids = _ids(calls, "", turn, any_id=True)
        answers = [
            AnsweredCall(call, "?", id_) for call, id_ in zip(calls, ids, strict=True)
        ]
        reply: dict[str, Any] = {"role": "assistant", "content": "?"}
        if in_message:
            reply["tool_calls"] = [answer.call_message for answer in answers]
        messages += [reply, *(answer.message for answer in answers)]
    return messages


class Tools:
    """Functions that the policy can call by name.

    Attributes:
        schemas (list of dict): JSON schemas, for a chat template.
    """

    def __init__(
        self,
        functions: ToolFunctions,
        parser: Callable[[str], Any] = parse_tool_calls,
    ) -> None:
        given: Any = functions
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigurationError(
                f"tools takes a list of functions, or a mapping of names to functions, "
                f"got {functions!r}."
            )
        if not isinstance(functions, Mapping):
            functions = by_their_names(functions)
        self._functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[dict[str, Any]] = []
        for name, given in functions.items():
            is_pair = isinstance(given, tuple) and len(given) == 2
            function, schema = given if is_pair else (given, None)
            if not isinstance(name, str) or not name:
                raise ConfigurationError(
                    f"tools has the name {name!r}, which must be a text, and not empty."
                )
            if not callable(function) or not isinstance(schema, Mapping | None):
                raise ConfigurationError(
                    f"tools[{name!r}] must be a function, or a pair of it and its JSON "
                    f"schema, got {given!r}."
                )
            self._functions[name] = function
            self.schemas.append(_schema(name, function, schema))
        self._parser = parser

    async def answer(
        self,
        conversation: Any,
        blocking: BlockingCalls,
        seconds: float,
        *,
        any_id: bool = True,
    ) -> list[AnsweredCall]:
        """Runs the calls in the last response of a conversation, side by side.

        Those in its reasoning are none. The result is a text that begins with
        ``Error:`` for a call that cannot be read, of a tool that does not exist or
        fails, and for one that takes too long. ``any_id``: the chat template takes ids
        other than nine letters and digits.
        """
        turn = conversation.turns[-1]
        text = behind_reasoning(conversation.response, turn.prompt.text)
        calls = await self._find(text, blocking, seconds)
        results = await together(
            self._run(call, conversation, blocking, seconds) for call in calls
        )
        ids = _ids(calls, text, len(conversation.turns), any_id=any_id)
        answered = zip(calls, results, ids, strict=True)
        return [AnsweredCall(*call) for call in answered]

    async def _find(
        self, text: str, blocking: BlockingCalls, seconds: float
    ) -> list[ToolCall | UnreadableCall]:
        if self._parser is parse_tool_calls:
            if CALL_MARK not in text:
                return []
            _, calls = await blocking.call(find_calls, text, seconds=seconds)
            return [
                call if isinstance(call, UnreadableCall) else _to_torchrl(call)
                for call in calls
            ]
        with naming(f"The tool_parser {name_of(self._parser)!r}"):
            # A parser of the user's can return anything.
            parsed = await blocking.call(self._parser, text, seconds=seconds)
            return list(parsed["calls"])

    async def _run(
        self,
        call: ToolCall | UnreadableCall,
        conversation: Any,
        blocking: BlockingCalls,
        seconds: float,
    ) -> str:
        if isinstance(call, UnreadableCall):
            return f"Error: this call cannot be read: {call.reason}."
        tool = str(call.tool)
        with span(
            f"execute_tool {tool}",
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__name=tool,
        ) as traced:
            text = await self._try(call, conversation, blocking, seconds)
            if text.startswith("Error: "):
                traced.fail(text)
            return text

    async def _try(
        self, call: ToolCall, conversation: Any, blocking: BlockingCalls, seconds: float
    ) -> str:
        """Returns the result of a call, or a text that begins with ``Error:``."""
        try:
            function = self._functions.get(call.tool)
            if function is None:
                names = ", ".join(sorted(self._functions))
                return f"Error: there is no tool {call.tool!r}; there are: {names}."
            bound = {str(name): value for name, value in dict(call.args or {}).items()}
            if CONVERSATION in parameters_of(function):
                if CONVERSATION in bound:
                    raise TypeError(f"{call.tool}() has no argument {CONVERSATION!r}")
                bound[CONVERSATION] = conversation
            value = await blocking.call(partial(function, **bound), seconds=seconds)
            text = value if isinstance(value, str) else json.dumps(value, default=str)
        except CallTimeoutError:
            return f"Error: {call.tool} took longer than {seconds:g} s."
        except Exception as error:  # noqa: BLE001 - A tool raises anything.
            text = f"Error: {describe(error)}"
        return replace_halves(text)


def by_their_names(given: Iterable[Any]) -> dict[str, Any]:
    """Returns functions, or pairs of them and schemas, by the functions' names."""
    named: dict[str, Any] = {}
    for tool in given:
        function = tool[0] if isinstance(tool, tuple) and tool else tool
        if not callable(function):
            raise ConfigurationError(f"A tool must be a function, got {function!r}.")
        name = getattr(function, "__name__", None)
        if name is None or name in named:
            reason = "no name of its own" if name is None else "the name of another one"
            raise ConfigurationError(
                f"tools has {function!r}, which has {reason}; give a mapping of names "
                f"to functions."
            )
        named[name] = tool
    return named


def _schema(
    name: str, function: Callable[..., Any], given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the JSON schema of a tool, in the form that chat templates take.

    ``transformers.utils.get_json_schema`` makes it of the type hints and the docstring.
    """
    from transformers.utils import get_json_schema

    if given is not None:
        # With or without {"type": "function", "function": ...} around it.
        inner = given.get("function", given)
        if not isinstance(inner, Mapping):
            raise ConfigurationError(
                f"tools[{name!r}] has the schema {given!r}, whose 'function' is no "
                f"mapping."
            )
        return {"type": "function", "function": {**inner, "name": name}}
    try:
        made: dict[str, Any] = get_json_schema(_policys_part(function))
    except Exception as error:
        raise ConfigurationError(
            f"tools[{name!r}] has no JSON schema: {describe(error)}. "
            f"Give the function type hints and a docstring with a summary and a "
            f"section 'Args:', or its schema: tools={{{name!r}: (function, "
            f"{{'description': ..., 'parameters': {{...}}}})}}."
        ) from error
    made["function"]["name"] = name
    return made


def _policys_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the same signature but without the conversation."""
    hidden = inspect.unwrap(function)
    if not inspect.isroutine(hidden) and not isinstance(hidden, type):
        hidden = type(hidden).__call__
    signature = inspect.signature(function)
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name != CONVERSATION
    ]

    def stub() -> None: ...

    made: Any = types.FunctionType(stub.__code__, stub.__globals__, hidden.__name__)
    names = {*(parameter.name for parameter in parameters), "return"}
    made.__signature__ = signature.replace(parameters=parameters)
    made.__annotations__ = {
        key: hint for key, hint in get_type_hints(hidden).items() if key in names
    }
    made.__doc__ = inspect.getdoc(hidden)
    return made  # type: ignore[no-any-return]
