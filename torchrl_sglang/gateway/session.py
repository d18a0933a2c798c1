"""Sessions: what one agent read and wrote, as a tree of turns."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.messages import (
    Message,
    changes,
    conversation_keys,
    rename_calls,
    without_stop,
)
from torchrl_sglang.gateway.rendered import Response
from torchrl_sglang.gateway.template import ChatTemplate, Setting
from torchrl_sglang.types import Completion

RENDERED_TURNS = 8
"""Latest turns whose conversations are kept as texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What the model reads in a turn."""

    messages: Sequence[Message]
    """The conversation; earlier responses are as the model wrote them."""
    setting: Setting
    """What else it depends on."""
    token_ids: list[int]
    """Its tokens."""
    text: str | None = None
    """Instead of messages: the prompt of a plain completion."""
    parent: int | None = None
    """Number of the turn whose tokens it begins with."""
    rendered: str | None = field(default=None, repr=False, compare=False)
    """The conversation as the template renders it; ``None``: render it anew."""


@dataclass(kw_only=True, eq=False, slots=True)
class Turn:
    """One response, and what it responded to."""

    number: int
    """Position in the session."""
    prompt: Prompt
    """What the model read."""
    completion: Completion
    """What it wrote: tokens, log-probs and weight versions."""
    text: str
    """The same as a text, without the token that ends a turn."""
    reply: Message
    """The same as a message, tool calls and reasoning apart."""
    ended: bool
    """Whether its last token ends a turn."""
    reward: float | None = None
    """Its own reward; ``None``: none was set."""
    created: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def token_ids(self) -> list[int]:
        """Tokens of prompt and response."""
        return [*self.prompt.token_ids, *self.completion.token_ids]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A path through a session, from a first prompt to a last response."""

    session: str
    """Name of the session."""
    turns: Sequence[Turn]
    """Its turns, each of which begins with the tokens of the one before."""
    trained: Sequence[bool]
    """Which of them no earlier trajectory has: only these are to be trained on."""
    reward: float | None
    """Rewards of these turns and of the session; ``None``: none was set."""

    @property
    def token_ids(self) -> list[int]:
        """All tokens."""
        return self.turns[-1].token_ids

    @property
    def messages(self) -> list[Message]:
        """All messages."""
        last = self.turns[-1]
        return [*last.prompt.messages, last.reply]

    def spans(self) -> Iterator[tuple[Turn, bool, int, int]]:
        """Yields each turn, whether it is trained, and where its response lies."""
        for turn, trained in zip(self.turns, self.trained, strict=True):
            start = len(turn.prompt.token_ids)
            yield turn, trained, start, start + len(turn.completion.token_ids)


