"""What clients do to responses: joined where the tokens prove it, else a reason."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import requests
from helpers.chat_families import FAMILIES
from helpers.gateway_client import message, post
from helpers.talk import TOOLS, Talk, call, result, user
from jinja2 import TemplateError

from torchrl_sglang import Gateway
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.export import to_rows
from torchrl_sglang.gateway.turns import Turn

Message = Mapping[str, Any]
Client = Callable[[Message], Message]
STOP = "Observation:"


def says(content: str, **more: Any) -> Client:
    """Returns a client that says another text."""
    return lambda reply: {**reply, "content": content, **more}


def turn_of(talk: Talk, messages: list[Message]) -> Turn:
    talk.outcome(messages)
    return talk.session.turns[-1]


def reason(turn: Turn) -> str | None:
    return None if turn.branch is None else turn.branch.reason


@pytest.mark.parametrize(
    ("text", "stop", "client"),
    [
        ("I look.\nObservation:", STOP, says("I look.\nObservation:")),
        ("I look.\nObservation:", STOP, says("I look.\nObservation:\nCalls: [1]")),
        ("def f():", None, says("def f():\n    return 1")),
        ("<think>\nr\n</think>\n\n42", None, says("<think>\nr\n</think>\n\n42 is it")),
    ],
)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek-r1"])
def test_edits_that_keep_the_tokens_join_their_turn(
    name: str, text: str, stop: str | None, client: Client
) -> None:
    """Where no token ended a response, more may follow; twice in a row."""
    talk = Talk(name)
    if name in ("qwen3", "deepseek-v3") and "</think>" in text:
        return  # Their templates drop it.
    messages: list[Message] = [user("Hi")]
    for number in range(3):
        turn = talk.ask(messages, text, end=None, stop=stop)
        assert turn.prompt.parent == (number - 1 if number else None)
        assert reason(turn) == (None if number else "start")
        messages += [client(turn.reply), user("more")]
        if number:
            assert turn.prompt.said == messages[-4]
    (path,) = talk.session.trajectories()
    assert path.trained == [True] * 3
    (row,) = to_rows([talk.session])
    assert row["history"].full.content[1] == messages[1]["content"]


def thinks(name: str, content: str) -> tuple[Talk, list[Message]]:
    """A call after reasoning, as a reasoning parser reads it."""
    talk = Talk(name, TOOLS)
    written = talk.family.write(content, reasoning="r", calls=[call(0)])
    reply = {"reasoning_content": "r", "content": content, "tool_calls": [call(0)]}
    return talk, [user("Hi"), talk.ask([user("Hi")], written, reply).reply]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_reasoning_that_is_put_back_as_text(name: str) -> None:
    talk, (asked, reply) = thinks(name, "")
    echo = {k: v for k, v in reply.items() if k != "reasoning_content"}
    echo["content"] = "<think>\nr\n</think>\n\n"
    turn = turn_of(talk, [asked, echo, result(0)])
    assert (turn.prompt.parent, reason(turn)) == (0, None)
    edited = {**echo, "content": "<think>\nR\n</think>\n\n"}
    turn = turn_of(talk, [asked, edited, result(0)])
    assert (turn.prompt.parent, reason(turn)) == (None, "response")


def test_a_raw_response_that_is_put_back() -> None:
    talk, (asked, _) = thinks("qwen2.5", "I look.")
    raw = {"role": "assistant", "content": talk.session.turns[0].text}
    turn = turn_of(talk, [asked, raw, user("and?")])
    assert (turn.prompt.parent, reason(turn)) == (0, None)


def without_calls(reply: Message, content: str) -> Message:
    kept = {k: v for k, v in reply.items() if k != "tool_calls"}
    return {**kept, "content": content}


def with_calls(*numbers: int) -> Client:
    def client(reply: Message) -> Message:
        calls = reply["tool_calls"]
        return {**reply, "tool_calls": [calls[number] for number in numbers]}

    return client


@pytest.mark.parametrize(
    ("client", "expected", "told"),
    [
        (says(""), "response", "the text was left out"),
        (says("I see."), "response", "the text is another"),
        (says("I look. Yes."), "response", "text was put behind the model's"),
        (with_calls(1, 0), "calls", "the calls are in another order"),
        (with_calls(1), "calls", "1 calls instead of 2"),
        (with_calls(1, 1), "calls", "a call has another name or other arguments"),
        (
            lambda reply: without_calls(reply, "Calling tools: [weather]"),
            "calls",
            "2 calls were left out, or sent as text",
        ),
        (lambda reply: user("So?"), "response", "the response was left out"),
    ],
)
def test_unprovable_edit_starts_a_branch_and_says_why(
    client: Client, expected: str, told: str
) -> None:
    talk = Talk("qwen2.5", TOOLS)
    calls = [call(0), call(1, city="Bern")]
    written = talk.family.write("I look.", calls=calls)
    reply = {"content": "I look.", "tool_calls": calls}
    asked = [user("Hi")]
    echo = client(talk.ask(asked, written, reply).reply)
    turn = turn_of(talk, [*asked, echo, result(0), result(1), user("more")])
    assert turn.prompt.parent is None
    assert turn.branch is not None
    assert turn.branch.reason == expected
    assert told in turn.branch.text
    # A turn that keeps to the edit goes on from this one.
    known = [*turn.prompt.messages, turn.reply, user("more")]
    following = turn_of(talk, known)
    assert (following.prompt.parent, following.branch) == (turn.number, None)


def test_an_end_that_a_request_chose_is_not_skipped() -> None:
    """The model wrote it, and the client's text has something else there."""
    talk = Talk("llama3.1")
    asked = [user("Hi")]
    reply = talk.ask(asked, "Hello", end="!").reply
    turn = turn_of(talk, [*asked, says("Hello you")(reply), user("more")])
    assert (turn.prompt.parent, reason(turn)) == (None, "response")
    turn = turn_of(talk, [*asked, says("Hello!")(reply), user("more")])
    assert (turn.prompt.parent, reason(turn)) == (0, None)


