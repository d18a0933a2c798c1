"""OpenAI's dialect: chat completions and completions.

Source: the OpenAI API reference, "Chat" and "Completions (Legacy)".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torchrl_sglang.chat.call_grammars import FREE, ToolChoice
from torchrl_sglang.chat.messages import Message, from_openai
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.base import (
    THINKING,
    AnswerInfo,
    Dialect,
    Endpoint,
    Failure,
    Writer,
    event,
    more,
    pop_object,
)
from torchrl_sglang.gateway.drafts import Draft
from torchrl_sglang.gateway.policy import Sampling
from torchrl_sglang.gateway.request import Hint, Request, Usage, finish_reason
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.requests.sampling import SAMPLING_ALIASES, SAMPLING_PARAMETERS, hint
from torchrl_sglang.types import Completion

MOST_SAMPLES = 128
MOST_TOP_LOGPROBS = 20

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
"""OpenAI's name -> SGLang's."""

_ABOUT = frozenset(
    {
        *("store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        "prompt_cache_options",
    }
)
"""Fields for OpenAI's accounting, which change no response."""

_REFUSED = {
    "functions": "use tools",
    "function_call": "use tools and tool_choice",
    "modalities": "only text is generated",
    "audio": "only text is generated",
    "prediction": "leave it out",
    "web_search_options": "offer a tool of your own",
    "suffix": "leave it out",
    "best_of": "use n",
    "moderation": "responses are not moderated",
    "continue_final_message": "responses are whole messages",
    "add_generation_prompt": "the chat template begins each response",
    "add_special_tokens": "the chat template writes them",
    "guided_json": "use response_format",
    "guided_choice": "use response_format",
    "include_stop_str_in_output": "texts end before a stop string",
    "reasoning": "use reasoning_effort",
    "return_token_ids": "the session's turns have them, and GET of its address",
    "separate_reasoning": "the gateway's reasoning_parser does so for all requests",
}
"""Names of OpenAI and other servers -> alternative."""

_HINTS = {
    "reasoning_effort": ("reasoning_effort",),
    "verbosity": ("verbosity",),
    "enable_thinking": THINKING,
}
"""Field -> template variables with its meaning."""


def read_chat(body: Any) -> Request:
    """Returns a request to ``/v1/chat/completions``."""
    fields = _fields(body)
    messages = from_openai(fields.pop("messages", None))
    tools = _tools(fields.pop("tools", None))
    requested = fields.pop("tool_choice", None)
    if requested == "none":
        tools = []
    parallel = fields.pop("parallel_tool_calls", None) is not False
    choice = read_choice(requested, tools, parallel=parallel)
    hints = [
        Hint(name=name, variables=variables, value=fields.pop(name))
        for name, variables in _HINTS.items()
        if fields.get(name) is not None
    ]
    kwargs = pop_object(fields, "chat_template_kwargs")
    top = fields.pop("top_logprobs", None)
    logprobs = bool(fields.pop("logprobs", None))
    if top and not logprobs:
        raise ConfigurationError("top_logprobs needs logprobs=true.")
    return make_request(
        fields,
        messages=messages,
        setting=PromptSettings(tools=tools, template_kwargs=kwargs),
        hints=hints,
        choice=choice,
        ignored=strict_fields(tools) if choice.is_free else (),
        logprobs=logprobs,
        top=top,
    )


def read_completion(body: Any) -> Request:
    """Returns a request to ``/v1/completions``."""
    fields = _fields(body)
    prompt = fields.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str) or not prompt:
        raise ConfigurationError(
            "prompt must be one text; send several prompts as several requests."
        )
    top = fields.pop("logprobs", None)
    echo = bool(fields.pop("echo", None))
    if echo and top is not None:
        raise ConfigurationError(
            "echo with logprobs is not supported: log-probs are the response's alone. "
            "vLLM's field prompt_logprobs=0 returns the prompt's (--api vllm)."
        )
    return make_request(
        fields,
        text=prompt,
        logprobs=top is not None,
        top=top,
        top_name="logprobs",
        echo=echo,
    )


