"""Parser of request bodies for ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_sglang.chat.call_grammars import ToolChoice
from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.base import THINKING, Recall, pop_object
from torchrl_sglang.gateway.dialects.openai import (
    MOST_TOP_LOGPROBS,
    check_integer,
    format_params,
    read_choice,
    read_params,
    strict_fields,
)
from torchrl_sglang.gateway.dialects.responses.items import earlier_messages, read_items
from torchrl_sglang.gateway.dialects.responses.tools import (
    declare,
    model_name,
    read_tools,
)
from torchrl_sglang.gateway.policy import Sampling
from torchrl_sglang.gateway.request import Hint, Request

LOGPROBS = "message.output_text.logprobs"

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_output_tokens": "max_new_tokens",
    "seed": "sampling_seed",
}
"""OpenAI's name -> SGLang's."""

_ABOUT = frozenset(
    {
        *("service_tier", "access_programs", "background_options"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        # For tools on OpenAI's servers, and images.
        *("max_tool_calls", "image"),
        # Padding against eavesdroppers.
        "stream_options",
    }
)
"""Fields for OpenAI's accounting and its own features, which change no response."""

_REFUSED = {
    "background": "ask for the response and wait for it, or stream it",
    "conversation": "give previous_response_id, or send all items",
    "prompt": "send its text as instructions or input",
    "moderation": "responses are not moderated",
}
"""OpenAI's names -> alternative."""

_HINTS = {
    "reasoning.effort": ("reasoning_effort",),
    "text.verbosity": ("verbosity",),
    "enable_thinking": THINKING,
}
"""Field -> template variables with its meaning."""

_WISHES: dict[str, tuple[Any, ...]] = {
    # Too long conversations are refused, never truncated.
    "truncation": (None, "disabled"),
    "context_management": (None, []),
    "reasoning.context": (None, "auto"),
    "reasoning.mode": (None, "standard"),
}
"""Field without effect -> its neutral values."""

_INSIDE = {
    "reasoning": ("effort", "summary", "generate_summary", "context", "mode"),
    "text": ("format", "verbosity"),
}
"""Field -> its allowed fields."""

_INCLUDED = frozenset(
    {
        *(LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url"),
        *("file_search_call.results", "web_search_call.results"),
        *("web_search_call.action.sources", "code_interpreter_call.outputs"),
        "computer_call_output.output.image_url",
    }
)
"""Reasoning always has its encrypted content. Outputs of OpenAI's own tools are absent:
there are no calls of them."""

ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "model"),
    *("parallel_tool_calls", "previous_response_id", "prompt_cache_key", "reasoning"),
    *("safety_identifier", "store", "temperature", "text", "tool_choice"),
    *("top_logprobs", "top_p", "truncation", "user", "include"),
)
"""Fields of a request repeated in its response."""


def read_response(body: Any, recall: Recall = lambda name: None) -> Request:
    """Returns a request to ``/v1/responses``."""
    if not isinstance(body, Mapping):
        raise ConfigurationError("The request must be a JSON object.")
    fields = {key: value for key, value in body.items() if value is not None}
    about = {key: fields[key] for key in ECHOED if key in fields}
    messages = _messages(fields, recall)
    offered, ignored = read_tools(fields.pop("tools", None))
    declared, choice = _chosen(fields, declare(offered))
    strict = strict_fields(declared) if choice.is_free else ()
    fields = _flat(fields)
    hints = [
        Hint(name=name, variables=variables, value=fields.pop(name))
        for name, variables in _HINTS.items()
        if fields.get(name) is not None
    ]
    kwargs = pop_object(fields, "chat_template_kwargs")
    wishes = [
        name
        for name, nothing in _WISHES.items()
        if fields.pop(name, None) not in nothing
    ]
    return _request(
        fields,
        messages=messages,
        setting=PromptSettings(tools=declared, template_kwargs=kwargs),
        hints=hints,
        choice=choice,
        about={**about, "tools": offered},
        ignored=(*ignored, *strict, *wishes),
    )