def test_nothing_is_proven_by_an_empty_response() -> None:
    talk = Talk("qwen2.5")
    asked = [user("Hi")]
    reply = talk.ask(asked, "\n", end=None).reply
    turn = turn_of(talk, [*asked, says("Hello")(reply), user("more")])
    assert (turn.prompt.parent, reason(turn)) == (None, "response")


def test_the_longest_that_is_proven_goes_first() -> None:
    """An edited last response is found, though the one before is there as it was."""
    talk = Talk("qwen2.5")
    messages: list[Message] = [user("1")]
    for _ in range(2):
        reply = talk.ask(messages, "a Observation:", end=None, stop=STOP).reply
        messages += [reply, user("more")]
    messages[-2] = says("a Observation: b")(reply)
    turn = turn_of(talk, messages)
    assert (turn.prompt.parent, reason(turn)) == (1, None)


def test_other_branches_have_their_reasons() -> None:
    talk = Talk("qwen2.5")
    system = {"role": "system", "content": "Be brief."}
    asked: list[Message] = [system, user("Hi")]
    reply = talk.ask(asked, "a").reply
    known = [*asked, reply, user("more")]
    assert reason(turn_of(talk, known)) is None
    assert reason(turn_of(talk, known)) == "again"
    assert reason(turn_of(talk, [*asked, reply, user("less")])) == "fork"
    assert reason(turn_of(talk, asked)) == "again"
    assert reason(turn_of(talk, [system, user("Title?")])) == "conversation"
    assert reason(turn_of(talk, [user("Hi")])) == "conversation"
    last = talk.session.turns[1]
    deeper = [*known, last.reply, user("x")]
    assert reason(turn_of(talk, deeper)) is None
    edited = [*asked, reply, user("mehr"), last.reply, user("y")]
    assert reason(turn_of(talk, edited)) == "fork"
    assert reason(turn_of(talk, [*known, says("b")(last.reply), user("z")])) in (
        *("fork", "response"),
    )
    talk.setting = TOOLS
    assert reason(turn_of(talk, known)) == "settings"


