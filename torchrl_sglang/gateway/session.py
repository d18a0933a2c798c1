"""Sessions: what one agent read and wrote, as a tree of turns."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchrl_sglang.chat.messages import (
    Message,
    changes,
    conversation_keys,
    rename_calls,
    without_stop,
)
from torchrl_sglang.chat.rendered import ChatResponse
from torchrl_sglang.chat.template import ChatTemplate, PromptSettings
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import Completion

RENDERED_TURNS = 8
"""Latest turns whose conversations are kept as texts."""


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
    rendered: str | None = field(default=None, repr=False, compare=False)
    """The conversation as the template renders it; ``None``: render it anew."""
    num_tokens: int = field(init=False)
    """Number of its tokens."""

    def __post_init__(self) -> None:
        before = 0 if self.origin is None else self.origin.num_tokens
        object.__setattr__(self, "num_tokens", before + len(self.new_token_ids))
        # Declarations of tools are large, and each request brings its own.
        if self.origin is not None and self.origin.prompt.setting == self.setting:
            object.__setattr__(self, "setting", self.origin.prompt.setting)

    @property
    def parent(self) -> int | None:
        """Number of the turn whose tokens it begins with."""
        return None if self.origin is None else self.origin.number

    @property
    def messages(self) -> list[Message]:
        """The conversation; earlier responses are as the model wrote them."""
        if self.new_text is not None:
            before = [turn.prompt.new_text or "" for turn in self._path()]
            text = "".join([*before, self.new_text])
            return [{"role": "user", "content": text}]
        found: list[Message] = []
        for turn in self._path():
            found += [*turn.prompt.new_messages, turn.reply]
        return [*found, *self.new_messages]

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt."""
        found: list[int] = []
        for turn in self._path():
            found += turn.prompt.new_token_ids
            found += turn.completion.token_ids
        return [*found, *self.new_token_ids]

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
    """Text of the response, without the token that ends a turn."""
    reply: Message
    """The response as a message, tool calls and reasoning apart."""
    ended: bool
    """Whether the last token ends a turn."""
    reward: float | None = None
    """Reward of this turn alone; ``None``: none was set."""
    created: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return self.prompt.num_tokens + len(self.completion.token_ids)

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
    """Turns, each of which begins with the tokens of the one before."""
    trained: Sequence[bool]
    """True for each turn of no earlier trajectory: only these are to be trained on."""
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
            yield turn, trained, turn.prompt.num_tokens, turn.num_tokens


