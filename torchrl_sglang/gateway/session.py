"""Sessions: the prompts and responses of an agent, as a tree of turns."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from torchrl_sglang.chat.declarations import known_settings
from torchrl_sglang.chat.messages import (
    ConversationKeys,
    Message,
    begins_with,
    changes,
    conversation_keys,
    settings_key,
)
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.branches import (
    START,
    Branch,
    Known,
    again,
    forked,
    nearest,
    other_text,
)
from torchrl_sglang.gateway.credit import TrainedRule, every_turn
from torchrl_sglang.gateway.trajectories import Trajectory, find_trajectories
from torchrl_sglang.gateway.turns import Prompt, Turn, go_on
from torchrl_sglang.support.checks import as_reward, check_mapping

EDITED_TURNS = 4
"""Latest turns with a prompt to compare with an edited response."""

COMPARED_TURNS = 8
"""Latest turns to compare with a conversation, for the reason of a branch."""

GROWING_TURNS = 8
"""Latest turns to search first for a conversation, with a fast path."""

NEW_CHARACTERS = 2_000
"""Most characters of new messages for the fast path."""

ALL_CHARACTERS = 16_000
"""Most characters of a conversation for the fast path."""


EarlierTurn: TypeAlias = tuple[Turn, int, Message | None]
"""A turn to continue, its number of messages, and its response if it was edited."""

_number = attrgetter("number")


class RewardTarget(NamedTuple):
    """Target of a reward."""

    kind: str
    """``"session"``, ``"agent"``, ``"branch"`` or ``"turn"``."""
    name: str
    """Name of the agent, or number of the turn; empty for the session."""


class Session:
    """The turns of an agent.

    Args:
        name: name of the session.
        key: API key of the session.
        group: group of sessions for comparison, as in GRPO.

    Attributes:
        reward (float | None): reward of the session as a whole.
        agent_rewards (dict): rewards of agents, by the ``model`` in their requests.
        branch_rewards (dict): rewards of branches, by the number of their first turn.
        metrics (dict): further numbers of the session by name, for logs.
        discount (float): discount of a reward, for each turn before it.
        url (str): base URL for Anthropic's clients; empty while no gateway listens.
        turns (list[Turn]): turns seen by clients, in the order of their numbers.
        expires (float | None): expiry of its key, in seconds since the epoch; ``None``:
            never.
        generating (int): number of turns in generation.
        priority (int | None): priority of its requests in a server's queue.
        is_trained (callable): returns whether a turn is trained; the gateway's
            ``trained``.
        is_dropped (bool): whether the gateway has dropped it; it takes no more turns.
    """

    def __init__(self, name: str, *, key: str = "", group: str | None = None) -> None:
        self.name = name
        self.key = key
        self.url = ""
        self.group = group
        self.reward: float | None = None
        self.agent_rewards: dict[str, float] = {}
        self.branch_rewards: dict[int, float] = {}
        self.metrics: dict[str, float] = {}
        self.discount = 1.0
        self.began(time.time())
        self.expires: float | None = None
        self.turns: list[Turn] = []
        # Turns in the process of keeping, and their continued turns.
        self.pinned: list[Turn] = []
        self.generating = 0
        self.priority: int | None = None
        self.is_dropped = False
        self.is_trained: TrainedRule = every_turn
        self._next = 0
        # By the key of a turn's prompt, and by the key of prompt and response.
        self._begun: dict[bytes, list[Turn]] = {}
        self._ends: dict[bytes, list[Turn]] = {}
        self._answers: dict[str, Turn] = {}
        self._keys: dict[int, tuple[bytes, bytes]] = {}
        # Of the latest turns, by their number.
        self._growing: OrderedDict[int, ConversationKeys] = OrderedDict()

    def __repr__(self) -> str:
        return f"Session({self.name!r}, turns={len(self.turns)}, reward={self.reward})"

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    def began(self, created: float) -> None:
        """Sets the start of the session, in seconds since the epoch.

        Its age grows with a monotonic clock from here on.
        """
        self.created = created
        self._born = time.monotonic() - max(time.time() - created, 0.0)

    @property
    def age(self) -> float:
        """Seconds since the start of the session."""
        return time.monotonic() - self._born

    @property
    def is_expired(self) -> bool:
        """Whether its key has expired."""
        return self.expires is not None and self.age >= self.expires - self.created

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

        It begins with the tokens of the latest turn continued by the conversation;
        without such a turn, or if the template renders it differently now, the whole
        conversation is tokenized. An edited response is continued if the template
        renders it as the response's own tokens, and more tokens after them.

        Raises:
            ConfigurationError: if the template does not accept the conversation.
        """
        setting = known_settings(setting)
        earlier = self._earlier(messages, setting)
        continued = self._continued(earlier, messages, setting, template)
        if continued is not None:
            return continued
        rendered = template.render(messages, setting)
        return Prompt(
            setting=setting,
            new_messages=list(messages),
            new_token_ids=template.encode(rendered),
            new_rendered=rendered,
            branch=self._branch(messages, setting),
        )

    def next_prompt(
        self,
        messages: Sequence[Message],
        setting: PromptSettings,
        template: ChatTemplate,
    ) -> Prompt | None:
        """Returns the result of :meth:`prompt` if it is fast.

        ``None`` if the conversation is long, continues none of the latest turns, or has
        much new content.
        """
        if sum(len(message["content"]) for message in messages) > ALL_CHARACTERS:
            return None
        setting = known_settings(setting)
        latest = self._latest(messages, setting)
        if latest is None:
            return None
        count = latest.num_messages
        if sum(len(m["content"]) for m in messages[count:]) > NEW_CHARACTERS:
            return None
        candidates = self._ended(self._key(latest), messages[:count])
        return self._continued(candidates, messages, setting, template)

    def _continued(
        self,
        earlier: Iterable[EarlierTurn],
        messages: Sequence[Message],
        setting: PromptSettings,
        template: ChatTemplate,
    ) -> Prompt | None:
        """Returns a continuation of the first turn that the template accepts."""
        for turn, count, edited in earlier:
            joined = go_on(turn, messages, count, setting, template, edited)
            if joined is not None:
                branch = self._branch(messages, setting, turn, count)
                return replace(joined, branch=branch)
        return None

    def text_prompt(self, text: str, template: ChatTemplate) -> Prompt:
        """Returns the prompt of a text.

        It begins with the tokens of the turn whose text is its longest prefix.
        """
        origin, start, end = self._longest(text, template)
        remaining = text[end:]
        return Prompt(
            setting=PromptSettings(),
            new_messages=(),
            new_token_ids=template.encode_start(remaining)
            if origin is None
            else template.encode_behind(remaining),
            new_text=text[start:],
            origin=origin,
            branch=self._text_branch(origin, text[start:]),
        )

    def token_prompt(self, token_ids: Sequence[int], template: ChatTemplate) -> Prompt:
        """Returns a prompt of given tokens.

        It continues the turn whose tokens are the longest prefix.
        """
        origin = max(
            (turn for turn in self.turns if _begins_with(token_ids, turn)),
            key=attrgetter("num_tokens"),
            default=None,
        )
        start = 0 if origin is None else origin.prompt.num_tokens
        end = 0 if origin is None else origin.num_tokens
        text = template.decode(token_ids[start:]) if self.name else ""
        return Prompt(
            setting=PromptSettings(),
            new_messages=(),
            new_token_ids=token_ids[end:],
            new_text=text,
            origin=origin,
            branch=self._text_branch(origin, text),
        )

    def _text_branch(self, origin: Turn | None, text: str) -> Branch | None:
        """Returns why a plain completion is a branch; None if it is not."""
        texts = [turn for turn in self.turns if turn.prompt.new_text is not None]
        siblings = [turn for turn in texts if turn.prompt.origin is origin]
        for turn in siblings:
            if turn.prompt.new_text == text:
                return again(turn.number)
        if origin is not None:
            return forked(siblings[-1].number) if siblings else None
        return other_text(texts[-1].number) if texts else START

    def _longest(
        self, text: str, template: ChatTemplate
    ) -> tuple[Turn | None, int, int]:
        """Returns the turn whose text is the longest prefix of a text.

        And the begin and the end of its response in the text.
        """
        starts: dict[int | None, int] = {None: 0}
        longest: tuple[Turn | None, int, int] = None, 0, 0
        for turn in self.turns:
            start, part = starts.get(turn.prompt.parent), turn.prompt.new_text
            if start is None or part is None or not text.startswith(part, start):
                continue
            start = starts[turn.number] = start + len(part)
            response = template.decode(turn.completion.token_ids)
            if text.startswith(response, start) and start + len(response) >= longest[2]:
                longest = turn, start, start + len(response)
        return longest

    def _earlier(
        self, messages: Sequence[Message], setting: PromptSettings
    ) -> Iterator[EarlierTurn]:
        """Yields turns whose messages a conversation begins with, longest first.

        Ties are broken by fewest edits, then by the client's reference, then by
        recency.
        """
        latest = self._latest(messages, setting)
        longest = len(messages)
        if latest is not None:
            # A turn ends in a response, and no response follows this turn's.
            longest = latest.num_messages
            yield from self._ended(self._key(latest), messages[:longest])
        grown = ConversationKeys(_settings_key(setting))
        keys = {count: grown.add(message) for count, message in enumerate(messages, 1)}
        for count in range(longest, 0, -1):
            if latest is None or count < longest:
                yield from self._ended(keys[count], messages[:count])
            response = messages[count - 1]
            if count > 1 and response["role"] == "assistant":
                begun = list(self._begun.get(keys[count - 1], ()))
                for turn in begun[: -EDITED_TURNS - 1 : -1]:
                    prompt = turn.prompt.messages
                    if changes(prompt, messages[: count - 1]) is not None:
                        yield turn, count, response

    def _ended(self, key: bytes, said: Sequence[Message]) -> Iterator[EarlierTurn]:
        """Yields the last turns of a conversation with a key, the likeliest first."""
        candidates = []
        for turn in reversed(list(self._ends.get(key, ()))):
            changed = changes([*turn.prompt.messages, turn.reply], said)
            if changed is not None:
                # If clients reference a turn, a dialect passes the turn's own message.
                candidates.append((changed, turn.reply is not said[-1], turn))
        for _, _, turn in sorted(candidates, key=lambda c: c[:2]):
            yield turn, len(said), None

    def _latest(
        self, messages: Sequence[Message], setting: PromptSettings
    ) -> Turn | None:
        """Returns a recent turn whose response is the last in a conversation.

        Without the keys of all its messages.
        """
        for turn in self.turns[: -GROWING_TURNS - 1 : -1]:
            prompt = turn.prompt
            if prompt.setting is not setting or prompt.new_text is not None:
                continue
            count = turn.num_messages
            if any(message["role"] == "assistant" for message in messages[count:]):
                continue
            if begins_with(messages, [*prompt.messages, turn.reply]):
                return turn
        return None

    def _key(self, turn: Turn) -> bytes:
        """Returns the key of the conversation ended by a turn."""
        # Another thread may have removed it.
        return self._keys.get(turn.number, (b"", b""))[1]

    def _branch(
        self,
        messages: Sequence[Message],
        setting: PromptSettings,
        origin: Turn | None = None,
        count: int = 0,
    ) -> Branch | None:
        """Returns why a conversation is a branch; None if it continues a path's end.

        Its first ``count`` messages are the messages of the turn that it continues.
        """
        if origin is None:
            siblings = [turn for turn in self.turns if turn.prompt.new_text is None]
        else:
            siblings = [turn for turn in self.turns if turn.prompt.origin is origin]
        if not siblings:
            return START if origin is None else None
        settings = setting.key()
        likely = siblings[: -COMPARED_TURNS - 1 : -1]
        for number, key in reversed(list(conversation_keys(messages, settings))):
            if number <= count:
                break
            if matches := [*self._ends.get(key, ()), *self._begun.get(key, ())]:
                likely = [matches[-1], *likely]
                break
        candidates = [
            Known(
                number=turn.number,
                messages=[*turn.prompt.messages, turn.reply],
                same_settings=turn.prompt.setting.key() == settings,
                shared=count,
            )
            for turn in likely
        ]
        return nearest(candidates, messages)

    def next_number(self) -> int:
        """Returns a new number for a turn."""
        self._next += 1
        return self._next - 1

    def turn(self, number: int | str) -> Turn:
        """Returns the turn with a number, or with the id of its request.

        Raises:
            ConfigurationError: if there is none, or more than one.
        """
        if isinstance(number, str):
            turns = [turn for turn in self.turns if turn.request_id == number]
            if len(turns) == 1:
                return turns[0]
            if turns:
                raise ConfigurationError(
                    f"The request {number!r} has {len(turns)} turns; give one of their "
                    f"numbers, {', '.join(str(turn.number) for turn in turns)}."
                )
        elif type(number) is int:
            index = bisect_left(self.turns, number, key=_number)
            for turn in self.turns[index : index + 1]:
                if turn.number == number:
                    return turn
        raise ConfigurationError(
            f"turn={number!r} of session {self.name!r}, which has {len(self.turns)} "
            f"turns" + (f" up to {self.turns[-1].number}." if self.turns else ".")
        )

    def answered(self, name: str) -> Turn | None:
        """Returns the turn of a named answer, if any."""
        return self._answers.get(name)

    def unname(self, turn: Turn) -> None:
        """Removes the name of a turn's answer; the turn remains."""
        self._answers.pop(turn.name, None)
        turn.name = ""

    def answers_to(self, digest: str) -> list[list[Turn]]:
        """Returns the turns of each answer to requests with a digest."""
        answers: dict[str, list[Turn]] = {}
        for turn in self.turns:
            if turn.request_digest == digest:
                answers.setdefault(turn.answer_name, []).append(turn)
        return list(answers.values())

    def is_continued(self, turns: Sequence[Turn]) -> bool:
        """Returns whether another turn continues any of these."""
        return any(turn.prompt.origin in turns for turn in self.turns)

    def __contains__(self, turn: Turn) -> bool:
        index = bisect_left(self.turns, turn.number, key=_number)
        return any(member is turn for member in self.turns[index : index + 1])

    def add(self, turn: Turn) -> None:
        """Keeps a turn."""
        insort(self.turns, turn, key=_number)
        self._next = max(self._next, turn.number + 1)
        if turn.prompt.new_text is None:
            self._keys[turn.number] = keys = self._find_keys(turn)
            for ends, key in zip((self._begun, self._ends), keys, strict=True):
                ends.setdefault(key, []).append(turn)
        if turn.name:
            self._answers[turn.name] = turn

    def remove(self, turn: Turn) -> bool:
        """Removes a turn without continuations; returns whether it did."""
        goes_on = any(other.prompt.origin is turn for other in self.turns)
        if goes_on or turn not in self:
            return False
        self.turns.remove(turn)
        self._answers.pop(turn.name, None)
        if turn.prompt.new_text is None:
            keys = self._keys.pop(turn.number)
            for ends, key in zip((self._begun, self._ends), keys, strict=True):
                ends[key].remove(turn)
        return True

    def _find_keys(self, turn: Turn) -> tuple[bytes, bytes]:
        """Returns the keys of the conversations answered by a turn, and ended."""
        prompt, settings = turn.prompt, _settings_key(turn.prompt.setting)
        origin, new_messages = prompt.origin, prompt.new_messages
        grown = None
        if (
            origin is not None
            and prompt.said is None
            and _settings_key(origin.prompt.setting) == settings
        ):
            grown = self._growing.get(origin.number)
        if grown is None:
            grown, new_messages = ConversationKeys(settings), prompt.messages
        grown = grown.copy()
        for message in new_messages:
            grown.add(message)
        begun = grown.key
        end_key = grown.add(turn.reply)
        self._growing[turn.number] = grown
        while len(self._growing) > GROWING_TURNS:
            self._growing.popitem(last=False)
        return begun, end_key

    @property
    def has_reward(self) -> bool:
        """Whether the session, or any part of it, has a reward."""
        return (
            self.reward is not None
            or bool(self.agent_rewards or self.branch_rewards)
            or any(turn.reward is not None for turn in self.turns)
        )

    def set_reward(
        self,
        reward: float,
        *,
        turn: int | str | None = None,
        agent: str | None = None,
        branch: int | str | None = None,
    ) -> RewardTarget:
        """Sets the reward of the session, or of a part of it; see the gateway's.

        Raises:
            ConfigurationError: if the reward is not finite, or the part does not exist.
        """
        value = as_reward(reward)
        parts = {"turn": turn, "agent": agent, "branch": branch}
        targets = [name for name, part in parts.items() if part is not None]
        if len(targets) > 1:
            raise ConfigurationError(
                f"A reward is of one thing, got {' and '.join(targets)}; set each "
                f"apart."
            )
        if turn is not None:
            target = self.turn(turn)
            target.reward = value
            return RewardTarget("turn", str(target.number))
        if branch is not None:
            number = self.turn(branch).number
            self.branch_rewards[number] = value
            return RewardTarget("branch", str(number))
        if agent is not None:
            self._check_agent(agent)
            self.agent_rewards[agent] = value
            return RewardTarget("agent", agent)
        self.reward = value
        return RewardTarget("session", "")

    def set_metrics(self, metrics: Mapping[str, float]) -> None:
        """Sets numbers of the session by name; see the gateway's.

        Raises:
            ConfigurationError: if a name is no text, or a value is not finite.
        """
        for name, value in check_mapping("metrics", metrics).items():
            if not isinstance(name, str):
                raise ConfigurationError(f"A metric's name is a text, not {name!r}.")
            try:
                self.metrics[name] = as_reward(value)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"The metric {name!r} must be a finite number, got {value!r}."
                ) from error

    def _check_agent(self, agent: Any) -> None:
        models = sorted({turn.model for turn in self.turns})
        if agent not in models:
            raise ConfigurationError(
                f"agent={agent!r} of session {self.name!r}: an agent is known by the "
                f"model that its requests name, and these name "
                f"{', '.join(map(repr, models)) or 'none yet'}."
            )

    def snapshot(self) -> Session:
        """Returns a copy, independent of later turns and rewards."""
        copied = copy(self)
        copied.turns = [replace(turn) for turn in self.turns]
        copied.agent_rewards = dict(self.agent_rewards)
        copied.branch_rewards = dict(self.branch_rewards)
        copied.metrics = dict(self.metrics)
        return copied

    def trajectories(self) -> list[Trajectory]:
        """Returns all paths to trained responses without trained continuations.

        Each trained token is trained in its first path.
        """
        # Other threads may add turns.
        return find_trajectories(
            list(self.turns),
            self.is_trained,
            session=self.name,
            reward=self.reward,
            agent_rewards=self.agent_rewards,
            branch_rewards=self.branch_rewards,
            discount=self.discount,
        )


def _settings_key(setting: PromptSettings) -> bytes:
    return setting.digest or settings_key(setting.key())


def _begins_with(token_ids: Sequence[int], turn: Turn) -> bool:
    """Returns whether tokens begin with a turn's, and go on."""
    end, response = turn.num_tokens, turn.completion.token_ids
    if end >= len(token_ids) or token_ids[end - len(response) : end] != response:
        return False
    return token_ids[:end] == turn.token_ids
