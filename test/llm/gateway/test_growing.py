"""Conversations that grow are found fast, with what a look at all of them finds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.chat_families import FAMILIES
from helpers.talk import TOOLS, Talk

from torchrl_sglang.chat.messages import begins_with, common, conversation_keys
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.gateway.session import ALL_CHARACTERS, NEW_CHARACTERS, Session

USER = {"role": "user", "content": "Hi"}


class Looking(Session):
    """A session that looks through all of its turns, by the keys of all messages."""

    def _latest(self, messages: Any, setting: Any) -> None:
        return None


def edited(messages: Sequence[Any], draw: random.Random) -> list[Any]:
    """Returns a conversation as a client may send it."""
    found = []
    for message in messages:
        kept = dict(message)
        what = draw.random()
        if what < 0.1:
            kept["content"] = f" {kept['content']}\n"
        elif what < 0.13:
            kept["content"] += "!"
        elif what < 0.2:
            kept.pop("reasoning_content", None)
        found.append(kept)
    return found if draw.random() < 0.9 else found[: draw.randrange(1, len(found) + 1)]


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "deepseek-r1"])
def test_the_fast_way_finds_the_same(name: str) -> None:
    draw = random.Random(name)
    talk, other = Talk(name), Talk(name)
    other.session = Looking(name)
    talk.strict = other.strict = False
    asked: list[list[Any]] = [[USER]]
    for number in range(40):
        setting = TOOLS if draw.random() < 0.2 else PromptSettings()
        messages = draw.choice(asked[-3:] if draw.random() < 0.9 else asked)
        if messages[-1]["role"] != "user":
            messages = [*messages, {"role": "user", "content": f"go on {number}"}]
        prompts = [
            each.session.prompt(messages, setting, each.template)
            for each in (talk, other)
        ]
        one, all_ = prompts
        fast = talk.session.next_prompt(messages, setting, talk.template)
        for found in (one, fast) if fast is not None else (one,):
            assert found.token_ids == all_.token_ids
            assert found.parent == all_.parent
            assert found.branch == all_.branch
            assert found.rendered == all_.rendered
            assert found.messages == all_.messages
        text, reply = f"fine {number % 3}", {}
        if talk.family.thinks and draw.random() < 0.5:
            text, reply = (
                talk.family.write(text, reasoning="so"),
                {
                    "content": text,
                    "reasoning_content": "so",
                },
            )
        for each in (talk, other):
            each.setting = setting
            turn = each.ask(messages, text, reply)
        asked.append(edited([*messages, turn.reply, USER], draw))
    keys = [
        [(turn.number, *session._keys[turn.number]) for turn in session.turns]
        for session in (talk.session, other.session)
    ]
    assert keys[0] == keys[1]
    for turn in talk.session.turns:
        said = [*turn.prompt.messages, turn.reply]
        *_, (_, begun), (_, ended) = conversation_keys(said, turn.prompt.setting.key())
        assert talk.session._keys[turn.number] == (begun, ended)
    assert {turn.prompt.parent is None for turn in talk.session.turns} == {True, False}


def test_much_that_is_new_is_left_to_a_thread() -> None:
    talk = Talk("qwen2.5")
    turn = talk.ask([USER])
    for size, is_fast in ((NEW_CHARACTERS, True), (NEW_CHARACTERS + 1, False)):
        last = {"role": "user", "content": "x" * size}
        messages = [USER, turn.reply, last]
        found = talk.session.next_prompt(messages, talk.setting, talk.template)
        assert (found is not None) == is_fast
    assert talk.session.next_prompt([USER], talk.setting, talk.template) is None


def test_long_conversations_are_left_to_a_thread() -> None:
    for size, is_fast in ((ALL_CHARACTERS - 8, True), (ALL_CHARACTERS - 7, False)):
        talk = Talk("qwen2.5")
        first = {"role": "user", "content": "x" * size}
        messages = [first, talk.ask([first]).reply, {"role": "user", "content": "more"}]
        assert messages[1]["content"] == "fine"
        found = talk.session.next_prompt(messages, talk.setting, talk.template)
        assert (found is not None) == is_fast
        made = talk.session.prompt(messages, talk.setting, talk.template)
        assert made.parent == 0
        known = talk.session.turns[0].token_ids
        assert made.token_ids[: len(known)] == known


def test_what_begins_with_a_conversation_has_its_keys() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "1", "tool_call_id": "a"}
    known = [USER, said, result]
    renamed = {**said, "tool_calls": [{**call, "id": "b"}]}
    arguments = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    flagged = {**call, "function": {"name": "f", "arguments": {"x": True}}}
    cases = [
        (known, [*known, USER], True),
        (known, [USER, said], False),
        (known, [USER, renamed, {**result, "tool_call_id": "b"}], True),
        # It answers no call that there is.
        (known, [USER, renamed, result], False),
        (known, [{"role": "user", "content": " Hi "}, said, result], True),
        (
            [USER, {**said, "tool_calls": [arguments]}],
            [USER, {**said, "tool_calls": [flagged]}],
            False,
        ),
    ]
    for own, given, expected in cases:
        assert begins_with(given, own) == expected
        if len(given) >= len(own):
            keys = [dict(conversation_keys(each, [])) for each in (own, given)]
            assert (keys[0][len(own)] == keys[1][len(own)]) == expected
        assert (common(own, given) == len(own)) == expected or own[1] is not said