def _request(given: dict[str, Any], **fields: Any) -> Request:
    """Returns a request from its remaining fields."""
    included, top = _included(given.pop("include", [])), given.pop("top_logprobs", 0)
    if not _INCLUDED.issuperset(included):
        # Additional fields of an answer change no response.
        fields["ignored"] = (*fields["ignored"], "include")
    top = check_integer("top_logprobs", top, 0, MOST_TOP_LOGPROBS)
    # Codex names the requesting agent in its own metadata.
    agent, metadata = (
        pop_object(given, name) for name in ("client_metadata", "metadata")
    )
    users = [given.pop(name, None) for name in ("user", "safety_identifier")]
    return Request(
        model=str(given.pop("model", "")),
        user=next((str(user) for user in users if user), None),
        metadata={**agent, **metadata},
        stream=bool(given.pop("stream", False)),
        keep=bool(given.pop("store", True)),
        logprobs=LOGPROBS in included or top > 0,
        sampling=Sampling(params=_params(given), top_logprobs=top),
        **fields,
    )


def _messages(given: dict[str, Any], recall: Recall) -> list[Message]:
    instructions = given.pop("instructions", None)
    earlier: list[Message] = []
    if instructions:
        if not isinstance(instructions, str):
            raise ConfigurationError(
                f"instructions={instructions!r:.50} must be a text; send messages as "
                f"input."
            )
        earlier.append({"role": "system", "content": instructions})
    previous = given.pop("previous_response_id", None)
    if previous is not None:
        earlier += earlier_messages(previous, recall)
    items = given.pop("input", None)
    if items is None and previous is not None:
        items = []
    messages = [*earlier, *read_items(items, recall)]
    if not messages:
        raise ConfigurationError("input must have at least one item.")
    return messages


def _chosen(
    given: dict[str, Any], tools: list[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], ToolChoice]:
    """Returns the tools in the prompt, and the allowed tools among them."""
    requested = _as_function(given.pop("tool_choice", None))
    parallel = given.pop("parallel_tool_calls", True) is not False
    declared = [] if requested == "none" else tools
    return declared, read_choice(requested, declared, parallel=parallel)


def _as_function(given: Any) -> Any:
    """Converts a choice of tools to a choice of functions, the model's form."""
    if not isinstance(given, Mapping):
        return given
    kind, name, allowed = given.get("type"), given.get("name"), given.get("tools")
    if kind == "allowed_tools" and isinstance(allowed, list):
        return {**given, "tools": [_as_function(tool) for tool in allowed]}
    if kind not in ("function", "custom") or not isinstance(name, str):
        return given
    space = given.get("namespace")
    full_name = model_name(name, space if isinstance(space, str) else None)
    return {"type": "function", "name": full_name}


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with nested fields flattened."""
    fields = dict(given)
    for name, allowed in _INSIDE.items():
        for key, value in pop_object(fields, name).items():
            if key not in allowed:
                raise ConfigurationError(
                    f"{name} has {key!r:.50}; it may have {', '.join(allowed)}."
                )
            fields[f"{name}.{key}"] = value
    return fields


def _included(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise ConfigurationError(f"include={given!r:.50} must be a list.")
    for name in given:
        if not isinstance(name, str):
            raise ConfigurationError(f"include has {name!r:.50}, which is not a text.")
    return given


def _params(given: dict[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters under SGLang's names."""
    form = given.pop("text.format", None)
    writers = ("reasoning.summary", "reasoning.generate_summary")
    fields = {
        name: value
        for name, value in given.items()
        if name not in writers and (value or name not in _REFUSED)
    }
    return {
        **format_params("text.format", form, nested=False),
        **read_params(fields, _SAMPLING, about=_ABOUT, refused=_REFUSED),
    }
