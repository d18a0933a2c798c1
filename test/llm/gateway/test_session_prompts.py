"""Prompts of a session: keys of conversations, plain texts, and what is rendered."""

from __future__ import annotations

import copy
import gc
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from helpers.chat_families import family_tokenizer
from tokenizers.processors import TemplateProcessing

from torchrl_sglang.chat.messages import changes, conversation_keys, rename_calls
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.chat.tool_calls import written_ids
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.session import GROWING_TURNS, Session
from torchrl_sglang.gateway.turns import Prompt, Turn
from torchrl_sglang.types import Completion

USER = {"role": "user", "content": "Hi"}


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def called(call_id: str, arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return said("", tool_calls=[{"id": call_id, "function": function}])


def result(call_id: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "x", "tool_call_id": call_id, **more}


def key(*messages: Mapping[str, Any], setting: Any = None) -> bytes:
    *_, (number, found) = conversation_keys(messages, setting)
    assert number == len(messages)
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([USER], [{**USER, "content": " Hi\n"}]),
        ([USER, said("a")], [USER, said("a ", reasoning_content="r")]),
        ([called("a", {"x": 1, "y": [2]})], [called("b", {"y": [2.0], "x": 1})]),
        ([called("a", {}), result("a")], [called("b", {}), result("b")]),
        # A client that uses an id once more.
        (
            [called("a", {}), result("a"), called("b", {}), result("b")],
            [called("a", {}), result("a"), called("a", {}), result("a")],
        ),
    ],
)
def test_fields_that_clients_change_leave_the_key_alone(
    one: list[Any], other: list[Any]
) -> None:
    assert key(*one) == key(*other)
    assert key(*one, setting=["a"]) != key(*other, setting=["b"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([USER], [said("Hi")]),
        ([USER], [{**USER, "name": "Zoë"}]),
        ([USER], [USER, USER]),
        ([called("a", {"x": 1})], [called("a", {"x": True})]),
        ([called("a", {"x": 1})], [called("a", {"x": "1"})]),
        ([called("a", {"x": 1.5})], [called("a", {"x": 1})]),
        ([called("a", {}), result("a")], [called("a", {}), result("b")]),
        ([result("a")], [result("b")]),
        ([{**USER, "content": "a,b"}], [{**USER, "content": "a"}]),
    ],
)
def test_edits_have_other_keys(one: list[Any], other: list[Any]) -> None:
    assert key(*one) != key(*other)


def test_keys_are_those_of_every_process() -> None:
    assert key(USER).hex() == "cb907238f5704b62bd7c564e9d026019"
    assert key({**USER, "content": "\ud800"}) != key(USER)


def test_changes_are_counted_and_other_reasoning_is_none() -> None:
    known = [USER, said("a", reasoning_content="r 1")]
    assert changes(known, known) == 0
    assert changes(known, [USER, said("a")]) == 1
    assert changes(known, [USER, said("a", reasoning_content=" r\n1")]) == 1
    assert changes(known, [USER, said("a", reasoning_content="r 2")]) is None
    assert changes([USER, said("a")], known) is None


def test_ids_are_renamed_up_to_where_the_client_uses_them_again() -> None:
    known, given = [called("mine", {})], [called("a", {})]
    after = [result("a"), called("a", {}), result("a"), result("b")]
    expected = [result("mine"), called("a", {}), result("a"), result("b")]
    assert rename_calls(after, given, known) == expected


class Counting:
    """A tokenizer that counts what it renders."""

    def __init__(self, name: str) -> None:
        self._tokenizer = family_tokenizer(name)
        self.rendered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        self.rendered += 1
        return self._tokenizer.apply_chat_template(*args, **kwargs)


def add(session: Session, prompt: Prompt, ids: Sequence[int], **fields: Any) -> Turn:
    template = ChatTemplate(family_tokenizer("qwen2.5"))
    text = template.decode(ids).removesuffix("<|im_end|>")
    turn = Turn(
        number=len(session.turns),
        prompt=prompt,
        completion=Completion(token_ids=list(ids), finish_reason="stop"),
        text=text,
        **{"reply": said(text), "ended": True, **fields},
    )
    session.add(turn)
    return turn


def test_a_turn_renders_its_conversation_once() -> None:
    tokenizer = Counting("qwen2.5")
    template, session = ChatTemplate(tokenizer), Session("s")
    # Read off the template once, by rendering another conversation.
    assert template.end_ids
    tokenizer.rendered = 0
    messages: list[Any] = [USER]
    for number in range(1, 6):
        prompt = session.prompt(messages, PromptSettings(), template)
        assert tokenizer.rendered == number
        turn = add(session, prompt, template.encode(f"{number}<|im_end|>"))
        messages += [turn.reply, USER]
    assert [turn.prompt.parent for turn in session.turns] == [None, 0, 1, 2, 3]


def held(turns: int, *, plain: bool) -> int:
    """Returns the bytes that a session of so many turns holds."""
    template, session = ChatTemplate(family_tokenizer("qwen2.5")), Session("s")
    ids, more = template.encode("b" * 200 + "<|im_end|>"), "c" * 200
    messages: list[Any] = [USER]
    text = "tell"
    tracemalloc.start()
    for number in range(turns):
        setting = PromptSettings(tools=[{"type": "function", "about": "d" * 200}])
        if plain:
            prompt = session.text_prompt(text, template)
        else:
            prompt = session.prompt(messages, setting, template)
        assert prompt.parent == (number - 1 if number else None)
        turn = add(session, prompt, list(ids))
        # A client sends its own copies.
        messages = [dict(each) for each in [*prompt.messages, turn.reply]]
        messages.append({"role": "user", "content": f"{number} {more}"})
        text += template.decode(ids) + f"{number} {more}"
    messages, text = [], ""
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert session.turns[-1].token_ids[-len(ids) :] == ids
    assert session.turns[-1].num_tokens == len(session.turns[-1].token_ids)
    return size