class Session:
    """The turns of one agent.

    Args:
        name: identifies the session.
        key: API key that selects and opens it.
        group: sessions of a group are compared with each other, as in GRPO.

    Attributes:
        reward (float | None): of the session as a whole.
        url (str): base URL for Anthropic's clients; empty while no gateway listens.
        turns (list[Turn]): what clients have seen, in the order of their numbers.
        generating (int): turns that are generated now.
        is_dropped (bool): whether the gateway has forgotten it; it takes no more turns.
    """

    def __init__(self, name: str, *, key: str = "", group: str | None = None) -> None:
        self.name = name
        self.key = key
        self.url = ""
        self.group = group
        self.reward: float | None = None
        self.created = time.time()
        self.turns: list[Turn] = []
        # Turns that are being kept, and the turns that they go on from.
        self.pinned: list[Turn] = []
        self.generating = 0
        self.is_dropped = False
        self._next = 0
        self._ends: dict[bytes, list[Turn]] = {}

    def __repr__(self) -> str:
        return f"Session({self.name!r}, turns={len(self.turns)}, reward={self.reward})"

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def age(self) -> float:
        """Seconds since the session began."""
        return time.time() - self.created

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    def prompt(
        self,
        messages: Sequence[Message],
        setting: PromptSettings,
        template: ChatTemplate,
    ) -> Prompt:
        """Returns the prompt of a conversation.

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
            setting=setting,
            new_messages=list(messages),
            new_token_ids=template.encode(rendered),
            rendered=rendered,
        )

    def text_prompt(self, text: str, template: ChatTemplate) -> Prompt:
        """Returns the prompt of a text.

        It begins with the tokens of the turn with the longest text that it begins with.
        """
        origin, start, end = self._longest(text, template)
        rest = text[end:]
        return Prompt(
            setting=PromptSettings(),
            new_messages=(),
            new_token_ids=template.encode_start(rest)
            if origin is None
            else template.encode_behind(rest),
            new_text=text[start:],
            origin=origin,
        )

    def _longest(
        self, text: str, template: ChatTemplate
    ) -> tuple[Turn | None, int, int]:
        """Returns the turn with the longest text that a text begins with.

        And where that turn's response begins and ends in it.
        """
        starts: dict[int | None, int] = {None: 0}
        found: tuple[Turn | None, int, int] = None, 0, 0
        for turn in self.turns:
            start, own = starts.get(turn.prompt.parent), turn.prompt.new_text
            if start is None or own is None or not text.startswith(own, start):
                continue
            start = starts[turn.number] = start + len(own)
            response = template.decode(turn.completion.token_ids)
            if text.startswith(response, start) and start + len(response) >= found[2]:
                found = turn, start, start + len(response)
        return found

    def _earlier(
        self, messages: Sequence[Message], setting: PromptSettings
    ) -> Iterator[tuple[Turn, int]]:
        """Yields turns that a conversation begins with, and their messages; last first.

        Ties are broken by fewest client edits, then by recency.
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

    def next_number(self) -> int:
        """Returns a number that no turn has had."""
        self._next += 1
        return self._next - 1

    def turn(self, number: int) -> Turn:
        """Returns the turn with a number.

        Raises:
            ConfigurationError: if there is none.
        """
        if type(number) is int:
            index = bisect_left(self.turns, number, key=_number)
            for turn in self.turns[index : index + 1]:
                if turn.number == number:
                    return turn
        raise ConfigurationError(
            f"turn={number!r} of session {self.name!r}, which has {len(self.turns)} "
            f"turns" + (f" up to {self.turns[-1].number}." if self.turns else ".")
        )

    def __contains__(self, turn: Turn) -> bool:
        index = bisect_left(self.turns, turn.number, key=_number)
        return any(each is turn for each in self.turns[index : index + 1])

    def add(self, turn: Turn) -> None:
        """Keeps a turn."""
        insort(self.turns, turn, key=_number)
        self._next = max(self._next, turn.number + 1)
        if len(self.turns) > RENDERED_TURNS:
            # Texts of all turns would grow with the square of their number.
            old = self.turns[-RENDERED_TURNS - 1]
            old.prompt = replace(old.prompt, rendered=None)
        if turn.prompt.new_text is None:
            self._ends.setdefault(_end(turn), []).append(turn)

    def remove(self, turn: Turn) -> bool:
        """Forgets a turn that nothing goes on from, and returns whether it did."""
        goes_on = any(each.prompt.origin is turn for each in self.turns)
        if goes_on or turn not in self:
            return False
        self.turns.remove(turn)
        if turn.prompt.new_text is None:
            self._ends[_end(turn)].remove(turn)
        return True

    def set_reward(self, reward: float, *, turn: int | None = None) -> None:
        """Sets the reward of the session, or of one turn.

        Raises:
            ConfigurationError: if the reward is not finite, or there is no such turn.
        """
        value = as_reward(reward)
        if turn is None:
            self.reward = value
        else:
            self.turn(turn).reward = value

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
        turns = {turn.number: turn for turn in list(self.turns)}
        inner = {turn.prompt.parent for turn in turns.values()}
        seen: set[int] = set()
        found = []
        for leaf in turns.values():
            if leaf.number in inner:
                continue
            path = [leaf]
            while (parent := path[-1].prompt.parent) is not None:
                path.append(turns[parent])
            path.reverse()
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


def _number(turn: Turn) -> int:
    return turn.number


def _end(turn: Turn) -> bytes:
    """Returns the key of the conversation that a turn ends."""
    said = [*turn.prompt.messages, turn.reply]
    *_, (_, key) = conversation_keys(said, turn.prompt.setting.key())
    return key


MOST_REWARD = torch.finfo(torch.float32).max
"""Rows hold rewards as float32, in which more is infinite."""


def as_reward(value: Any) -> float:
    """Returns a reward as a float; numbers of NumPy and torch are rewards, too.

    Raises:
        ConfigurationError: if the reward is not a finite number of float32.
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
    setting: PromptSettings,
    template: ChatTemplate,
) -> Prompt | None:
    """Returns a prompt that goes on from a turn, if the template allows it."""
    before, done = turn.prompt.messages, turn.completion
    after = rename_calls(messages[count:], messages[:count], [*before, turn.reply])
    rendered = turn.prompt.rendered
    if rendered is None:
        rendered = template.render(before, setting)
    response = ChatResponse(
        message=turn.reply,
        text=without_stop(turn.text, done.matched_stop),
        end=template.decode(done.token_ids[-1:]) if turn.ended else None,
    )
    extension = template.extend(rendered, before, response, after, setting)
    if extension is None:
        return None
    return Prompt(
        setting=setting,
        new_messages=after,
        new_token_ids=extension.token_ids,
        origin=turn,
        rendered=extension.rendered,
    )