def _fields(body: Any) -> dict[str, Any]:
    if not isinstance(body, Mapping):
        raise ConfigurationError("The request must be a JSON object.")
    return dict(body)


def make_request(
    given: dict[str, Any], *, top: Any, top_name: str = "top_logprobs", **fields: Any
) -> Request:
    """Returns a request with the fields that all of OpenAI's requests share."""
    model = given.pop("model", "") or ""
    stream = bool(given.pop("stream", None))
    options = pop_object(given, "stream_options")
    metadata = pop_object(given, "metadata")
    users = [given.pop(name, None) for name in ("user", "safety_identifier")]
    number = given.pop("n", None)
    number = check_integer("n", 1 if number is None else number, 1, MOST_SAMPLES)
    top = check_integer(top_name, top or 0, 0, MOST_TOP_LOGPROBS)
    form = given.pop("response_format", None)
    if given.get("modalities") == ["text"]:
        del given["modalities"]
    params = {
        **format_params("response_format", form, nested=True),
        **read_params(given, _SAMPLING, about=_ABOUT, refused=_REFUSED),
    }
    return Request(
        sampling=Sampling(params=params, number=number, top_logprobs=top),
        model=str(model),
        user=next((str(user) for user in users if user), None),
        metadata=metadata,
        stream=stream,
        usage=bool(options.get("include_usage")),
        **fields,
    )


def format_params(name: str, given: Any, *, nested: bool) -> dict[str, Any]:
    """Returns the sampling parameter for a format; its schema may be nested."""
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind in (None, "text"):
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema" and isinstance(given, Mapping):
        about = given.get("json_schema") if nested else given
        schema = about.get("schema") if isinstance(about, Mapping) else None
        if isinstance(schema, Mapping):
            return {"json_schema": json.dumps(schema)}
    raise ConfigurationError(
        f"{name}={given!r:.200} must be of type text, json_object or json_schema (with "
        f"a schema)."
    )


def read_params(
    fields: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    about: Set[str],
    refused: Mapping[str, str],
) -> dict[str, Any]:
    """Returns sampling parameters under SGLang's names; ``about`` have no effect."""
    params: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name in about:
            continue
        if name in refused:
            raise ConfigurationError(f"{name} is not supported; {refused[name]}.")
        sglang_name = names.get(name) or SAMPLING_ALIASES.get(name, name)
        if sglang_name not in SAMPLING_PARAMETERS:
            advice = hint(name, [*names, *SAMPLING_PARAMETERS])
            raise ConfigurationError(
                f"{name!r} is not a parameter.{advice} A gateway with "
                f"ignored_params=[{name!r}] leaves it out."
            )
        if params.setdefault(sglang_name, value) != value:
            raise ConfigurationError(
                f"{name}={value!r}, and another name of the same parameter has "
                f"{params[sglang_name]!r}; give one."
            )
    return params


def check_integer(name: str, value: Any, least: int, most: int) -> int:
    """Returns an integer in a range; raises :class:`ConfigurationError` otherwise."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigurationError(
            f"{name}={value!r} must be an integer in [{least}, {most}]."
        )
    return value


def read_choice(
    given: Any, tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> ToolChoice:
    """Returns the choice among tools of OpenAI's dialects."""
    choice = _choice(given)
    if choice.required and not tools:
        raise ConfigurationError(f"tool_choice={given!r} needs tools.")
    offered = [tool["function"]["name"] for tool in tools]
    for name in choice.names or ():
        if name not in offered:
            raise ConfigurationError(
                f"tool_choice names {name!r}, and tools has {', '.join(offered)}."
            )
    if parallel or not tools:
        return choice
    fields = (*choice.fields, "parallel_tool_calls")
    return replace(choice, parallel=False, fields=fields)


