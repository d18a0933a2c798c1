"""Why a turn goes on from no earlier one, or from one that others go on from. Pure."""

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
"""``"start"``: the first turn of its session. ``"conversation"``: it begins with other
messages than all turns. ``"again"``: the prompt of an earlier turn. ``"fork"``: another
turn goes on from the same one in another way. ``"settings"``: other tools or variables
of the template. ``"message"``: the client says another message than before.
``"response"``, ``"calls"``, ``"reasoning"``: it says another text, other calls or other
reasoning than the model wrote. ``"template"``: the chat template renders the earlier
turn in other words now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """The reason for which a turn begins a branch."""

    reason: BranchReason
    """A word for counting."""
    text: str
    """What is different from which turn, as a sentence."""


START = Branch(reason="start", text="It is the first turn of the session.")


def again(number: int) -> Branch:
    """Returns that a turn has the prompt of another one."""
    return Branch(reason="again", text=f"It is the prompt of turn {number} once more.")


def forked(number: int) -> Branch:
    """Returns that a turn goes on from the same one as another."""
    return Branch(reason="fork", text=f"It goes on in another way than turn {number}.")


def other_text(number: int) -> Branch:
    """Returns that a text begins with no earlier one."""
    text = f"It is another text than that of turn {number}, or an earlier one."
    return Branch(reason="conversation", text=text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A turn that a request is compared with."""

    number: int
    """Number of the turn."""
    messages: Sequence[Message]
    """Its prompt and its response."""
    same_settings: bool
    """Whether it has the tools and template variables of the request."""
    shared: int = 0
    """Leading messages that the request's prompt is joined to."""


def nearest(known: Sequence[Known], given: Sequence[Message]) -> Branch:
    """Returns why a conversation does not go on from the turn that it is most alike to.

    Args:
        known: turns, the likeliest first.
        given: the conversation of a request.

    Examples:
        >>> hi = {"role": "user", "content": "Hi"}
        >>> said = {"role": "assistant", "content": "Hello"}
        >>> turn = Known(number=0, messages=[hi, said], same_settings=True)
        >>> nearest([turn], [hi, {**said, "content": "Hallo"}, hi]).reason
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
    """Returns why a conversation, whose leading messages a turn has, is a branch."""
    own, name = turn.messages, f"turn {turn.number}"
    ended = length in (len(own), len(given))
    if ended and not turn.same_settings:
        return Branch(
            reason="settings",
            text=f"The tools or the template's variables are not those of {name}.",
        )
    if length == len(own):
        if changes(own, given[:length]) is None:
            return Branch(
                reason="reasoning",
                text=f"The reasoning is not what the model wrote up to {name}.",
            )
        return Branch(
            reason="template",
            text=f"The chat template renders {name} in other words than the model's.",
        )
    if length == len(own) - 1 == len(given):
        return again(turn.number)
    is_within_prompt = length < len(own) - 1
    if length == len(given) or (turn.shared and is_within_prompt):
        return forked(turn.number)
    return _differs(own, given, length, name)


def _differs(
    own: Sequence[Message], given: Sequence[Message], index: int, name: str
) -> Branch:
    """Returns how two conversations differ in the first message that they do not share.

    It is compared with what the model wrote, if the client could know that.
    """
    mine, other = own[index], given[index]
    where = f"messages[{index}] is not what {name} has"
    if mine["role"] != "assistant":
        if all(message["role"] == "system" for message in own[:index]):
            return Branch(
                reason="conversation",
                text=f"It begins with other messages than {name}.",
            )
        return Branch(reason="message", text=f"{where}: {_message(mine, other)}.")
    if other["role"] != "assistant":
        return Branch(reason="response", text=f"{where}: the response was left out.")
    calls, said = (_calls(message) for message in (mine, other))
    if calls != said:
        return Branch(reason="calls", text=f"{where}: {_calls_text(calls, said)}.")
    return Branch(reason="response", text=f"{where}: {_text(mine, other)}.")


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
    own, given = mine["content"].strip(), other["content"].strip()
    if not given:
        return "the text was left out"
    if given.startswith(own):
        return "text was put behind the model's, which a token had ended"
    return "the text is another"