class Session:
    """The turns of one agent.

    Args:
        name: identifies the session.
        key: API key that selects and opens it.
        group: sessions of a group are compared with each other, as in GRPO.

    Attributes:
        reward (float | None): of the session as a whole.
        url (str): base URL for Anthropic's clients; empty while no gateway listens.
        generating (int): turns that are generated now.
    """

    def __init__(self, name: str, *, key: str = "", group: str | None = None) -> None:
        self.name = name
        self.key = key
        self.url = ""
        self.group = group
        self.reward: float | None = None
        self.created = time.time()
        self.turns: list[Turn] = []
        self.generating = 0
        self._ends: dict[bytes, list[Turn]] = {}

    def __repr__(self) -> str:
        return f"Session({self.name!r}, turns={len(self.turns)}, reward={self.reward})"

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.time() - self.created

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    def prompt(
        self, messages: Sequence[Message], setting: Setting, template: ChatTemplate
    ) -> Prompt:
        """Returns what the model is to read for a conversation.

        It begins with the tokens of the latest turn that the conversation goes on from;
        where there is none, or the template renders that turn in another way now, the
        whole conversation is tokenized.

        Raises:
            ConfigurationError: if the template does not take the conversation.
        """
        for turn, count in self._earlier(messages, setting):
            joined = _join(turn, messages, count, setting, template)
            if joined is not None:
                return joined
        rendered = template.render(messages, setting)
        return Prompt(
            messages=list(messages),
            setting=setting,
            token_ids=template.encode(rendered),
            rendered=rendered,
        )

    def text_prompt(self, text: str, template: ChatTemplate) -> Prompt:
        """Returns what the model is to read for a text.

        It begins with the tokens of the turn with the longest text that it begins with.
        """
        parent, known = None, ""
        for turn in self.turns:
            before = turn.prompt.text
            if before is None or not text.startswith(before):
                continue
            whole = before + template.decode(turn.completion.token_ids)
            if text.startswith(whole) and len(whole) >= len(known):
                parent, known = turn, whole
        if parent is None:
            ids = template.encode_start(text)
        else:
            rest = text[len(known) :]
            ids = [*parent.token_ids, *template.encode_behind(rest)]
        return Prompt(
            messages=[{"role": "user", "content": text}],
            setting=Setting(),
            token_ids=ids,
            text=text,
            parent=None if parent is None else parent.number,
        )

    def _earlier(
        self, messages: Sequence[Message], setting: Setting
    ) -> Iterator[tuple[Turn, int]]:
        """Yields turns that a conversation begins with, and their messages; last first.

        Among equal ones that which the client changed least, and then the latest.
        """
        keys = list(conversation_keys(messages, setting.key()))
        for count, key in reversed(keys):
            found = []
            for turn in reversed(self._ends.get(key, ())):
                known = [*turn.prompt.messages, turn.reply]
                changed = changes(known, messages[:count])
                if changed is not None:
                    found.append((changed, turn))
            for _, turn in sorted(found, key=lambda each: each[0]):
                yield turn, count

    def add(self, turn: Turn) -> None:
        """Keeps a turn."""
        self.turns.append(turn)
        if len(self.turns) > RENDERED_TURNS:
            # Texts of all turns would grow with the square of their number.
            old = self.turns[-RENDERED_TURNS - 1]
            old.prompt = replace(old.prompt, rendered=None)
        if turn.prompt.text is None:
            *_, (_, key) = conversation_keys(
                [*turn.prompt.messages, turn.reply], turn.prompt.setting.key()
            )
            self._ends.setdefault(key, []).append(turn)

    def set_reward(self, reward: float, *, turn: int | None = None) -> None:
        """Sets the reward of the session, or of one turn.

        Raises:
            ConfigurationError: if it is no finite number, or there is no such turn.
        """
        value = as_reward(reward)
        if turn is None:
            self.reward = value
        elif type(turn) is int and 0 <= turn < len(self.turns):
            self.turns[turn].reward = value
        else:
            raise ConfigurationError(
                f"turn={turn} of session {self.name!r}, which has {len(self.turns)} "
                f"turns."
            )

    def snapshot(self) -> Session:
        """Returns a copy that later turns and rewards of this session do not change."""
        copied = copy(self)
        copied.turns = [replace(turn) for turn in self.turns]
        return copied

    def trajectories(self) -> list[Trajectory]:
        """Returns all paths to responses that no other turn goes on from.

        Each generated token is trained in one of them: in the first that has it.
        """
        # Others may add turns meanwhile.
        turns = list(self.turns)
        inner = {turn.prompt.parent for turn in turns}
        seen: set[int] = set()
        found = []
        for leaf in turns:
            if leaf.number in inner:
                continue
            path = self._path(leaf)
            trained = [turn.number not in seen for turn in path]
            seen.update(turn.number for turn in path)
            rewards = [self.reward, *(turn.reward for turn in path)]
            known = [reward for reward in rewards if reward is not None]
            found.append(
                Trajectory(
                    session=self.name,
                    turns=path,
                    trained=trained,
                    reward=sum(known) if known else None,
                )
            )
        return found

    def _path(self, turn: Turn) -> list[Turn]:
        path = [turn]
        while (parent := path[-1].prompt.parent) is not None:
            path.append(self.turns[parent])
        return path[::-1]


MOST_REWARD = torch.finfo(torch.float32).max
"""Rows hold rewards as float32, in which more is infinite."""


def as_reward(value: Any) -> float:
    """Returns a reward as a float; numbers of NumPy and torch are rewards, too.

    Raises:
        ConfigurationError: if it is no finite number of float32.
    """
    try:
        reward = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # noqa: BLE001 - A user's type raises anything.
        reward = math.nan
    if not abs(reward) <= MOST_REWARD:
        raise ConfigurationError(f"reward={value!r} must be a finite number.")
    return reward


def _join(
    turn: Turn,
    messages: Sequence[Message],
    count: int,
    setting: Setting,
    template: ChatTemplate,
) -> Prompt | None:
    """Returns a prompt that goes on from a turn, if the template allows it."""
    before, done = turn.prompt.messages, turn.completion
    after = rename_calls(messages[count:], messages[:count], [*before, turn.reply])
    rendered = turn.prompt.rendered
    if rendered is None:
        rendered = template.render(before, setting)
    response = Response(
        message=turn.reply,
        text=without_stop(turn.text, done.matched_stop),
        end=template.decode(done.token_ids[-1:]) if turn.ended else None,
    )
    extension = template.extend(rendered, before, response, after, setting)
    if extension is None:
        return None
    return Prompt(
        messages=[*before, turn.reply, *after],
        setting=setting,
        token_ids=[*turn.prompt.token_ids, *done.token_ids, *extension.token_ids],
        parent=turn.number,
        rendered=extension.rendered,
    )
