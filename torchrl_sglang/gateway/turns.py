"""Turns: a prompt and the model's response; a turn may continue another."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_sglang.chat.messages import Message, rename_calls, without_stop
from torchrl_sglang.chat.pieces import shared_ids
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.chat.rendered import ChatResponse
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.gateway.branches import Branch
from torchrl_sglang.types import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The prompt of a turn.

    It stores only its difference to the continued turn, so a session grows linearly
    with the conversation.
    """

    setting: PromptSettings
    """Tools and template variables."""
    new_messages: Sequence[Message]
    """Messages after the earlier turn's response; without such a turn, all."""
    new_token_ids: Sequence[int]
    """Tokens after the earlier turn's."""
    new_text: str | None = None
    """Text after the earlier turn's prompt, of a plain completion instead of messages;
    it begins with the earlier turn's response."""
    origin: Turn | None = field(default=None, repr=False)
    """The continued turn."""
    said: Message | None = None
    """The edited reply of the continued turn in the client's request, if the template
    renders it as the model's own tokens with more tokens after them."""
    branch: Branch | None = None
    """Reason why it continues no end of an earlier turn; ``None`` if it does."""
    new_rendered: str | None = field(default=None, repr=False, compare=False)
    """Rendered text after the earlier turn's prompt; ``None``: unknown."""
    renders_all: bool = field(default=False, repr=False, compare=False)
    """Whether the rendered text is the whole conversation despite an earlier turn."""
    num_tokens: int = field(init=False)
    """Number of its tokens."""

    def __post_init__(self) -> None:
        shared = 0 if self.origin is None else self.origin.num_tokens
        object.__setattr__(self, "new_token_ids", shared_ids(self.new_token_ids))
        object.__setattr__(self, "num_tokens", shared + len(self.new_token_ids))
        # Tool declarations are large, and each request repeats them.
        if self.origin is not None and self.origin.prompt.setting == self.setting:
            object.__setattr__(self, "setting", self.origin.prompt.setting)

    @property
    def parent(self) -> int | None:
        """Number of the continued turn."""
        return None if self.origin is None else self.origin.number

    @property
    def rendered(self) -> str | None:
        """The rendered conversation; ``None``: render it anew."""
        parts: list[str] = []
        prompt = self
        while prompt.new_rendered is not None:
            parts.append(prompt.new_rendered)
            if prompt.renders_all or prompt.origin is None:
                return "".join(reversed(parts))
            prompt = prompt.origin.prompt
        return None

    @property
    def messages(self) -> list[Message]:
        """The conversation, with earlier responses as the model wrote them."""
        if self.new_text is not None:
            earlier = [turn.prompt.new_text or "" for turn in self._path()]
            text = "".join([*earlier, self.new_text])
            return [{"role": "user", "content": text}]
        messages: list[Message] = []
        path = self._path()
        prompts = [*(turn.prompt for turn in path[1:]), self]
        for turn, following in zip(path, prompts, strict=bool(path)):
            messages += [*turn.prompt.new_messages, following.said or turn.reply]
        return [*messages, *self.new_messages]

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt."""
        ids: list[int] = []
        for turn in self._path():
            ids += turn.prompt.new_token_ids
            ids += turn.completion.token_ids
        ids += self.new_token_ids
        return ids

    def _path(self) -> list[Turn]:
        """Returns the continued turns, the first turn first."""
        path: list[Turn] = []
        turn = self.origin
        while turn is not None:
            path.append(turn)
            turn = turn.prompt.origin
        return path[::-1]


@dataclass(kw_only=True, eq=False, slots=True)
class Turn:
    """A response of the model, and its prompt."""

    number: int
    """Number of the turn in the session. Numbers ascend, without unseen turns."""
    prompt: Prompt
    """Prompt read by the model."""
    completion: Completion
    """Response of the model: tokens, log-probs and weight versions."""
    text: str
    """Text of the response, without the end of turn from the template."""
    reply: Message
    """The response as a message, with separate tool calls and reasoning."""
    ended: bool
    """Whether the last token ends a turn."""
    model: str = ""
    """The model's name in the request; it selects nothing, and identifies agents."""
    user: str | None = None
    """End user of the request: ``user`` or ``safety_identifier`` of OpenAI's clients,
    ``metadata.user_id`` of Anthropic's."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """``metadata`` of the request."""
    request_id: str | None = None
    """Id of the request: its header ``x-request-id`` or ``x-client-request-id``, or
    generated by the gateway. The answer has it in the headers ``x-request-id`` and
    ``request-id``."""
    reward: float | None = None
    """Reward of this turn alone; ``None``: unset."""
    created: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    name: str = ""
    """Name of the answer, by which clients may retrieve and continue it, if any."""
    answer_name: str = ""
    """Name of the answer, shared with other turns of the same request."""
    request_digest: str = ""
    """Hash of equal requests, including repetitions."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the answer about its request, as JSON."""

    def __post_init__(self) -> None:
        origin = self.prompt.origin
        if origin is not None and self.about:
            # Requests repeat their tools, which are large.
            shared = origin.about
            self.about = {
                key: shared[key] if key in shared and shared[key] == value else value
                for key, value in self.about.items()
            }

    @property
    def branch(self) -> Branch | None:
        """Reason why it begins a branch; ``None`` if it continues the end of a path."""
        return self.prompt.branch

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tools of the request, in OpenAI's form."""
        return self.prompt.setting.tools

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return self.prompt.num_tokens + len(self.completion.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Tokens of prompt and response."""
        return [*self.prompt.token_ids, *self.completion.token_ids]

    @property
    def num_messages(self) -> int:
        """Number of messages up to the response, inclusive."""
        number = 0
        prompt: Prompt | None = self.prompt
        while prompt is not None:
            number += len(prompt.new_messages) + 1
            prompt = None if prompt.origin is None else prompt.origin.prompt
        return number


def go_on(
    turn: Turn,
    messages: Sequence[Message],
    count: int,
    setting: PromptSettings,
    template: ChatTemplate,
    said: Message | None = None,
) -> Prompt | None:
    """Returns a prompt in continuation of a turn; ``None``: the template forbids it.

    Args:
        turn: turn to continue.
        messages: the whole conversation.
        count: number of the turn's messages, its response included.
        setting: tools and template variables.
        template: template of the conversation.
        said: the turn's response as edited by a client; ``None``: unchanged.
    """
    history, done = turn.prompt.messages, turn.completion
    reply = turn.reply if said is None else said
    new_messages = rename_calls(messages[count:], messages[:count], [*history, reply])
    rendered, renders_all = turn.prompt.rendered, False
    if rendered is None:
        rendered, renders_all = template.render(history, setting), True
    end = template.decode(done.token_ids[-1:]) if turn.ended else None
    if said is None:
        text = without_stop(turn.text, done.matched_stop)
    else:
        # Its tokens include a stop string, and an end other than a template's.
        ends = end in template.special
        text = turn.text if ends else template.decode(done.token_ids)
        if not text.strip():
            # An empty text is a prefix of any text.
            return None
    extension = template.extend(
        rendered,
        history,
        ChatResponse(message=reply, text=text, end=end),
        new_messages,
        setting,
        literal=said is not None,
    )
    if extension is None:
        return None
    return Prompt(
        setting=setting,
        new_messages=new_messages,
        new_token_ids=extension.token_ids,
        origin=turn,
        said=said,
        new_rendered=extension.rendered[0 if renders_all else len(rendered) :],
        renders_all=renders_all,
    )
