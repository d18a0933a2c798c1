"""Streams: what is told early is never taken back, and what is recorded is the same."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager

import httpx
import pytest
import torch
from helpers.chat_families import family_tokenizer
from helpers.gateway_client import anthropic_client, openai_client
from helpers.log_probs import TOLERANCE
from helpers.tool_template import ADD, CALL, TOOL_TEMPLATE, TOOLS

from torchrl_sglang import Gateway
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.gateway.drafts import (
    CALL_MARKS,
    Detokenizer,
    Draft,
    DraftReader,
    without_ends,
)

HELLO = [{"role": "user", "content": "hello"}]
AS_ANTHROPIC = {
    "name": "add",
    "description": "Adds.",
    "input_schema": ADD["parameters"],
}

LENGTH = 150
THOUGHT = "<think>[a-f]{80}</think>"
SAID = f"{THOUGHT}[g-k]{{{LENGTH}}}\n{CALL}"

ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = [
    "Hello, world.",
    "  Spaces and lines \n\n around \n",
    "<think>Let me see: 1 < 2 and </thin is no end.</think>\n\nIt is 2.",
    "<think>\nLines.\n</think>\nNo call <tool_cal here.",
    "<think>Never ended, \n ",
    "<think></think>Nothing thought.",
    "",
    "<",
    f"Now:\n{ONE}",
    f"<think>Hm.</think>\n\n{ONE}\n{ONE}",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1',
    "<tool_call>\nno JSON\n</tool_call> and more",
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    '{"name": "add", "parameters": {"a": 1}}',
    'Say {"name": "add", "parameters": {"a": 1}}',
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
    "Ünïcödé 🙂 text <think>in the middle</think> of it.",
]


@contextmanager
def policy_of(engine, call_parser, reasoning_parser):
    with Gateway(
        engine,
        chat_template=TOOL_TEMPLATE,
        tool_call_parser=call_parser,
        reasoning_parser=reasoning_parser,
    ) as gateway:
        yield gateway.policy


async def read_all(policy, text, tools, reasoning_parser, call_parser):
    """Returns the drafts of every beginning of a text, and the message of it all."""
    reader = DraftReader(
        policy._separate if reasoning_parser else None,
        reasoning_parser=reasoning_parser,
        call_parser=call_parser if tools else None,
    )
    drafts = [await reader.read(text[:size]) for size in range(len(text) + 1)]
    return drafts, {"content": text} | await policy._parse(text, tools)


@pytest.mark.parametrize("reasoning_parser", [None, "qwen3", "deepseek-r1"])
@pytest.mark.parametrize(
    "call_parser", ["qwen25", "hermes", "qwen3_coder", "llama3", "mistral"]
)
def test_drafts_are_beginnings_of_what_the_parsers_find(
    grammar_engine, call_parser, reasoning_parser
):
    late = 0
    with policy_of(grammar_engine, call_parser, reasoning_parser) as policy:
        for text in TEXTS:
            for tools in ([], TOOLS):
                reads = read_all(policy, text, tools, reasoning_parser, call_parser)
                drafts, message = asyncio.run(reads)
                reasoning = message.get("reasoning_content") or ""
                if reasoning and "🙂" in text and reasoning_parser == "qwen3":
                    # What begins as content is told as content; the stream ends with
                    # an error then.
                    continue
                told = Draft()
                for draft in drafts:
                    assert draft.reasoning.startswith(told.reasoning), text
                    assert draft.content.startswith(told.content), text
                    told = draft
                assert reasoning.startswith(told.reasoning), text
                assert message["content"].startswith(told.content), text
                late += len(reasoning + message["content"]) - len(
                    told.reasoning + told.content
                )
                if reasoning_parser is None and not tools:
                    assert told.content == without_ends(text, ())
    # Most of it is told before the end.
    assert late < 450


def test_only_parsers_whose_marks_are_known_are_streamed():
    async def read(**parsers):
        reader = DraftReader(None, **parsers)
        return await reader.read("Hello <tool")

    assert asyncio.run(read()).content == "Hello <tool"
    assert asyncio.run(read(call_parser="qwen25")).content == "Hello"
    assert asyncio.run(read(call_parser="of tomorrow")).content == ""
    assert all(
        mark and mark.strip() == mark for row in CALL_MARKS.values() for mark in row
    )


def test_stop_strings_are_held_back():
    async def read(text):
        return (await DraftReader(None, stops=["END", "\n\n"]).read(text)).content

    for text, told in (("a", "a"), ("a E", "a "), ("a EN", "a "), ("a EB", "a EB")):
        assert asyncio.run(read(text)) == told
    assert asyncio.run(read("a\n")) == "a"


def test_characters_of_several_tokens():
    text = "Grüße 🙂!"
    tokens = list(text.encode())
    read = Detokenizer(lambda ids: bytes(ids).decode(errors="replace"))
    told = [read(tokens[:size]) for size in range(len(tokens) + 1)]
    assert all(text.startswith(each) for each in told)
    assert told[-1] == text


@pytest.mark.parametrize("family", ["mistral-v3", "llama3.1"])
def test_characters_that_have_no_token(family):
    """A response can be cut within one; pieces are then decoded otherwise before."""
    template = ChatTemplate(family_tokenizer(family))
    for text in ("Hi 🙂🙂, ü漢", "漢漢", "a 漢 b"):
        tokens = template.encode_behind(text)
        read = Detokenizer(template.decode, template.byte_tokens)
        for size in range(len(tokens) + 1):
            told = read(tokens[:size])
            assert template.decode(tokens[:size]).startswith(told)
            assert template.decode([*tokens[:size], tokens[0]]).startswith(told)
    assert read(tokens) == text
    assert len(template.byte_tokens) == (256 if family == "mistral-v3" else 0)


@contextmanager
def session_of(engine, regex=SAID, **arguments):
    parsers = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
    forced = {"regex": regex, "max_new_tokens": 1000, "temperature": 0.0}
    given = {"chat_template": TOOL_TEMPLATE, **parsers, **arguments}
    with Gateway(engine, forced_sampling_params=forced, **given) as gateway:
        session = gateway.session()
        session.policy = gateway.policy
        yield session


def chat_deltas(session):
    with openai_client(session) as client:
        chunks = client.chat.completions.create(
            model="policy", messages=HELLO, tools=TOOLS, stream=True
        )
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    reasoning = [getattr(each, "reasoning_content", None) or "" for each in deltas]
    calls = [call for each in deltas for call in each.tool_calls or ()]
    return reasoning, [each.content or "" for each in deltas], calls


def message_deltas(session):

    reasoning, content, calls = [], [], []
    with (
        anthropic_client(session) as client,
        client.messages.stream(
            model="policy", messages=HELLO, max_tokens=2000, tools=[AS_ANTHROPIC]
        ) as stream,
    ):
        for event in stream:
            if event.type == "thinking":
                reasoning.append(event.thinking)
            elif event.type == "text":
                content.append(event.text)
        final = stream.get_final_message()
    calls = [block for block in final.content if block.type == "tool_use"]
    usage = final.usage
    (turn,) = session.turns
    read = usage.input_tokens + usage.cache_read_input_tokens
    assert read == len(turn.prompt.token_ids)
    assert final.content[0].signature
    assert final.content[0].thinking == "".join(reasoning)
    return reasoning, content, calls


def response_deltas(session):
    reasoning, content = [], []
    with (
        openai_client(session) as client,
        client.responses.stream(
            model="policy", input="hello", tools=[RESPONSES_TOOL]
        ) as stream,
    ):
        for event in stream:
            if event.type == "response.reasoning_text.delta":
                reasoning.append(event.delta)
            elif event.type == "response.output_text.delta":
                content.append(event.delta)
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert final.output_text == "".join(content)
    return reasoning, content, calls


RESPONSES_TOOL = {"type": "function", **ADD, "strict": False}
ASKED = {
    chat_deltas: ("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS}),
    message_deltas: (
        "/v1/messages",
        {"messages": HELLO, "tools": [AS_ANTHROPIC], "max_tokens": 2000},
    ),
    response_deltas: ("/v1/responses", {"input": "hello", "tools": [RESPONSES_TOOL]}),
}


@pytest.mark.parametrize(
    "ask",
    [
        chat_deltas,
        pytest.param(message_deltas, marks=pytest.mark.slow),
        pytest.param(response_deltas, marks=pytest.mark.slow),
    ],
)
def test_a_stream_comes_as_it_is_generated(grammar_engine, score, ask):
    with session_of(grammar_engine) as session:
        reasoning, content, calls = ask(session)
        (turn,) = session.turns
    path, body = ASKED[ask]
    with session_of(grammar_engine) as session:
        headers = {"Authorization": f"Bearer {session.key}"}
        httpx.post(session.url + path, json=body, headers=headers, timeout=60)
        (whole,) = session.turns
    assert turn.token_ids == whole.token_ids
    found = torch.tensor(turn.completion.log_probs)
    expected = score(turn.token_ids)[len(turn.prompt.token_ids) :]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    assert "".join(reasoning) == whole.reply["reasoning_content"]
    assert "".join(content) == whole.reply["content"]
    assert len(calls) == len(whole.reply["tool_calls"]) == 1
    # It does not come in one piece.
    assert sum(map(bool, [*reasoning, *content])) > 2


def test_text_of_plain_completions(grammar_engine):
    with (
        session_of(grammar_engine, "[a-z]{150}") as session,
        openai_client(session) as client,
    ):
        chunks = client.completions.create(
            model="policy", prompt="Once ", stream=True, echo=True
        )
        texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == f"Once {session.turns[0].text}"
    assert sum(map(bool, texts)) > 2


def test_log_probs_come_with_the_end(grammar_engine):
    with (
        session_of(grammar_engine, "[a-z]{120}") as session,
        openai_client(session) as client,
    ):
        chunks = client.chat.completions.create(
            model="policy", messages=HELLO, stream=True, logprobs=True
        )
        choices = [choice for chunk in chunks for choice in chunk.choices]
    (rows,) = [choice.logprobs.content for choice in choices if choice.logprobs]
    assert len(rows) == len(session.turns[0].completion.token_ids)


def test_several_responses_at_once(grammar_engine):
    with (
        session_of(grammar_engine, "[a-z]{120}") as session,
        openai_client(session) as client,
    ):
        chunks = client.chat.completions.create(
            model="policy", messages=HELLO, stream=True, n=2
        )
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == [turn.text for turn in session.turns]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"]
)
def test_a_response_that_begins_anew(grammar_engine, path, monkeypatch):
    """What was told cannot be taken back: an error, and nothing is recorded."""
    with session_of(grammar_engine, "[a-z]{40}") as session:
        policy = session.policy
        asked = policy.respond

        async def respond(prompt, sampling, *, progress, **others):
            progress.begin(3)
            progress.tell(0, Draft(content="0123"))
            await asyncio.sleep(0.1)
            return await asked(prompt, sampling, **others)

        monkeypatch.setattr(policy, "respond", respond)
        body = {"stream": True, "max_tokens": 50, "messages": HELLO}
        if path == "/v1/responses":
            body = {"stream": True, "input": "hello"}
        headers = {"Authorization": f"Bearer {session.key}"}
        lines = []
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream(
                "POST", session.url + path, json=body, headers=headers, timeout=60
            ) as answer,
        ):
            lines.extend(answer.iter_lines())
        assert any("0123" in line for line in lines)
        errors = [line for line in lines if "had to begin anew" in line]
        assert errors
        assert json.loads(errors[-1].removeprefix("data: "))
        assert not session.turns
