"""Sessions: what one agent read and wrote, as a tree of turns."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from torchrl_sglang.chat.declarations import known_settings
from torchrl_sglang.chat.messages import (
    ConversationKeys,
    Message,
    begins_with,
    changes,
    conversation_keys,
    rename_calls,
    settings_key,
    without_stop,
)
from torchrl_sglang.chat.pieces import shared_ids
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.chat.rendered import ChatResponse
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
from torchrl_sglang.gateway.credit import TrainedRule, discounted, every_turn
from torchrl_sglang.types import Completion

EDITED_TURNS = 4
"""Latest turns with a prompt that an edited response is compared with."""

COMPARED_TURNS = 8
"""Latest turns that a conversation is compared with, to say why it is a branch."""

GROWING_TURNS = 8
"""Latest turns that a conversation is first looked for in, and goes on from fast."""

NEW_CHARACTERS = 2_000
"""Most characters of new messages that are tokenized in a moment."""

ALL_CHARACTERS = 16_000
"""Most characters of a conversation that is rendered in a moment."""


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
    """Text of the response, without the token that ends a turn."""
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


class RewardTarget(NamedTuple):
    """What a reward is of."""

    kind: str
    """``"session"``, ``"agent"``, ``"branch"`` or ``"turn"``."""
    name: str
    """Name of the agent, or number of the turn; empty for the session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A path through a session, from a first prompt to a last response."""

    session: str
    """Name of the session."""
    turns: Sequence[Turn]
    """Turns, each of which begins with the tokens of the one before."""
    trained: Sequence[bool]
    """True for each turn that the gateway's rule selects, and that is of no earlier
    trajectory: only these are to be trained on."""
    rewards: Sequence[float]
    """Reward that stands at each turn: its own; at the last one, those of the session
    and of branches on the path, too; at the last one of an agent, that agent's."""
    discount: float = 1.0
    """Factor of a reward for each turn before it."""
    has_reward: bool = True
    """Whether a reward was set; otherwise all are 0."""

    @property
    def returns(self) -> list[float]:
        """Return of each turn, see :func:`.discounted`."""
        return discounted(self.rewards, self.discount)

    @property
    def reward(self) -> float | None:
        """Return of the first turn; ``None``: no reward was set."""
        return self.returns[0] if self.has_reward else None

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
        agent_rewards (dict): rewards of agents, by the ``model`` that they name.
        branch_rewards (dict): rewards of branches, by the number of their first turn.
        discount (float): of a reward, for each turn before it.
        url (str): base URL for Anthropic's clients; empty while no gateway listens.
        turns (list[Turn]): what clients have seen, in the order of their numbers.
        expires (float | None): seconds since the epoch at which its key opens it no
            more; ``None``: never.
        generating (int): turns that are generated now.
        priority (int | None): of its requests in a server's queue.
        is_trained (callable): says of a turn whether it is trained; the gateway's
            ``trained``.
        is_dropped (bool): whether the gateway has forgotten it; it takes no more turns.
    """

    def __init__(self, name: str, *, key: str = "", group: str | None = None) -> None:
        self.name = name
        self.key = key
        self.url = ""
        self.group = group
        self.reward: float | None = None
        self.agent_rewards: dict[str, float] = {}
        self.branch_rewards: dict[int, float] = {}
        self.discount = 1.0
        self.created = time.time()
        self.expires: float | None = None
        self.turns: list[Turn] = []
        # Turns that are being kept, and the turns that they go on from.
        self.pinned: list[Turn] = []
        self.generating = 0
        self.priority: int | None = None
        self.is_dropped = False
        self.is_trained: TrainedRule = every_turn
        self._next = 0
        # By the key of a turn's prompt, and by that of the prompt and the response.
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
        whole conversation is tokenized. A response that the client has edited is gone
        on from if the template renders what it says as the response's own tokens, and
        more behind them.

        Raises:
            ConfigurationError: if the template does not take the conversation.
        """
        setting = known_settings(setting)
        for turn, count, said in self._earlier(messages, setting):
            joined = _join(turn, messages, count, setting, template, said)
            if joined is not None:
                branch = self._forked(turn, messages, count, setting)
                return joined if branch is None else replace(joined, branch=branch)
        rendered = template.render(messages, setting)
        return Prompt(
            setting=setting,
            new_messages=list(messages),
            new_token_ids=template.encode(rendered),
            new_rendered=rendered,
            branch=self._apart(messages, setting),
        )

    def next_prompt(
        self,
        messages: Sequence[Message],
        setting: PromptSettings,
        template: ChatTemplate,
    ) -> Prompt | None:
        """Returns what :meth:`prompt` does, if that takes a moment only.

        ``None`` if the conversation is long, goes on from none of the latest turns, or
        brings much that is new.
        """
        if sum(len(each["content"]) for each in messages) > ALL_CHARACTERS:
            return None
        setting = known_settings(setting)
        latest = self._latest(messages, setting)
        if latest is None:
            return None
        count = _count(latest)
        if sum(len(each["content"]) for each in messages[count:]) > NEW_CHARACTERS:
            return None
        for turn in self._ended(self._key(latest), messages[:count]):
            joined = _join(turn, messages, count, setting, template)
            if joined is not None:
                branch = self._forked(turn, messages, count, setting)
                return joined if branch is None else replace(joined, branch=branch)
        return None

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
            branch=self._text_branch(origin, text[start:]),
        )

    def _text_branch(self, origin: Turn | None, text: str) -> Branch | None:
        """Returns why a plain completion is a branch; None if it is not."""
        texts = [turn for turn in self.turns if turn.prompt.new_text is not None]
        others = [turn for turn in texts if turn.prompt.origin is origin]
        for turn in others:
            if turn.prompt.new_text == text:
                return again(turn.number)
        if origin is not None:
            return forked(others[-1].number) if others else None
        return other_text(texts[-1].number) if texts else START

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
    ) -> Iterator[tuple[Turn, int, Message | None]]:
        """Yields turns that a conversation begins with, and their messages; last first.

        And the response as the client says it, if it has edited that. Ties are broken
        by fewest client edits, then by what the client names, then by recency.
        """
        latest = self._latest(messages, setting)
        longest = len(messages)
        if latest is not None:
            # All turns end in a response, and there is none behind this one's.
            longest = _count(latest)
            for turn in self._ended(self._key(latest), messages[:longest]):
                yield turn, longest, None
        grown = ConversationKeys(_settings_key(setting))
        keys = {count: grown.add(each) for count, each in enumerate(messages, 1)}
        for count in range(longest, 0, -1):
            if latest is None or count < longest:
                for turn in self._ended(keys[count], messages[:count]):
                    yield turn, count, None
            said = messages[count - 1]
            if count > 1 and said["role"] == "assistant":
                begun = list(self._begun.get(keys[count - 1], ()))
                for turn in begun[: -EDITED_TURNS - 1 : -1]:
                    known = turn.prompt.messages
                    if changes(known, messages[: count - 1]) is not None:
                        yield turn, count, said

    def _ended(self, key: bytes, said: Sequence[Message]) -> list[Turn]:
        """Returns the turns that end a conversation with a key, the likeliest first.

        Those of which the client has changed fewest messages, then the one that it
        names, then the latest.
        """
        found = []
        for turn in reversed(list(self._ends.get(key, ()))):
            changed = changes([*turn.prompt.messages, turn.reply], said)
            if changed is not None:
                # Where clients name a turn, a dialect hands in that turn's own message.
                found.append((changed, turn.reply is not said[-1], turn))
        return [turn for _, _, turn in sorted(found, key=lambda each: each[:2])]

    def _latest(
        self, messages: Sequence[Message], setting: PromptSettings
    ) -> Turn | None:
        """Returns one of the latest turns whose response is the last of a conversation.

        Found without the keys of all its messages.
        """
        for turn in self.turns[: -GROWING_TURNS - 1 : -1]:
            prompt = turn.prompt
            if prompt.setting is not setting or prompt.new_text is not None:
                continue
            count = _count(turn)
            if any(each["role"] == "assistant" for each in messages[count:]):
                continue
            if begins_with(messages, [*prompt.messages, turn.reply]):
                return turn
        return None

    def _key(self, turn: Turn) -> bytes:
        """Returns the key of the conversation that a turn ends."""
        # Another thread may have removed it.
        return self._keys.get(turn.number, (b"", b""))[1]

    def _forked(
        self,
        turn: Turn,
        messages: Sequence[Message],
        count: int,
        setting: PromptSettings,
    ) -> Branch | None:
        """Returns why a conversation is a branch; None if it is the first from a turn.

        ``count`` of its messages are those of the turn.
        """
        others = [each for each in self.turns if each.prompt.origin is turn]
        return self._why(others, messages, setting, count) if others else None

    def _apart(self, messages: Sequence[Message], setting: PromptSettings) -> Branch:
        """Returns why a conversation goes on from no turn."""
        chats = [turn for turn in self.turns if turn.prompt.new_text is None]
        return self._why(chats, messages, setting) if chats else START

    def _why(
        self,
        turns: Sequence[Turn],
        messages: Sequence[Message],
        setting: PromptSettings,
        count: int = 0,
    ) -> Branch:
        """Returns why a conversation goes on from none of these turns."""
        own = setting.key()
        likely = turns[: -COMPARED_TURNS - 1 : -1]
        for number, key in reversed(list(conversation_keys(messages, own))):
            if number <= count:
                break
            if found := [*self._ends.get(key, ()), *self._begun.get(key, ())]:
                likely = [found[-1], *likely]
                break
        known = [
            Known(
                number=turn.number,
                messages=[*turn.prompt.messages, turn.reply],
                same_settings=turn.prompt.setting.key() == own,
                shared=count,
            )
            for turn in likely
        ]
        return nearest(known, messages)

    def next_number(self) -> int:
        """Returns a number that no turn has had."""
        self._next += 1
        return self._next - 1

    def turn(self, number: int | str) -> Turn:
        """Returns the turn with a number, or whose request has a name.

        Raises:
            ConfigurationError: if there is none, or more than one.
        """
        if isinstance(number, str):
            found = [each for each in self.turns if each.request_id == number]
            if len(found) == 1:
                return found[0]
            if found:
                raise ConfigurationError(
                    f"The request {number!r} has {len(found)} turns; give one of their "
                    f"numbers, {', '.join(str(turn.number) for turn in found)}."
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
        """Returns the turn whose answer has a name, if there is one."""
        return self._answers.get(name)

    def unname(self, turn: Turn) -> None:
        """Forgets the name of a turn's answer; the turn stays."""
        self._answers.pop(turn.name, None)
        turn.name = ""

    def __contains__(self, turn: Turn) -> bool:
        index = bisect_left(self.turns, turn.number, key=_number)
        return any(each is turn for each in self.turns[index : index + 1])

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
        """Forgets a turn that nothing goes on from, and returns whether it did."""
        goes_on = any(each.prompt.origin is turn for each in self.turns)
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
        """Returns the keys of the conversations that a turn answers, and ends."""
        prompt, own = turn.prompt, _settings_key(turn.prompt.setting)
        origin, said = prompt.origin, prompt.new_messages
        grown = None
        if (
            origin is not None
            and prompt.said is None
            and _settings_key(origin.prompt.setting) == own
        ):
            grown = self._growing.get(origin.number)
        if grown is None:
            grown, said = ConversationKeys(own), prompt.messages
        grown = grown.copy()
        for message in said:
            grown.add(message)
        begun = grown.key
        ended = grown.add(turn.reply)
        self._growing[turn.number] = grown
        while len(self._growing) > GROWING_TURNS:
            self._growing.popitem(last=False)
        return begun, ended

    @property
    def has_reward(self) -> bool:
        """Whether a reward was set, of the session or of any part of it."""
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
            ConfigurationError: if the reward is not finite, or there is no such part.
        """
        value = as_reward(reward)
        parts = {"turn": turn, "agent": agent, "branch": branch}
        given = [name for name, part in parts.items() if part is not None]
        if len(given) > 1:
            raise ConfigurationError(
                f"A reward is of one thing, got {' and '.join(given)}; set each apart."
            )
        if turn is not None:
            found = self.turn(turn)
            found.reward = value
            return RewardTarget("turn", str(found.number))
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

    def _check_agent(self, agent: Any) -> None:
        models = sorted({turn.model for turn in self.turns})
        if agent not in models:
            raise ConfigurationError(
                f"agent={agent!r} of session {self.name!r}: an agent is known by the "
                f"model that its requests name, and these name "
                f"{', '.join(map(repr, models)) or 'none yet'}."
            )

    def snapshot(self) -> Session:
        """Returns a copy that later turns and rewards of this session do not change."""
        copied = copy(self)
        copied.turns = [replace(turn) for turn in self.turns]
        copied.agent_rewards = dict(self.agent_rewards)
        copied.branch_rewards = dict(self.branch_rewards)
        return copied

    def trajectories(self) -> list[Trajectory]:
        """Returns all paths to trained responses that no other one goes on from.

        Each trained token is trained in one of them: in the first that has it.
        """
        # Others may add turns meanwhile.
        turns = {turn.number: turn for turn in list(self.turns)}
        chosen = {number for number, turn in turns.items() if self.is_trained(turn)}
        inner = _before(turns, chosen)
        own = _own_rewards(turns, chosen | inner)
        seen: set[int] = set()
        found = []
        for leaf in turns.values():
            if leaf.number in inner or leaf.number not in chosen:
                continue
            path = [leaf]
            while (parent := path[-1].prompt.parent) is not None:
                path.append(turns[parent])
            path.reverse()
            fresh = chosen - seen
            trained = [turn.number in fresh for turn in path]
            seen.update(turn.number for turn in path)
            placed = self._placed(path, own)
            found.append(
                Trajectory(
                    session=self.name,
                    turns=path,
                    trained=trained,
                    rewards=[sum(each) for each in placed],
                    discount=self.discount,
                    has_reward=any(placed),
                )
            )
        return found

    def _placed(
        self, path: Sequence[Turn], own: Mapping[int, Sequence[float]]
    ) -> list[list[float]]:
        """Returns the rewards that stand at each turn of a path."""
        placed = [list(own.get(turn.number, ())) for turn in path]
        if self.reward is not None:
            placed[-1].append(self.reward)
        for turn in path:
            if turn.number in self.branch_rewards:
                placed[-1].append(self.branch_rewards[turn.number])
        last = {turn.model: index for index, turn in enumerate(path)}
        for agent, reward in self.agent_rewards.items():
            if agent in last:
                placed[last[agent]].append(reward)
        return placed


def _before(turns: Mapping[int, Turn], chosen: Set[int]) -> set[int]:
    """Returns the numbers of the turns that chosen ones go on from."""
    found: set[int] = set()
    # A turn has a greater number than those before it.
    for number in sorted(turns, reverse=True):
        parent = turns[number].prompt.parent
        if parent is not None and (number in chosen or number in found):
            found.add(parent)
    return found


def _own_rewards(turns: Mapping[int, Turn], kept: Set[int]) -> dict[int, list[float]]:
    """Returns the rewards of turns alone, by number.

    That of a turn of no path is its parent's: what follows a turn is to its credit.
    """
    found: dict[int, list[float]] = {}
    for number in sorted(turns, reverse=True):
        turn = turns[number]
        if turn.reward is not None:
            found.setdefault(number, []).append(turn.reward)
        parent = turn.prompt.parent
        if number in found and number not in kept and parent is not None:
            found.setdefault(parent, []).extend(found.pop(number))
    return found


def _number(turn: Turn) -> int:
    return turn.number


def _count(turn: Turn) -> int:
    """Returns the number of messages up to a turn's response."""
    number = 0
    prompt: Prompt | None = turn.prompt
    while prompt is not None:
        number += len(prompt.new_messages) + 1
        prompt = None if prompt.origin is None else prompt.origin.prompt
    return number


def _settings_key(setting: PromptSettings) -> bytes:
    return setting.digest or settings_key(setting.key())


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
    said: Message | None = None,
) -> Prompt | None:
    """Returns a prompt that goes on from a turn, if the template allows it.

    ``said`` is the turn's response as a client has edited it.
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
