"""Tools of a collector, with a model that writes the calls of a script."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager

import pytest
from helpers.chat_families import FAMILIES, TEMPLATES
from helpers.scripted_server import (
    Reply,
    ScriptedServer,
    make_scripted_tokenizer,
    save_scripted_model,
    write_call,
)
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_sglang import AsyncLLMCollector, AsyncSGLang, SGLangWrapper
from torchrl_sglang.errors import CollectionError, ConfigurationError

TEXTS = [(TEMPLATES / "qwen3.jinja").read_text(), write_call("add", {"a": 1})] * 4
GOOD = write_call("add", {"a": 1, "b": 2})
BAD = '<tool_call>{{"name": "add", "arguments": {}}}</tool_call>'
NO_TOOLS = {"gemma2", "gemma3"}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_scripted_model(tmp_path_factory.mktemp("scripted"), texts=TEXTS)


@pytest.fixture
def run(folder):
    """Collects conversations with replies; returns them, and what was generated."""

    @contextmanager
    def collector_of(replies, template="qwen3", prefer_tokens=True, **options):
        tokenizer = make_scripted_tokenizer(TEXTS)
        script = [Reply(text=each) for each in replies]
        with ScriptedServer(folder, tokenizer, script) as server:
            engine = AsyncSGLang.connect(server.url)
            source = TEMPLATES / f"{template}.jinja"
            policy = SGLangWrapper(
                engine,
                chat_template=source.read_text() if source.exists() else template,
                generate_kwargs={"max_new_tokens": 512},
                prefer_tokens=prefer_tokens,
            )
            given = {
                "prompts": [{"query": "go"}],
                "tools": [add],
                "groups_per_batch": 1,
                "total_groups": 1,
                "max_retries": 2,
                **options,
            }
            try:
                with AsyncLLMCollector(policy=policy, **given) as collector:
                    yield collector, server, tokenizer
            finally:
                engine.shutdown()

    def run_collector(replies, **options):
        kept = []

        def reward(conversation, task):
            kept.append(conversation)
            return 1.0

        with collector_of(replies, rewards=reward, **options) as (collector, _, _):
            list(collector)
        return kept

    run_collector.open = collector_of
    return run_collector


def results(conversation):
    return [m["content"] for m in conversation.messages if m["role"] == "tool"]


CALLS = {
    "a call": (GOOD, ["3"]),
    "none": ("It is 3.", []),
    "in reasoning": (f"<think>I could {GOOD} but</think>It is 3.", []),
    "in reasoning without an end": (f"<think>I could {GOOD}", []),
    "behind reasoning": (f"<think>I will {GOOD}</think>\n\n{GOOD}", ["3"]),
    "beside one that is cut off": (GOOD + '<tool_call>\n{"name": "a', ["3", "end"]),
    "beside malformed ones": (
        "\n".join((BAD.format('{"a": }'), GOOD, BAD.format("[1]"))),
        ["Expecting value", "3", "arguments by name"],
    ),
    "of no tool": (write_call("sub", {}), ["no tool 'sub'"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_has_a_result(run, name):
    text, expected = CALLS[name]
    (conversation,) = run([text, "Done."])
    assert len(conversation.turns) == (2 if expected else 1)
    for result, part in zip(results(conversation), expected, strict=True):
        assert result == part or part in result
        assert result.isdigit() or result.startswith("Error: ")


def test_an_argument_may_have_any_name(run):
    """Also a parameter's of the caller of tools."""

    def wait(seconds: int, function: str) -> str:
        """Waits.

        Args:
            seconds: how long.
            function: for what.
        """
        return f"{function} {seconds}"

    text = write_call("wait", {"seconds": 3, "function": "tea"})
    (conversation,) = run([text, "Done."], tools=[wait])
    assert results(conversation) == ["tea 3"]


def test_calls_in_reasoning_that_the_prompt_begins(run):
    (conversation,) = run([f"I could {GOOD}"], template="deepseek-r1")
    assert len(conversation.turns) == 1
    (conversation,) = run([f"Hm {GOOD}</think>{GOOD}", "3"], template="deepseek-r1")
    assert results(conversation) == ["3"]


def test_a_parser_of_the_user_reads_no_reasoning(run):
    def parser(text):
        calls = [type("Call", (), {"tool": "add", "args": {"a": 1, "b": 2}})]
        return {"calls": calls * text.count("CALL")}

    replies = ["<think>CALL or CALL</think> CALL", "Done."]
    (conversation,) = run(replies, tool_parser=parser)
    assert results(conversation) == ["3"]