def test_other_reasoning_says_so() -> None:
    talk, (asked, reply) = thinks("qwen3", "")
    edited = {**reply, "reasoning_content": "R"}
    turn = turn_of(talk, [asked, edited, result(0)])
    assert (turn.prompt.parent, reason(turn)) == (None, "reasoning")
    # To a template that renders none, it makes no difference.
    talk = Talk("qwen2.5")
    reply = talk.ask([asked], "a").reply
    edited = {**reply, "reasoning_content": "R"}
    turn = turn_of(talk, [asked, edited, user("more")])
    assert (turn.prompt.parent, reason(turn)) == (0, None)


def test_a_template_that_drops_reasoning_says_so() -> None:
    talk, (asked, reply) = thinks("qwen3", "")
    turn = turn_of(talk, [asked, reply, user("stop")])
    assert (turn.prompt.parent, reason(turn)) == (None, "template")


def test_reasons_of_texts() -> None:
    talk = Talk("qwen2.5")
    found = []
    for text in ("a", "ab", "ab", "abc", "x", "a"):
        prompt = talk.session.text_prompt(text, talk.template)
        found.append(None if prompt.branch is None else prompt.branch.reason)
        ids = talk.template.encode("b" if text == "a" else "z")
        turn = talk.ask([user("Hi")], "b", end=None)
        talk.session.remove(turn)
        turn.prompt, turn.completion = (
            prompt,
            turn.completion.__class__(token_ids=ids, finish_reason="stop"),
        )
        talk.session.add(turn)
    assert found == ["start", None, "again", "fork", "conversation", "again"]


def test_they_are_kept_shown_and_counted(fake_engine, tmp_path) -> None:
    def ask(session, *contents, stop=None):
        roles = ["user", "assistant"] * len(contents)
        messages = [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=False)
        ]
        return message(post(session, messages=messages, stop=stop))["content"]

    with Gateway(fake_engine, path=tmp_path / "s") as gateway:
        session = gateway.session("a")
        said = ask(session, "Hi")
        ask(session, "Hi", f"{said} and more", "Go on")
        ask(session, "Hi", "other", "Go on")
        ask(session, "Title?")
        headers = {"Authorization": f"Bearer {session.key}"}
        shown = requests.get(session.url, headers=headers, timeout=30).json()
        branches = [path["branches"] for path in shown["trajectories"]]
        assert [each and each["reason"] for each in branches[0]] == ["start", None]
        assert branches[1][0]["text"].endswith("the text is another.")
        wanted = {"start": 1, "response": 1, "conversation": 1}
        assert gateway.stats()["branches"] == wanted
        gateway.drop(gateway.session("b"))
        stats = gateway.stats()
        assert [stats[name] for name in ("sessions", "turns", "tokens")] == [1, 4, 16]
        before = [(turn.branch, turn.prompt.said) for turn in session.turns]
    with Gateway(fake_engine, path=tmp_path / "s") as gateway:
        turns = gateway.find(name="a").turns
        assert [(turn.branch, turn.prompt.said) for turn in turns] == before
        assert turns[1].prompt.said is not None
        ask(gateway.find(name="a"), "Hi", f"{said} and more", "Go on", "x", "y")
        ids = [turn.prompt.parent for turn in gateway.find(name="a").turns]
        assert ids == [None, 0, None, None, 0]


