"""A request of any dialect, and the options of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_sglang.chat.call_grammars import FREE, ToolChoice
from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.gateway.policy import Sampling
from torchrl_sglang.gateway.turns import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt: int
    """Tokens read by the model."""
    cached: int
    """Tokens of the prompt from the prefix cache."""
    response: int
    """Tokens written by the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hint:
    """A client's setting for a variable of the chat template, if any."""

    name: str
    """The client's field, such as ``"verbosity"``."""
    variables: tuple[str, ...]
    """Variables for it; the template's first variable gets the value."""
    value: Any
    """Value of the variable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request of any dialect."""

    messages: Sequence[Message] = ()
    """The conversation."""
    text: str | None = None
    """Prompt of a plain completion, instead of a conversation."""
    token_ids: Sequence[int] | None = None
    """Tokens of the prompt, instead of a conversation."""
    more_prompts: Sequence[str | Sequence[int]] = ()
    """Further texts, or tokens, whose responses follow in the same answer."""
    setting: PromptSettings = field(default_factory=PromptSettings)
    """Tools and variables of the template."""
    hints: Sequence[Hint] = ()
    """Settings that a template may support."""
    choice: ToolChoice = FREE
    """Tools for the responses to call, and whether a call is required."""
    sampling: Sampling
    """Sampling parameters of the responses."""
    model: str
    """Name of the model in the request."""
    user: str | None = None
    """End user of the request."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further metadata of the request."""
    request_id: str | None = None
    """Id of the request, in the answer's headers."""
    stream: bool = False
    """Answer with server-sent events."""
    logprobs: bool = False
    """Return log-probs."""
    usage: bool = False
    """Return the usage at the end of a stream."""
    echo: bool = False
    """Return the prompt in the response (OpenAI's ``echo``)."""
    reasoning: bool = True
    """Return the reasoning."""
    edits: bool = False
    """Return the edits of the conversation: none."""
    decodes: bool = True
    """Return the text of the responses; sessions always have it."""
    keep: bool = False
    """Keep the answer, for clients to retrieve and continue."""
    name: str = ""
    """Name of the answer in its session."""
    digest: str = ""
    """Hash of equal requests."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the answer about the request, as JSON."""
    ignored: tuple[str, ...] = ()
    """Fields without effect, listed in the answer's headers."""


def usage_of(turns: Sequence[Turn]) -> Usage:
    """Returns the tokens of an answer."""
    first = turns[0]
    return Usage(
        prompt=first.prompt.num_tokens,
        cached=first.completion.cached_tokens,
        response=sum(len(turn.completion.token_ids) for turn in turns),
    )


def finish_reason(turn: Turn) -> str:
    """Returns the finish reason of a response, in OpenAI's words."""
    if turn.completion.finish_reason == "length" and not turn.ended:
        return "length"
    return "tool_calls" if turn.reply.get("tool_calls") else "stop"
