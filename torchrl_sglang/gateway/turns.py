"""Turns: what the model read and wrote; each may begin with the tokens of another."""

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
    """Messages of a turn as the model reads them.

    It holds what it does not share with the turn that it goes on from, so that a
    session grows with what was said, not with the square of it.
    """

    setting: PromptSettings
    """Tools and template variables."""
    new_messages: Sequence[Message]
    """Messages behind the earlier turn's response; all of them where there is none."""
    new_token_ids: Sequence[int]
    """Tokens behind those of the earlier turn."""
    new_text: str | None = None
    """Instead of messages, for a plain completion: the text behind that turn's prompt,
    which begins with that turn's response."""
    origin: Turn | None = field(default=None, repr=False)
    """The turn whose tokens it begins with."""
    said: Message | None = None
    """Instead of that turn's reply: what the client says that the model said, where the
    template renders it as the model's own tokens, and more behind them."""
    branch: Branch | None = None
    """Why it does not go on from the end of an earlier turn; ``None`` where it does."""
    new_rendered: str | None = field(default=None, repr=False, compare=False)
    """What the template renders behind the earlier turn's prompt; ``None``: unknown."""
    renders_all: bool = field(default=False, repr=False, compare=False)
    """Whether that is the whole conversation, although there is an earlier turn."""
    num_tokens: int = field(init=False)
    """Number of its tokens."""

    def __post_init__(self) -> None:
        before = 0 if self.origin is None else self.origin.num_tokens
        object.__setattr__(self, "new_token_ids", shared_ids(self.new_token_ids))
        object.__setattr__(self, "num_tokens", before + len(self.new_token_ids))
        # Declarations of tools are large, and each request brings its own.
        if self.origin is not None and self.origin.prompt.setting == self.setting:
            object.__setattr__(self, "setting", self.origin.prompt.setting)

    @property
    def parent(self) -> int | None:
        """Number of the turn whose tokens it begins with."""
        return None if self.origin is None else self.origin.number

    @property
    def rendered(self) -> str | None:
        """The conversation as the template renders it; ``None``: render it anew."""
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
        """The conversation; earlier responses are as the model wrote them."""
        if self.new_text is not None:
            before = [turn.prompt.new_text or "" for turn in self._path()]
            text = "".join([*before, self.new_text])
            return [{"role": "user", "content": text}]
        found: list[Message] = []
        path = self._path()
        prompts = [*(turn.prompt for turn in path[1:]), self]
        for turn, following in zip(path, prompts, strict=bool(path)):
            found += [*turn.prompt.new_messages, following.said or turn.reply]
        return [*found, *self.new_messages]

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt."""
        found: list[int] = []
        for turn in self._path():
            found += turn.prompt.new_token_ids
            found += turn.completion.token_ids
        found += self.new_token_ids
        return found

    def _path(self) -> list[Turn]:
        """Returns the turns that it goes on from, the first one first."""
        path: list[Turn] = []
        turn = self.origin
        while turn is not None:
            path.append(turn)
            turn = turn.prompt.origin
        return path[::-1]


@dataclass(kw_only=True, eq=False, slots=True)
class Turn:
    """One response of the model, and its prompt."""

    number: int
    """Number of the turn in the session. Numbers ascend; that of a turn that was never
    seen is left out."""
    prompt: Prompt
    """Prompt that the model read."""
    completion: Completion
    """Response of the model: tokens, log-probs and weight versions."""
    text: str
    """Text of the response, without the end of the turn that the template writes."""
    reply: Message
    """The response as a message, tool calls and reasoning apart."""
    ended: bool
    """Whether the last token ends a turn."""
    model: str = ""
    """The model's name in the request; it selects nothing, and tells agents apart."""
    user: str | None = None
    """For whom the client asked: ``user`` or ``safety_identifier`` of OpenAI's clients,
    ``metadata.user_id`` of Anthropic's."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """``metadata`` of the request."""
    request_id: str | None = None
    """Name of the request: its header ``x-request-id`` or ``x-client-request-id``, or
    one that the gateway gave it. The answer has it in the headers ``x-request-id`` and
    ``request-id``."""
    reward: float | None = None
    """Reward of this turn alone; ``None``: none was set."""
    created: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    name: str = ""
    """Name of the answer, by which clients may ask for it and go on from it, if any."""
    answer_name: str = ""
    """Name of the answer, which other turns of the same request share."""
    request_digest: str = ""
    """What equal requests share; a repetition of the request has it, too."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What that answer says of its request, as JSON."""

    def __post_init__(self) -> None:
        origin = self.prompt.origin
        if origin is not None and self.about:
            # Requests repeat their tools, which are large.
            known = origin.about
            self.about = {
                key: known[key] if key in known and known[key] == value else value
                for key, value in self.about.items()
            }

    @property
    def branch(self) -> Branch | None:
        """Why it begins a branch; ``None`` where it goes on from the end of a path."""
        return self.prompt.branch

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tools that the model was offered, in OpenAI's form."""
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
        """Number of messages up to the response, which is one of them."""
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
    """Returns a prompt that goes on from a turn; ``None`` if the template forbids it.

    Args:
        turn: whose tokens the prompt begins with.
        messages: of the whole conversation.
        count: how many of them are the turn's, its response included.
        setting: tools and template variables.
        template: that renders the conversation.
        said: the turn's response as a client has edited it; ``None``: it has not.
    """
    before, done = turn.prompt.messages, turn.completion
    reply = turn.reply if said is None else said
    after = rename_calls(messages[count:], messages[:count], [*before, reply])
    rendered, renders_all = turn.prompt.rendered, False
    if rendered is None:
        rendered, renders_all = template.render(before, setting), True
    end = template.decode(done.token_ids[-1:]) if turn.ended else None
    if said is None:
        text = without_stop(turn.text, done.matched_stop)
    else:
        # Its tokens have a stop string, and an end that is none to the template.
        ends = end in template.special
        text = turn.text if ends else template.decode(done.token_ids)
        if not text.strip():
            # Anything begins with it.
            return None
    extension = template.extend(
        rendered,
        before,
        ChatResponse(message=reply, text=text, end=end),
        after,
        setting,
        literal=said is not None,
    )
    if extension is None:
        return None
    return Prompt(
        setting=setting,
        new_messages=after,
        new_token_ids=extension.token_ids,
        origin=turn,
        said=said,
        new_rendered=extension.rendered[0 if renders_all else len(rendered) :],
        renders_all=renders_all,
    )
