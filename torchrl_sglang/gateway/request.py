"""A request of any dialect, and what is told of its answer."""

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
    """Tokens that the model read."""
    cached: int
    """Tokens of the prompt from the prefix cache."""
    response: int
    """Tokens that the model wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hint:
    """A wish that has effect if the chat template has a variable for it."""

    name: str
    """The client's field, such as ``"verbosity"``."""
    variables: tuple[str, ...]
    """Variables for it; the first one that the template has gets the value."""
    value: Any
    """Value of the variable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request of any dialect."""

    messages: Sequence[Message] = ()
    """The conversation."""
    text: str | None = None
    """Instead of it: the prompt of a plain completion."""
    setting: PromptSettings = field(default_factory=PromptSettings)
    """Tools and variables of the template."""
    hints: Sequence[Hint] = ()
    """Wishes that a template may know."""
    choice: ToolChoice = FREE
    """Tools that the responses may call, and whether they have to."""
    sampling: Sampling
    """Sampling parameters of the responses."""
    model: str
    """The model's name, as the client says it."""
    user: str | None = None
    """For whom the client asks, as the client says it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the client says of the request beside it."""
    request_id: str | None = None
    """Name of the request, which the answer's headers have."""
    stream: bool = False
    """Answer with server-sent events."""
    logprobs: bool = False
    """Tell the log-probs."""
    usage: bool = False
    """Tell the usage at the end of a stream."""
    echo: bool = False
    """Tell the prompt, too."""
    reasoning: bool = True
    """Tell the reasoning."""
    edits: bool = False
    """Tell which edits of the conversation were made: none."""
    keep: bool = False
    """Keep the answer, so that clients may ask for it and go on from it."""
    name: str = ""
    """Name of the answer in its session."""
    digest: str = ""
    """What equal requests share."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the answer says of the request, as JSON."""
    ignored: tuple[str, ...] = ()
    """Fields without effect, which the answer's headers name."""


def usage_of(turns: Sequence[Turn]) -> Usage:
    """Returns the tokens of an answer."""
    first = turns[0]
    return Usage(
        prompt=first.prompt.num_tokens,
        cached=first.completion.cached_tokens,
        response=sum(len(turn.completion.token_ids) for turn in turns),
    )


def finish_reason(turn: Turn) -> str:
    """Returns why a response ended, in OpenAI's words."""
    if turn.completion.finish_reason == "length" and not turn.ended:
        return "length"
    return "tool_calls" if turn.reply.get("tool_calls") else "stop"