def _choice(given: Any) -> ToolChoice:
    """Returns the choice in ``tool_choice``, independently of the tools."""
    fields = ("tool_choice",)
    if given in (None, "auto", "none"):
        return FREE
    if given == "required":
        return ToolChoice(required=True, fields=fields)
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "function" and (name := _named(given)):
        # A name requires a single call of it.
        return ToolChoice(required=True, names=(name,), parallel=False, fields=fields)
    if kind == "allowed_tools":
        about = given.get("allowed_tools", given)
        about = about if isinstance(about, Mapping) else {}
        mode, allowed = about.get("mode"), about.get("tools")
        names = [_named(tool) for tool in allowed] if isinstance(allowed, list) else []
        allowed_names = tuple(name for name in names if name is not None)
        if mode in ("auto", "required") and len(allowed_names) == len(names) > 0:
            required = mode == "required"
            return ToolChoice(required=required, names=allowed_names, fields=fields)
    raise ConfigurationError(
        f"tool_choice={given!r} must be 'none', 'auto', 'required', a function with a "
        f"name, or allowed_tools with a mode of 'auto' or 'required' and functions."
    )


def _named(given: Any) -> str | None:
    """Returns the name of a function, from the tool or its nested object."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def strict_fields(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the strict field of tools, if any sets it."""
    return ("tools.strict",) if any(t["function"].get("strict") for t in tools) else ()


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    tools = tools or []
    if not isinstance(tools, list):
        raise ConfigurationError(f"tools={tools!r:.200} must be a list.")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"{tool!r:.200} is not a function with a name; tools of other types "
                f"are not supported, as calls have arguments in JSON."
            )
    return tools


