"""Tool calls: what is one, whoever finds it."""

from __future__ import annotations

import json
import random
import subprocess

import pytest
from helpers.chat_families import FAMILIES

from torchrl_sglang.backends.launch.cpu import engine_python
from torchrl_sglang.chat.tool_calls import (
    ToolCall,
    UnreadableCall,
    behind_reasoning,
    find_calls,
    read_calls,
)

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
    (call,) = find_calls(f"{text}</tool_call>")[1]
    assert isinstance(call, UnreadableCall)
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


def qwen(name, arguments, end="\n</tool_call>", key="arguments", **more):
    written = json.dumps({"name": name, key: arguments, **more}, ensure_ascii=False)
    return f"<tool_call>\n{written}{end}"


def one(**arguments):
    return ToolCall(name="f", arguments=arguments)


TEXTS = {
    # Texts of arguments that hold marks.
    qwen("f", {"a": "x = {} </tool_call> y"}): [one(a="x = {} </tool_call> y")],
    qwen("f", {"a": qwen("g", {})}): [one(a=qwen("g", {}))],
    qwen("f", {"a": "</think>"}): [one(a="</think>")],
    qwen("f", {"a": '\\" <think>'}): [one(a='\\" <think>')],
    # Other forms of arguments.
    qwen("f", '{"a": 1}'): [one(a=1)],
    qwen("f", {"a": 1}, key="parameters"): [one(a=1)],
    qwen("f", None): [one()],
    '<tool_call>{"name": "f"}</tool_call>': [one()],
    # Reasoning.
    f"<think>{qwen('g', {})}</think>{qwen('f', {})}": [one()],
    f"<think>a</think>{qwen('f', {})}<think>{qwen('g', {})}": [one()],
    f"{qwen('g', {})}</think>{qwen('f', {'a': 2})}": [one(a=2)],
    f"<think>{qwen('g', {})}": [],
    f"[THINK]{qwen('g', {})}[/THINK]No.": [],
    # No calls.
    "Calls are between <tool_call> and its end.": [],
    f"Write <tool_call> so: {qwen('f', {})}": [one()],
    "": [],
}


@pytest.mark.parametrize("text", TEXTS)
def test_calls_that_a_model_writes(text):
    _, calls = find_calls(text)
    assert calls == TEXTS[text]


def test_an_id_that_a_model_wrote():
    (call,) = find_calls(qwen("f", {}, id="call_7"))[1]
    assert call.to_message()["id"] == "call_7"


UNREADABLE = {
    qwen("f", {"a": 1})[:-20]: "does not end",
    '<tool_call>{"' * 3: "does not end",
    qwen("f", {"a": "b"}).replace("b", "\n"): "control character",
    qwen("f", {}, end=" and</tool_call>"): "Extra data",
    "<tool_call>f(a=1)</tool_call>": "Expecting value",
    qwen("f", "[1]"): "arguments by name",
    "<tool_call>[]</tool_call>": "arguments by name",
    "<tool_call>" + "[" * 9999 + "</tool_call>": "recursion",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_calls_that_cannot_be_read(text):
    """They are reported, and a call beside them is read."""
    (call,) = find_calls(text)[1]
    assert UNREADABLE[text] in call.reason
    rest, calls = find_calls(qwen("f", {"a": 3}) + text)
    assert calls == [one(a=3), call]
    assert rest == text


@pytest.mark.parametrize(
    ("text", "prompt", "body"),
    [
        ("<think>a</think>b", "", "b"),
        ("\n<think>a", "", ""),
        ("a</think>b", "<think>\n", "b"),
        ("a", "<think>\n", ""),
        ("a", "<think>\n\n</think>\n\n", "a"),
        ("a </think> b", "", "a </think> b"),
    ],
)
def test_what_is_behind_reasoning(text, prompt, body):
    assert behind_reasoning(text, prompt) == body


UNITS = (
    *("<tool_call>\n{", '<tool_call>{"a": {}} ', "<tool_call>{</tool_call>", "<think>"),
    *('<tool_call>{"', '<tool_call>{"\\', '<tool_call>{\\"</tool_call>', "</think>"),
    *('<tool_call>{"a": "', '<tool_call>["a",', "<tool_call>", "}\n", "<tool_call>\n"),
)


@pytest.mark.parametrize("end", ["", "</tool_call>"])
@pytest.mark.parametrize("unit", UNITS)
def test_repetitions_are_read_in_linear_time(unit, end):
    """So many characters took half a minute when the time was quadratic."""
    find_calls(unit * (2**18 // len(unit)) + end)


PROGRAM = """
import json, sys
# On CPU it may be built for another PyTorch, and parsers read no images.
sys.modules["torchvision"] = None
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
tools = [
    Tool(type="function", function={"name": name, "parameters": {"type": "object"}})
    for name in "fg"
]
found = []
for text in json.load(sys.stdin):
    _, calls = FunctionCallParser(tools, "qwen25").parse_non_stream(text)
    found.append([(call.name, json.loads(call.parameters)) for call in calls])
print()
print(json.dumps(found))
"""
PIECES = [
    *("I look.\n", "\n", "```\n", "{", '"', "<tool_call> is a mark.\n"),
    *(qwen("f", {"a": 1}), qwen("g", ARGUMENTS), qwen("f", {"a": "}\n</x> \\"})),
    *(qwen("f", {"a": "x = {} </tool_call>"}), qwen("g", {}, key="parameters")),
    *(qwen("f", {}, end="}\n</tool_call>"), '<tool_call>\n{"name": \n</tool_call>'),
]


@pytest.mark.slow
def test_calls_are_those_of_sglang():
    """Its own parser of Qwen's calls reads random texts."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 6))) for _ in range(3000)]
    done = subprocess.run(
        [engine_python(), "-c", PROGRAM],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    for text, expected in zip(
        texts, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        calls = [each for each in find_calls(text)[1] if isinstance(each, ToolCall)]
        assert [[each.name, each.arguments] for each in calls] == expected, text
