"""What a choice of tools allows: XGrammar accepts it, and SGLang's parsers read it."""

from __future__ import annotations

import json
import subprocess
from itertools import product

import pytest

from torchrl_sglang.backends.launch.cpu import engine_python
from torchrl_sglang.chat.call_grammars import (
    CALL_FORMATS,
    ToolChoice,
    find_format,
    find_marks,
    response_grammar,
)
from torchrl_sglang.errors import ConfigurationError

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["a", "s"],
}
ARGUMENTS = {"a": 1, "s": "x y"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("f", "g")
]
MARKS = ("<think>", "</think>")
REQUIRED = ToolChoice(required=True)
ONE = ToolChoice(parallel=False)
ONLY_G = ToolChoice(names=("g",))
CALL_G = ToolChoice(required=True, names=("g",), parallel=False)

CASES = [
    # choice, other arguments, what is accepted, what is not; F and G are calls.
    (REQUIRED, {}, ["F", "FG", "GF"], ["", "so", "so F"]),
    (CALL_G, {}, ["G"], ["F", "GG", "so G"]),
    (ONE, {}, ["so", "F", "so G"], ["FG", "so FG"]),
    (ONLY_G, {}, ["so", "so G", "GG"], ["F", "so F", "GF"]),
    (REQUIRED, {"marks": MARKS}, ["F", "<think>h</think>\n\nF"], ["h</think>F"]),
    (REQUIRED, {"marks": MARKS, "thinks": True}, ["h</think>\nFG"], ["F", "h"]),
    (ONE, {"marks": MARKS, "thinks": True}, ["h</think>so F", "h</think>"], ["so F"]),
    (ToolChoice(), {"schema": SCHEMA}, ["FG", json.dumps(ARGUMENTS)], ["so", "so F"]),
]

PROGRAM = """
import json, sys
# On CPU it may be built for another PyTorch, and parsers read no images.
sys.modules["torchvision"] = None
import xgrammar
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from xgrammar.testing import _is_grammar_accept_string as accepts

given = json.load(sys.stdin)
grammars = [xgrammar.Grammar.from_structural_tag(tag) for tag, _ in given["accepts"]]
texts = [text for _, text in given["accepts"]]
tools = [Tool(**tool) for tool in given["tools"]]
calls = {}
for name, text in given["parses"].items():
    _, found = FunctionCallParser(tools, name).parse_non_stream(text)
    calls[name] = [[call.name, json.loads(call.parameters)] for call in found]
accepted = [accepts(*each) for each in zip(grammars, texts)]
print("\\n" + json.dumps({"accepts": accepted, "calls": calls}))
"""


def written(name: str, text: str) -> str:
    """Returns a text with calls in the format of a parser."""
    form = CALL_FORMATS[name]
    arguments = json.dumps(ARGUMENTS)
    if form.arguments == "qwen_xml_parameter":
        pairs = ARGUMENTS.items()
        texts = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in pairs]
        arguments = "\n".join(texts)
    calls = [each for each in text if each in "FG"]
    names = [each.lower() for each in calls]
    body = [form.begin + each + form.middle + arguments + form.end for each in names]
    whole = form.open + form.separator.join(body) + form.close if calls else ""
    return text.removesuffix("".join(calls)) + whole


@pytest.fixture(scope="module")
def judged():
    """What the engine's own XGrammar and parsers say of all cases."""
    cases = [
        (name, choice, more, text)
        for name, (choice, more, good, bad) in product(CALL_FORMATS, CASES)
        for text in [*good, *bad]
    ]
    tags = [
        (response_grammar(TOOLS, choice, calls=CALL_FORMATS[name], **more), name, text)
        for name, choice, more, text in cases
    ]
    content = {
        "accepts": [(tag, written(name, text)) for tag, name, text in tags],
        "parses": {name: written(name, "FG") for name in CALL_FORMATS},
        "tools": TOOLS,
    }
    done = subprocess.run(
        [engine_python(), "-c", PROGRAM],
        input=json.dumps(content),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    kept = {
        (name, text, tag): ok
        for (tag, name, text), ok in zip(tags, said["accepts"], strict=True)
    }
    return kept, said["calls"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_grammar_accepts_what_a_choice_allows(judged, name):
    accepted, _ = judged
    for choice, more, good, bad in CASES:
        tag = response_grammar(TOOLS, choice, calls=CALL_FORMATS[name], **more)
        found = [text for text in [*good, *bad] if accepted[name, text, tag]]
        assert found == good, (choice, more)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_sglangs_parser_reads_what_a_grammar_writes(judged, name):
    assert judged[1][name] == [["f", ARGUMENTS], ["g", ARGUMENTS]]


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigurationError, match=r"qwen25.*tool_call_parser='gpt-oss'"):
        find_format("gpt-oss")
    with pytest.raises(ConfigurationError, match="reasoning_parser='gpt-oss'"):
        find_marks("gpt-oss")
    assert find_marks(None) is None