def tool_calls_of(message: Message) -> list[dict[str, Any]]:
    """Returns a message's tool calls, with arguments as texts."""
    return [
        {
            **call,
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls", ())
    ]


KIND = "text_completion"
"""Object type of an answer other than a message."""


class CompletionWriter(Writer):
    """Formats the answers to a request."""

    def __init__(self, request: Request, info: AnswerInfo) -> None:
        self._request = request
        self._token_text = info.token_text
        self._is_chat = request.text is None
        self._about = {"created": info.created, "model": request.model}
        self._id = info.name
        self._told: dict[int, Draft] = {}

    def answer(self, turns: Sequence[Turn], usage: Usage) -> dict[str, Any]:
        """Returns the whole answer."""
        return {
            **self._head("chat.completion" if self._is_chat else KIND),
            "choices": [
                {"index": index, **self._choice(turn)}
                for index, turn in enumerate(turns)
            ],
            "usage": usage_fields(usage),
        }

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        """Yields the role of each response."""
        if not self._is_chat:
            return
        for index in range(self._request.sampling.number):
            yield from self._grow(index, Draft())

    def grow(self, number: int, draft: Draft) -> Iterator[bytes]:
        """Yields the new part of a response."""
        # Log-probs are only available for whole responses.
        if not self._request.logprobs:
            yield from self._grow(number, draft)

    def _grow(self, index: int, draft: Draft) -> Iterator[bytes]:
        for delta in self._new(index, draft):
            if delta.get("text") == "":
                continue
            open_ = {"index": index, "finish_reason": None, "logprobs": None}
            yield event({**self._chunk, "choices": [{**delta, **open_}]})

    def _new(self, index: int, draft: Draft) -> Iterator[dict[str, Any]]:
        """Yields deltas of the growth of a response."""
        draft_before = self._told.get(index)
        self._told[index] = draft
        if not self._is_chat:
            prefix = "" if draft_before else self._echoed
            content = draft_before.content if draft_before else ""
            yield {"text": prefix + more(draft.content, content)}
            return
        if draft_before is None:
            yield {"delta": {"role": "assistant", "content": ""}}
            draft_before = Draft()
        if reasoning := more(draft.reasoning, draft_before.reasoning):
            yield {"delta": {"reasoning_content": reasoning}}
        if content := more(draft.content, draft_before.content):
            yield {"delta": {"content": content}}

    def events(self, turns: Sequence[Turn], usage: Usage) -> Iterator[bytes]:
        """Yields the answer as server-sent events, or its remaining part."""
        head = self._chunk
        for index, turn in enumerate(turns):
            for choice in self._deltas(index, turn):
                yield event({**head, "choices": [{"index": index, **choice}]})
        if self._request.usage:
            yield event({**head, "choices": [], "usage": usage_fields(usage)})
        yield b"data: [DONE]\n\n"

    @property
    def _echoed(self) -> str:
        """The prompt, if the client requests it in the answer."""
        return (self._request.text or "") if self._request.echo else ""

    @property
    def _chunk(self) -> dict[str, Any]:
        """An event before its content."""
        head = self._head("chat.completion.chunk" if self._is_chat else KIND)
        return {**head, "usage": None} if self._request.usage else head

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        return {"id": f"{prefix}-{self._id}", "object": kind, **self._about}

    def _choice(self, turn: Turn) -> dict[str, Any]:
        if not self._is_chat:
            text = self._echoed + turn.reply["content"]
            return {"text": text, **self._end(turn)}
        reply = turn.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply["content"]}
        if calls := tool_calls_of(reply):
            message |= {"tool_calls": calls, "content": reply["content"] or None}
        if reasoning := reply.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        return {"message": {**message, "refusal": None}, **self._end(turn)}

    def _deltas(self, index: int, turn: Turn) -> Iterator[dict[str, Any]]:
        end, reply = self._end(turn), turn.reply
        draft = Draft(
            reasoning=reply.get("reasoning_content") or "", content=reply["content"]
        )
        if not self._is_chat:
            for new in self._new(index, draft):
                yield {**new, **end}
            return
        logprobs = end.pop("logprobs")
        open_: dict[str, Any] = {"finish_reason": None, "logprobs": None}
        for new in self._new(index, draft):
            if new["delta"].get("content"):
                yield {**new, **open_, "logprobs": logprobs}
                logprobs = None
            else:
                yield {**new, **open_}
        for position, call in enumerate(tool_calls_of(reply)):
            delta_call = {"tool_calls": [{"index": position, **call}]}
            yield {"delta": delta_call, **open_}
        yield {"delta": {}, **end, "logprobs": logprobs}

    def _end(self, turn: Turn) -> dict[str, Any]:
        reason = finish_reason(turn)
        return {"finish_reason": reason, "logprobs": self._logprobs(turn)}

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        rows = logprob_rows(turn.completion, self._token_text)
        if self._is_chat:
            return {"content": rows, "refusal": None}
        starts, position = [], len(self._request.text or "")
        for row in rows:
            starts.append(position)
            position += len(row["token"])
        return {
            "tokens": [row["token"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in row["top_logprobs"]}
                for row in rows
            ],
            "text_offset": starts,
        }


def logprob_rows(
    completion: Completion, token_text: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Returns the log-probs of a response's tokens, in OpenAI's form."""

    def row(token: int, value: float) -> dict[str, Any]:
        text = token_text(token)
        # OpenAI's value for impossible tokens.
        logprob = value if math.isfinite(value) else -9999.0
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    count = len(completion.token_ids)
    empty: list[list[Any]] = [[]] * count
    tokens = zip(
        completion.token_ids,
        completion.log_probs or [math.nan] * count,
        completion.top_token_ids or empty,
        completion.top_log_probs or empty,
        strict=True,
    )
    return [
        {**row(token, value), "top_logprobs": list(map(row, tops, top_values))}
        for token, value, tops, top_values in tokens
    ]


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Returns OpenAI's counts of tokens."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.response,
        "total_tokens": usage.prompt + usage.response,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


class Completions(Dialect):
    """OpenAI's chat completions and completions."""

    endpoints = (
        Endpoint(path="/v1/chat/completions", read=read_chat, write=CompletionWriter),
        Endpoint(path="/v1/completions", read=read_completion, write=CompletionWriter),
    )

    def error(self, failure: Failure) -> dict[str, Any]:
        """Returns the content of an error."""
        return {
            "error": {
                "message": failure.message,
                "type": failure.kind,
                "param": failure.param,
                "code": failure.code,
            }
        }