def mistral_parser(text):
    """Reads calls as Mistral's models write them."""
    _, _, calls = text.partition("[TOOL_CALLS]")
    return {
        "calls": [
            type("Call", (), {"tool": call["name"], "args": call["arguments"]})
            for call in json.loads(calls or "[]")
        ]
    }


def write_mistral(*ids):
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    return f"[TOOL_CALLS] {json.dumps([call | {'id': i} for i in ids])}"


@pytest.mark.parametrize("prefer_tokens", [True, False])
@pytest.mark.parametrize("template", sorted(set(FAMILIES) - NO_TOOLS))
def test_turns_of_every_family_of_templates(run, template, prefer_tokens):
    """Two rounds of calls, each prompt with all results; ids as the template wants."""
    written = [f"{GOOD}\n{GOOD}", GOOD, "Done."]
    options = {}
    if template == "deepseek-r1":
        # Its prompt begins the reasoning.
        written = [f"So.</think>{text}" for text in written]
    if template.startswith("mistral"):
        written = [write_mistral("abc123def", "def123abc"), write_mistral("x12345678")]
        written += ["Done."]
        options = {"tool_parser": mistral_parser}
    (conversation,) = run(
        written, template=template, prefer_tokens=prefer_tokens, **options
    )
    assert results(conversation) == ["3", "3", "3"]
    tools = [m for m in conversation.messages if m["role"] == "tool"]
    assert {m["name"] for m in tools} == {"add"}
    ids = [m["tool_call_id"] for m in tools]
    assert len(set(ids)) == 3
    if options:
        assert ids == ["abc123def", "def123abc", "x12345678"]
    # transformers renders the conversation, too.
    source = (TEMPLATES / f"{template}.jinja").read_text()
    (text,), _ = render_jinja_template(
        conversations=[conversation.messages], chat_template=source, **TOKENS
    )
    assert text.count("3") >= 3


@pytest.mark.parametrize("tag", ["1", "call_12345", "\\u00e912345678", "\\ud83d", ""])
@pytest.mark.parametrize("template", ["mistral-nemo", "mistral-v3", "qwen3"])
def test_calls_of_a_model_fit_its_template(run, template, tag):
    """Another id than nine letters and digits would end a collector with Mistral's."""
    call = write_call("add", {"a": 1, "b": 2}).replace(
        '"name"', f'"id": "{tag}", "name"'
    )
    odd = '<tool_call>{"name": "\\ud83d", "arguments": {"a": "\\ud83d"}}</tool_call>'
    (conversation,) = run([call, odd, "Done."], template=template)
    assert len(conversation.turns) == 3
    ids = [m["tool_call_id"] for m in conversation.messages if m["role"] == "tool"]
    if template.startswith("mistral"):
        assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
    elif tag in ("1", "call_12345"):
        assert ids[0] == tag


@pytest.mark.parametrize("template", sorted(NO_TOOLS))
def test_templates_without_messages_of_tools(run, template):
    with pytest.raises(ConfigurationError, match="refuses messages of the role 'tool'"):
        run([GOOD], template=template)


REFUSES = (
    "{% for m in messages %}{% if 'tired' in m.content %}"
    "{{ raise_exception('It is tired.') }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_a_template_that_refuses_a_later_turn_ends_the_collector(run):
    """Otherwise the groups in which nobody says this would be trained on alone."""

    def step(conversation, task):
        tired = "tired" in conversation.response and len(conversation.turns) == 1
        return "tired" if tired else None

    replies = ["tired", "fine", "fine", "fine"] * 4
    options = {"prompts": [{"query": "go"}] * 8, "total_groups": 8, "tools": None}
    with run.open(
        replies, template=REFUSES, step=step, rewards=lambda c, t: 1.0, **options
    ) as (collector, _, _):
        with pytest.raises(CollectionError, match=r"cannot go on: .*It is tired"):
            list(collector)
        assert collector.stats()["groups_retried"] == 0


def test_a_first_prompt_that_a_template_refuses_is_given_up(run):
    prompts = [{"query": "tired"}, {"query": "go"}]
    options = {"prompts": prompts, "total_groups": 1, "tools": None}
    (conversation,) = run(["Done."], template=REFUSES, **options)
    assert conversation.task["query"] == "go"