@pytest.mark.parametrize("plain", [False, True])
def test_a_session_grows_with_what_is_said(plain: bool) -> None:
    """And not with the square of it."""
    held(2, plain=plain)
    assert held(80, plain=plain) < 2.5 * held(40, plain=plain)


def test_a_long_conversation_is_refused_and_forgotten() -> None:
    """Python's limit of recursion does not apply to it."""
    session, turn = Session("s"), None
    for number in range(20_000):
        prompt = Prompt(
            setting=PromptSettings(),
            new_messages=[USER],
            new_token_ids=[1],
            origin=turn,
        )
        turn = Turn(
            number=number,
            prompt=prompt,
            completion=Completion(token_ids=[2], finish_reason="stop"),
            text="a",
            reply=said("a"),
            ended=True,
        )
        session.turns.append(turn)
    (trajectory,) = session.trajectories()
    assert len(trajectory.token_ids) == len(trajectory.messages) == 40_000


def test_turns_that_nobody_saw_leave_their_numbers_out() -> None:
    template, session = ChatTemplate(family_tokenizer("qwen2.5")), Session("s")
    prompt = session.prompt([USER], PromptSettings(), template)
    first, gone, last = (add(session, prompt, [1]) for _ in range(3))
    assert session.remove(gone)
    assert not session.remove(gone)
    session.set_reward(0.5, turn=2)
    assert [last.reward, first.reward] == [0.5, None]
    for wrong in (1, 3, -1, True, "0"):
        with pytest.raises(ConfigurationError, match="2 turns up to 2"):
            session.set_reward(0.5, turn=wrong)
    following = session.prompt([USER, said("x"), USER], PromptSettings(), template)
    assert following.parent is None
    session.add(gone)
    assert [turn.number for turn in session.turns] == [0, 1, 2]
    assert session.next_number() == 3


def test_any_turn_is_gone_on_from_by_rendering_once() -> None:
    tokenizer = Counting("qwen2.5")
    template, session = ChatTemplate(tokenizer), Session("s")
    # Read off the template once, by rendering another conversation.
    assert template.end_ids
    tokenizer.rendered = 0
    prompt = session.prompt([USER], PromptSettings(), template)
    for number in range(GROWING_TURNS + 1):
        add(session, prompt, template.encode(f"{number}<|im_end|>"))
    for number in (0, 1, GROWING_TURNS):
        before = tokenizer.rendered
        known = [USER, session.turns[number].reply, USER]
        assert session.prompt(known, PromptSettings(), template).parent == number
        assert tokenizer.rendered == before + 1


def test_a_call_in_other_words_renders_twice() -> None:
    tokenizer = Counting("qwen2.5")
    template, session = ChatTemplate(tokenizer), Session("s")
    prompt = session.prompt([USER], PromptSettings(), template)
    text = '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call><|im_end|>'
    reply = called("a", {"x": 1})
    template.render([USER, reply], PromptSettings())
    add(session, prompt, template.encode(text), reply=reply)
    # Read off the template once, by rendering another conversation.
    assert template.end_ids
    before = tokenizer.rendered
    prompt = session.prompt([USER, reply, result("a")], PromptSettings(), template)
    assert prompt.parent == 0
    assert tokenizer.rendered == before + 2


def test_a_text_goes_on_from_the_longest_known() -> None:
    template, session = ChatTemplate(family_tokenizer("qwen2.5")), Session("s")
    prompt = session.text_prompt("ab", template)
    assert prompt.token_ids == template.encode("ab")
    for text in ("c", "cd", ""):
        add(session, prompt, template.encode(text), ended=False)
    for text, parent in (("abcde", 1), ("abce", 0), ("abx", 2), ("xab", None)):
        found = session.text_prompt(text, template)
        assert found.parent == parent
        assert found.token_ids == template.encode(text)
    # The client has not seen the token that ended this one.
    ended = add(session, prompt, template.encode("z<|im_end|>"))
    assert session.text_prompt("abzz", template).parent == 2
    assert session.text_prompt("abz<|im_end|>\n", template).parent == ended.number


def test_a_text_begins_as_the_tokenizer_says() -> None:
    tokenizer = copy.deepcopy(family_tokenizer("gemma3"))
    first = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", first)]
    )
    template = ChatTemplate(tokenizer)
    plain = template.encode("ab")
    assert template.encode_start("ab") == [first, *plain]
    assert template.encode_start("<bos>ab") == [first, *plain]
    assert template.encode_behind("ab") == plain


def test_ids_that_a_model_wrote() -> None:
    text = '[{"name": "f", "arguments": {}, "id": "abcdefghi"}, {"id": "123456789"}]'
    assert written_ids(text, 2) == ["abcdefghi", "123456789"]
    assert written_ids(text, 1) == []
    assert written_ids(text.replace("abcdefghi", "123456789"), 2) == []
    assert written_ids('{"id": "call_1"}', 1) == []
