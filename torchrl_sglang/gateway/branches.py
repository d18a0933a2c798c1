"""Reasons for a turn without an earlier turn, or with a branch from a shared turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchrl_sglang.chat.messages import Message, changes, common

BranchReason: TypeAlias = Literal[
    "start",
    "conversation",
    "again",
    "fork",
    "settings",
    "message",
    "response",
    "calls",
    "reasoning",
    "template",
]
"""``"start"``: the first turn of its session. ``"conversation"``: its first messages
differ from all turns. ``"again"``: the prompt of an earlier turn. ``"fork"``: another
turn continues the same turn differently. ``"settings"``: other tools or template
variables. ``"message"``: the client has changed a message. ``"response"``, ``"calls"``,
``"reasoning"``: the client has changed the model's text, calls or reasoning.
``"template"``: the chat template now renders the earlier turn differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """The reason for which a turn begins a branch."""

    reason: BranchReason
    """Category of the reason."""
    text: str
    """The difference and the turn, as a sentence."""


START = Branch(reason="start", text="It is the first turn of the session.")


def again(number: int) -> Branch:
    """Returns the reason for a repeated prompt."""
    return Branch(reason="again", text=f"It is the prompt of turn {number} once more.")


def forked(number: int) -> Branch:
    """Returns the reason for a second continuation of a turn."""
    return Branch(reason="fork", text=f"It goes on in another way than turn {number}.")


def other_text(number: int) -> Branch:
    """Returns the reason for a text without an earlier prefix."""
    text = f"Its text differs from turn {number}'s, or an earlier one."
    return Branch(reason="conversation", text=text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A turn to compare a request with."""

    number: int
    """Number of the turn."""
    messages: Sequence[Message]
    """Its prompt and its response."""
    same_settings: bool
    """Whether it has the tools and template variables of the request."""
    shared: int = 0
    """Leading messages in common with the request's prompt."""


def nearest(known: Sequence[Known], given: Sequence[Message]) -> Branch:
    """Returns why a conversation does not continue its most similar turn.

    Examples:
        >>> hi = {"role": "user", "content": "Hi"}
        >>> reply = {"role": "assistant", "content": "Hello"}
        >>> turn = Known(number=0, messages=[hi, reply], same_settings=True)
        >>> nearest([turn], [hi, {**reply, "content": "Hallo"}, hi]).reason
        'response'
    """
    shared = [common(turn.messages, given) for turn in known]
    length, _, _, turn = max(
        (
            (length, turn.same_settings, -len(turn.messages), turn)
            for length, turn in zip(shared, known, strict=True)
        ),
        key=lambda each: each[:3],
    )
    return _explain(turn, given, length)


def _explain(turn: Known, given: Sequence[Message], length: int) -> Branch:
    """Returns why a conversation branches after its common prefix with a turn."""
    messages, name = turn.messages, f"turn {turn.number}"
    is_prefix = length in (len(messages), len(given))
    if is_prefix and not turn.same_settings:
        return Branch(
            reason="settings",
            text=f"The tools or the template's variables differ from {name}'s.",
        )
    if length == len(messages):
        if changes(messages, given[:length]) is None:
            return Branch(
                reason="reasoning",
                text=f"The reasoning is not what the model wrote up to {name}.",
            )
        return Branch(
            reason="template",
            text=f"The chat template renders {name} in other words than the model's.",
        )
    if length == len(messages) - 1 == len(given):
        return again(turn.number)
    is_within_prompt = length < len(messages) - 1
    if length == len(given) or (turn.shared and is_within_prompt):
        return forked(turn.number)
    return _differs(messages, given, length, name)


def _differs(
    own: Sequence[Message], given: Sequence[Message], index: int, name: str
) -> Branch:
    """Returns the difference in the first unequal message of two conversations.

    It is compared with the model's message, if the client could have seen it.
    """
    expected, other = own[index], given[index]
    where = f"messages[{index}] is not what {name} has"
    if expected["role"] != "assistant":
        if all(message["role"] == "system" for message in own[:index]):
            return Branch(
                reason="conversation",
                text=f"It begins with other messages than {name}.",
            )
        return Branch(reason="message", text=f"{where}: {_message(expected, other)}.")
    if other["role"] != "assistant":
        return Branch(reason="response", text=f"{where}: the response was left out.")
    calls, edited = (_calls(message) for message in (expected, other))
    if calls != edited:
        return Branch(reason="calls", text=f"{where}: {_calls_text(calls, edited)}.")
    return Branch(reason="response", text=f"{where}: {_text(expected, other)}.")


def _message(mine: Message, other: Message) -> str:
    if mine["role"] != other["role"]:
        return f"a message of the role {other['role']} instead of {mine['role']}"
    return f"another message of the role {mine['role']}"


def _calls(message: Message) -> list[str]:
    return [str(call["function"]) for call in message.get("tool_calls", ())]


def _calls_text(mine: Sequence[str], other: Sequence[str]) -> str:
    if not other:
        return f"{len(mine)} calls were left out, or sent as text"
    if sorted(mine) == sorted(other):
        return "the calls are in another order"
    if len(mine) != len(other):
        return f"{len(other)} calls instead of {len(mine)}"
    return "a call has another name or other arguments"


def _text(mine: Message, other: Message) -> str:
    text, client_text = mine["content"].strip(), other["content"].strip()
    if not client_text:
        return "the text was left out"
    if client_text.startswith(text):
        return "text was put behind the model's, which a token had ended"
    return "the text is another"