EDITS: list[Callable[[Message, random.Random], Message]] = [
    lambda reply, draw: reply,
    lambda reply, draw: {**reply, "content": reply["content"] + draw.choice(PIECES)},
    lambda reply, draw: {**reply, "content": draw.choice(PIECES) + reply["content"]},
    lambda reply, draw: {**reply, "content": ""},
    lambda reply, draw: {**reply, "content": reply["content"].strip()},
    lambda reply, draw: {**reply, "tool_calls": reply.get("tool_calls", [])[::-1]},
    lambda reply, draw: {**reply, "tool_calls": reply.get("tool_calls", [])[1:]},
    lambda reply, draw: without_calls(reply, f"Calling {reply.get('tool_calls')}"),
    lambda reply, draw: {k: v for k, v in reply.items() if k != "reasoning_content"},
    lambda reply, draw: {
        **{k: v for k, v in reply.items() if k != "reasoning_content"},
        "content": f"<think>\n{reply.get('reasoning_content')}\n</think>\n\n"
        f"{reply['content']}",
    },
]
"""What clients do to a response."""

PIECES = ["", STOP, "</code>", "\n", " x", "<think>r</think>", "<|im_end|>", "</s>"]


class RandomClient:
    """Holds a conversation, and edits what the model said in it.

    The engine is given each prompt, and writes tokens of its own.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.draw = random.Random(f"{name} {seed}")
        self.talk = Talk(name, self.draw.choice([TOOLS, PromptSettings()]))
        self.talk.strict = False
        self.given: list[list[int]] = []
        self.written: list[tuple[int, ...]] = []
        self.messages: list[Message] = [user("Hi")]

    def run(self, turns: int) -> None:
        for _ in range(turns):
            try:
                reply = self.ask()
            except ConfigurationError:
                # The template takes no such messages, whoever renders them.
                with pytest.raises((TemplateError, TypeError)):
                    self.talk.render(self.messages)
                self.messages = [user("Hi")]
                continue
            edited = dict(self.draw.choice(EDITS)(reply, self.draw))
            if not edited.get("tool_calls"):
                edited.pop("tool_calls", None)
            calls = [each["id"] for each in edited.get("tool_calls", ())]
            self.messages += [
                edited,
                *({**result(0), "tool_call_id": each} for each in calls),
                *([] if calls else [user(self.draw.choice(PIECES) + "?")]),
            ]

    def ask(self) -> Message:
        draw, talk = self.draw, self.talk
        stop, end = draw.choice([(None, ""), (None, None), (STOP, None)])
        content = draw.choice(PIECES) + "a" + draw.choice(PIECES)
        reply: dict[str, Any] = {"content": content}
        number = 2 * len(talk.session.turns)
        calls = [call(number), call(number + 1, b=1)][: draw.randrange(3)]
        if not talk.setting.tools or stop:
            calls = []
        if calls:
            reply["tool_calls"] = calls
        reasoning = draw.choice([None, "r"])
        if reasoning:
            reply["reasoning_content"] = reasoning
        text = talk.family.write(content, reasoning=reasoning, calls=calls)
        turn = talk.ask(self.messages, text + (stop or ""), reply, end=end, stop=stop)
        self.given.append(turn.prompt.token_ids)
        self.written.append(tuple(turn.completion.token_ids))
        return turn.reply


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_the_client_edits(name: str, seed: int) -> None:
    """Rows have what the engine was given, and each token that it wrote once."""
    client = RandomClient(name, seed)
    client.run(10)
    session = client.talk.session
    trained: Counter[tuple[int, ...]] = Counter()
    for row, path in zip(to_rows([session]), session.trajectories(), strict=True):
        ids, mask = row["tokens"].full.tolist(), row["masks"].all_assistant_mask
        inside = [False] * len(ids)
        for turn, is_trained, start, end in path.spans():
            assert ids[:start] == client.given[turn.number]
            assert tuple(ids[start:end]) == client.written[turn.number]
            inside[start:end] = [is_trained] * (end - start)
            trained[turn.number,] += is_trained
        assert mask.tolist() == inside
    assert set(trained.values()) == {1}
    assert len(trained) == len(client.written)
    for turn in session.turns:
        forked = sum(
            each.prompt.origin is turn.prompt.origin
            for each in session.turns
            if each.number < turn.number
        )
        assert (turn.branch is None) == (turn.prompt.parent is not None and not forked)
        assert msgspec.json.encode(turn.branch)
