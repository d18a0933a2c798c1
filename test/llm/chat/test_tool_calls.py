"""Tool calls: what is one, whoever finds it."""

from __future__ import annotations

import json

import pytest
from helpers.chat_families import FAMILIES

from torchrl_sglang.chat.tool_calls import ToolCall, find_calls, read_calls

ARGUMENTS = {"city": 'Zürich <"a" & \\b>', "days": 2, "hours": [1.5, None, True]}
CALL = ToolCall(name="weather", arguments=ARGUMENTS)


def test_calls_of_qwen():
    written = FAMILIES["qwen2.5"].write("I look.", calls=[CALL.to_message()] * 2)
    assert find_calls(written) == ("I look.\n", [CALL, CALL])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("weather", "[1]"), ("weather", "{"), (None, "{}"), ("weather", "[" * 9999)],
)
def test_what_is_no_call(name, arguments):
    """A server's parser passes on anything that a model writes."""
    text = f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    assert find_calls(f"{text}</tool_call>")[1] == []
    good = {"name": "weather", "parameters": json.dumps(ARGUMENTS)}
    bad = {"name": name, "parameters": arguments}
    assert read_calls([good, bad], "") == []
    (call,) = read_calls([good], "")
    assert call == CALL.to_message(call["id"])


def test_ids_are_the_models_or_new_ones():
    given = [{"name": "weather", "parameters": None}] * 2
    text = '{"id": "abcdefghi"}, {"id": "123456789"}'
    ids = [call["id"] for call in read_calls(given, text)]
    assert ids == ["abcdefghi", "123456789"]
    first, second = (call["id"] for call in read_calls(given, ""))
    assert first != second
