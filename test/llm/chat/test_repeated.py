"""What requests repeat is read once, and read as it is."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.chat_families import FAMILIES, family_tokenizer
from helpers.talk import Talk

from torchrl_sglang.chat.repeated import LatestMessages, Repeated, read_once
from torchrl_sglang.gateway.dialects.anthropic import read_messages
from torchrl_sglang.gateway.dialects.openai import read_chat

TEXTS = ("Hi", "4 < 5", "Über 你", "a\n\nb", "{x} <b>", "1")
VALUES = ("1", 1, 1.0, True, None, "", [], ["1"], {"a": "1", "b": "2"})


def drawn(draw: random.Random) -> Any:
    """Returns a part of a request, with values that are equal in Python."""
    fields = [("role", "user"), ("content", draw.choice(VALUES)), ("x", "1")]
    block = {"type": "tool_use", "input": {"a": "1", "b": "2"}}
    if draw.random() < 0.5:
        block["input"] = {"b": "2", "a": "1"}
    fields.append(("blocks", [block] if draw.random() < 0.5 else draw.choice(VALUES)))
    draw.shuffle(fields)
    return dict(fields) if draw.random() < 0.9 else draw.choice(VALUES)


@pytest.mark.parametrize("seed", range(4))
def test_a_request_is_what_its_json_says(seed: int) -> None:
    draw, latest = random.Random(seed), LatestMessages()
    parts: list[Any] = []
    shared = 0
    for _ in range(100):
        parts = parts[: draw.randrange(len(parts) + 1)] + [drawn(draw) for _ in "ab"]
        text = json.dumps({"messages": parts, "tools": parts[:1], "n": 1})
        found = latest.share(json.loads(text))
        # The order of fields and the types of numbers are in the text.
        assert json.dumps(found) == text
        shared += sum(type(each) is Repeated for each in found["messages"])
    assert shared


@pytest.mark.parametrize("depth", [100, 900])
def test_messages_of_any_depth_are_returned(depth: int) -> None:
    body = json.loads('{"messages": [' + '{"x": ' * depth + '"1"' + "}" * depth + "]}")
    latest = LatestMessages()
    for _ in range(2):
        assert latest.share(body) == body
    assert latest.share({"input": [1]}) == {"input": [1]}


def test_parts_are_read_once_unless_reading_failed() -> None:
    asked = []

    @read_once
    def read(name: str, given: Any) -> list[str]:
        asked.append(name)
        if "bad" in given:
            raise ValueError(name)
        return [given["content"]]

    latest = LatestMessages()
    body = '{"messages": [{"content": "Hi"}, {"bad": "x"}]}'
    for number in range(2):
        good, bad = latest.share(json.loads(body))["messages"]
        assert read(f"good {number}", good) == ["Hi"]
        with pytest.raises(ValueError, match=f"bad {number}"):
            read(f"bad {number}", bad)
    assert asked == ["good 0", "bad 0", "bad 1"]
    copied = pickle.loads(pickle.dumps(good))
    assert (type(copied), copied) == (Repeated, {"content": "Hi"})


def as_openai(messages: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    return read_chat, {"model": "policy", "messages": messages}


def as_anthropic(messages: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    blocks = [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        for each in messages
    ]
    return read_messages, {"model": "policy", "max_tokens": 9, "messages": blocks}


@pytest.mark.parametrize("write", [as_openai, as_anthropic])
@pytest.mark.parametrize(
    "name", [n for n, family in FAMILIES.items() if not family.pieces]
)
def test_tokens_are_those_of_the_whole_template(name: str, write: Any) -> None:
    # A tokenizer of pieces puts spaces where the whole text has none; the prompts of
    # deepseek-r1 end in a text that its template writes there only.
    draw, latest, talk = random.Random(name), LatestMessages(), Talk(name)
    tokenizer, said = family_tokenizer(name), []
    for number in range(12):
        said.append({"role": "user", "content": f"{number} {draw.choice(TEXTS)}"})
        read, body = write(said)
        request = read(latest.share(json.loads(json.dumps(body))))
        prompt = talk.session.prompt(request.messages, request.setting, talk.template)
        whole = tokenizer.apply_chat_template(
            said, tokenize=False, add_generation_prompt=True
        )
        assert prompt.token_ids == tokenizer.encode(whole, add_special_tokens=False)
        assert (prompt.parent is None) == (number == 0 or name == "deepseek-r1")
        reply = f"{draw.choice(TEXTS)} {number}"
        talk.setting = request.setting
        talk.ask(request.messages, reply)
        said.append({"role": "assistant", "content": reply})
