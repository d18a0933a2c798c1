"""OpenAI's Responses, through OpenAI's client, in front of a real engine.

The model writes noise, so a regular expression says what it may write. Chat completions
are the oracle of what is recorded, and the client's own types that of what is answered.
"""

from __future__ import annotations

import itertools
import json
import re

import openai
import pytest
import requests
import torch
from helpers.gateway_client import openai_client
from helpers.log_probs import TOLERANCE
from helpers.tool_template import ADD, CALL, THOUGHT, TOOLS, gateway_of
from openai.types.responses import Response
from pydantic import BaseModel

from torchrl_sglang.gateway.dialects.responses.events import EventStream
from torchrl_sglang.gateway.routes.sessions import IGNORED

FUNCTIONS = [{"type": "function", **ADD}]
TURN = f"{THOUGHT}[g-k]{{3}}{CALL}\\n{CALL}"


def written(regex, **arguments):
    """Arguments that make the model write this, always the same."""
    body = {"regex": regex, **arguments.pop("extra_body", {})}
    most = {"max_output_tokens": 300, "temperature": 0}
    return {"model": "m", "extra_body": body, **most, **arguments}


@pytest.fixture
def session(gateway):
    return gateway.session()


@pytest.fixture
def client(session):
    with openai_client(session, max_retries=0) as client:
        yield client


def post(session, path="/responses", **body):
    given = {"model": "m", "input": "hello", "max_output_tokens": 4, **body}
    return requests.post(session.base_url + path, json=given, timeout=60)


# Conversations.


def outputs_of(response):
    """Results of a response's calls."""
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": str(1 + json.loads(call.arguments)["a"]),
        }
        for call in calls
    ]


def items_of(response):
    return [item.to_dict() for item in response.output]


def only_encrypted(response):
    items = items_of(response)
    for item in items:
        item.pop("content" if item["type"] == "reasoning" else "id", None)
    return items


def interleaved(response):
    """Each call, and its result behind it."""
    calls = [item.to_dict() for item in response.output if item.type == "function_call"]
    others = [item for item in items_of(response) if item["type"] != "function_call"]
    pairs = zip(calls, outputs_of(response), strict=True)
    return [*others, *(item for pair in pairs for item in pair)]


def references(response):
    return [{"type": "item_reference", "id": item.id} for item in response.output]


def ask(client, *, stream, **arguments):
    if not stream:
        return client.responses.create(**arguments)
    with client.responses.stream(**arguments) as events:
        for _ in events:
            pass
        return events.get_final_response()


WAYS = {
    "stateless": (items_of, {"store": False}),
    "stream": (items_of, {"store": False, "stream": True}),
    "summary": (items_of, {"store": False, "reasoning": {"summary": "auto"}}),
    "encrypted": (only_encrypted, {"include": ["reasoning.encrypted_content"]}),
    "interleaved": (interleaved, {"store": False}),
    "references": (references, {}),
    "references in a stream": (references, {"stream": True}),
    "previous_response_id": (None, {}),
}


def converse(client, way):
    """Holds a conversation of three turns with tools."""
    kept, arguments = WAYS[way]
    arguments = {"stream": False, "tools": FUNCTIONS, **arguments}
    items = [{"role": "user", "content": "hello"}]
    for _ in range(3):
        response = ask(client, input=items, **written(TURN), **arguments)
        assert response.status == "completed"
        if kept is None:
            arguments["previous_response_id"] = response.id
            items = outputs_of(response)
        else:
            items += kept(response)
            items += [] if kept is interleaved else outputs_of(response)


def converse_in_chat(client):
    messages = [{"role": "user", "content": "hello"}]
    for _ in range(3):
        arguments = written(TURN, tools=TOOLS)
        arguments["max_tokens"] = arguments.pop("max_output_tokens")
        answer = client.chat.completions.create(messages=messages, **arguments)
        said = answer.choices[0].message
        messages.append(said.to_dict())
        for call in said.tool_calls:
            result = str(1 + json.loads(call.function.arguments)["a"])
            about = {"role": "tool", "tool_call_id": call.id}
            messages.append({**about, "content": result})


@pytest.fixture(scope="module")
def chat_turns(gateway):
    session = gateway.session()
    with openai_client(session) as client:
        converse_in_chat(client)
    return session.turns


QUICK = {"stateless", "encrypted", "references in a stream", "previous_response_id"}
"""Of each kind of history one."""


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[] if way in QUICK else pytest.mark.slow) for way in WAYS],
)
def test_the_same_is_recorded_as_of_chat(client, session, chat_turns, score, way):
    converse(client, way)
    assert [turn.token_ids for turn in session.turns] == [
        turn.token_ids for turn in chat_turns
    ]
    assert [turn.prompt.parent for turn in session.turns] == [None, 0, 1]
    assert len(session.trajectories()) == 1
    turn = session.turns[-1]
    expected = score(turn.token_ids)[turn.prompt.num_tokens :]
    found = torch.tensor(turn.completion.log_probs)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_instructions_are_of_one_response(client, session):
    ask = {"input": "hello", "max_output_tokens": 4, "model": "m"}
    first = client.responses.create(instructions="Be kind.", **ask)
    client.responses.create(
        previous_response_id=first.id, instructions="Be kind.", **ask
    )
    client.responses.create(previous_response_id=first.id, **ask)
    system = {"role": "system", "content": "Be kind."}
    assert [turn.prompt.messages[0] == system for turn in session.turns] == [
        *(True, True, False)
    ]
    assert [turn.prompt.parent for turn in session.turns] == [None, 0, None]
    assert len(session.turns[2].prompt.messages) == 3


def test_the_response_that_is_named_is_gone_on_from(client, session):
    """Also where another one has the same text."""
    first, second = (
        client.responses.create(input="hello", **written("[a-c]{3}")) for _ in range(2)
    )
    assert first.output_text == second.output_text
    for named in (first, second, first):
        client.responses.create(
            input="go", previous_response_id=named.id, **written("[a-c]{3}")
        )
    parents = [turn.prompt.parent for turn in session.turns]
    assert parents == [None, None, 0, 1, 0]


CUSTOM = {"type": "custom", "name": "shell", "description": "Runs."}
IN_SPACE = {"type": "namespace", "name": "files", "tools": FUNCTIONS}


def call_of(name, arguments):
    """Regular expression of a call in Qwen's format."""
    return (
        f'<tool_call>\\n\\{{"name": "{name}", "arguments": {arguments}\\}}\\n'
        f"</tool_call>"
    )


@pytest.mark.parametrize(
    ("tool", "written_call", "kind", "fields"),
    [
        (
            *(CUSTOM, call_of("shell", r'\{"input": "l[sS]"\}')),
            *("custom_tool_call", {"name": "shell"}),
        ),
        # A text that only looks like the argument's.
        (
            *(CUSTOM, call_of("shell", r'\{"inputs": 1\}'), "custom_tool_call"),
            {"name": "shell", "input": '{"inputs": 1}'},
        ),
        (
            *(IN_SPACE, call_of("files__add", r'\{"a": 1\}'), "function_call"),
            {"name": "add", "namespace": "files", "arguments": '{"a": 1}'},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_other_types(
    client, session, tool, written_call, kind, fields, stream
):
    items = [{"role": "user", "content": "hello"}]
    arguments = written(written_call, tools=[tool], store=False)
    for _ in range(2):
        response = ask(client, input=items, stream=stream, **arguments)
        (call,) = response.output
        assert call.type == kind
        assert fields.items() <= call.to_dict().items()
        output = {"type": f"{kind}_output", "call_id": call.call_id, "output": "3"}
        items += [call.to_dict(), output]
    assert [turn.prompt.parent for turn in session.turns] == [None, 0]
    assert session.turns[1].prompt.messages[-1]["content"] == "3"


# Streams.

_ITEM = ("response.output_item.added", "response.output_item.done")
_PART = ("response.content_part.added", "response.content_part.done")


def types_of_text(name, part=()):
    added, done = part or ((), ())
    inner = [f"{name}.delta", f"{name}.done"]
    return [_ITEM[0], *([added] if part else []), *inner, *([done] if part else [])]


def collapsed(types):
    """Types of events; deltas that follow each other count once."""
    return [kind for kind, _ in itertools.groupby(types)]


def test_events_are_in_order(client, session):
    arguments = written(f"{THOUGHT}[g-k]{{3}}{CALL}", tools=FUNCTIONS)
    events = list(client.responses.create(input="hello", stream=True, **arguments))
    for event in events:
        type(event).model_validate(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert collapsed(event.type for event in events) == [
        "response.created",
        "response.in_progress",
        *types_of_text("response.reasoning_text", _PART),
        _ITEM[1],
        *types_of_text("response.output_text", _PART),
        _ITEM[1],
        *types_of_text("response.function_call_arguments"),
        _ITEM[1],
        "response.completed",
    ]
    last = events[-1].response
    done = [event.item for event in events if event.type == _ITEM[1]]
    assert done == last.output
    assert client.responses.retrieve(last.id).to_dict() == last.to_dict()
    assert events[0].response.id == last.id
    assert events[0].response.created_at == last.created_at


def test_summaries_are_streamed(client):
    arguments = written(THOUGHT + "[g-k]", reasoning={"summary": "auto"})
    events = list(client.responses.create(input="hello", stream=True, **arguments))
    for event in events:
        type(event).model_validate(event.to_dict())
    said = "".join(
        event.delta
        for event in events
        if event.type == "response.reasoning_summary_text.delta"
    )
    reasoning = events[-1].response.output[0]
    assert [part.text for part in reasoning.summary] == [said]
    assert len(said) == 4
    assert reasoning.content is None


def grown(items, step):
    """Yields items as they grow, a few letters at a time."""
    for count in range(len(items)):
        for end in range(0, len(json.dumps(items[count])), step):
            last = json.loads(json.dumps(items[count]))
            for key in ("arguments", "input"):
                if key in last:
                    last[key] = last[key][:end]
            for part in (*last.get("content", ()), *last.get("summary", ())):
                part["text"] = part["text"][:end]
            yield [*items[:count], last]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_events_of_a_response_that_grows(client, step):
    """However it grows, clients have read the same in the end."""
    arguments = written(f"{THOUGHT}[g-k]{{3}}{CALL}\\n{CALL}", tools=FUNCTIONS)
    response = client.responses.create(input="hello", **arguments).to_dict()
    stream = EventStream(response)
    sent = list(stream.begin())
    for items in grown(response["output"], step):
        sent += stream.grow(items)
    sent += stream.end(response)
    events = [json.loads(each.split(b"data: ")[1]) for each in sent]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    said: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            key = event["item_id"]
            said[key] = said.get(key, "") + event["delta"]
    assert list(said) == [item["id"] for item in response["output"]]
    texts = [
        item["arguments"] if "arguments" in item else item["content"][0]["text"]
        for item in response["output"]
    ]
    assert list(said.values()) == texts
    done = [each["item"] for each in events if each["type"] == _ITEM[1]]
    assert done == response["output"]
    assert events[-1]["response"] == response


def test_a_stream_that_fails(fake, fake_engine):
    arguments = {"model": "m", "input": "hello", "stream": True}
    limits = {"keep_alive_seconds": 0.02, "request_timeout": 0.2}
    with gateway_of(fake_engine, **limits) as gateway:
        session = gateway.session()
        client = openai_client(session)
        with fake.misbehaving("hang"):
            text = post(session, stream=True).text
            with pytest.raises(openai.APIError, match="no answer"):
                list(client.responses.create(**arguments))
            fake.recover()
        client.close()
    events = [
        json.loads(each) for each in re.findall("^data: (.*)$", text, re.MULTILINE)
    ]
    types = [event["type"] for event in events]
    # Those in the middle are signs of life, which comments are not to all clients.
    assert types[0] == "response.created"
    assert types[1:-2] == ["response.in_progress"] * len(types[1:-2])
    assert types[-2:] == ["error", "response.failed"]
    assert len(types) > 5
    assert ": waiting" not in text
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    failed = Response.model_validate(events[-1]["response"])
    assert failed.status == "failed"
    assert failed.error.code == "server_error"
    assert "no answer" in failed.error.message


# Answers.


class Sum(BaseModel):
    number: int
    known: bool


def test_structured_output(client):
    arguments = {"model": "m", "input": "hello", "temperature": 0.1}
    answer = client.responses.parse(text_format=Sum, **arguments)
    assert isinstance(answer.output_parsed, Sum)
    form = {"format": {"type": "json_object"}}
    said = client.responses.create(text=form, max_output_tokens=60, **arguments)
    assert said.output_text.startswith("{")
    assert said.text.format.type == "json_object"


SHELL = {"type": "custom", "name": "shell"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"add", "shell"}),
        ({"type": "function", "name": "add"}, {"add"}),
        (SHELL, {"shell"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [SHELL]},
            {"shell"},
        ),
    ],
)
def test_a_choice_of_tools_is_kept_to(grammar_engine, choice, names):
    # Noise would begin to reason, and not end it.
    with gateway_of(grammar_engine, reasoning_parser=None) as gateway:
        session = gateway.session()
        client = openai_client(session)
        number = {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
        }
        response = client.responses.create(
            model="m",
            input="hello",
            tools=[{**FUNCTIONS[0], "parameters": number}, CUSTOM],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_output_tokens=100,
        )
        client.close()
    # Noise does not end the text of a custom tool.
    name = re.match(r'<tool_call>\n{"name": "(\w+)"', session.turns[0].text)[1]
    assert name in names
    assert name != "add" or response.output[0].type == "function_call"
    assert response.tool_choice != "auto"


def test_usage_and_log_probs(client, session):
    arguments = written(THOUGHT + "[g-k]{3}", top_logprobs=2)
    response = client.responses.create(
        input="hello", include=["message.output_text.logprobs"], **arguments
    )
    Response.model_validate(response.to_dict())
    (turn,) = session.turns
    usage, done = response.usage, turn.completion
    assert usage.input_tokens == turn.prompt.num_tokens
    assert usage.output_tokens == len(done.token_ids)
    said = turn.reply["reasoning_content"] + turn.reply["content"]
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    rows = response.output[1].content[0].logprobs
    assert [row.logprob for row in rows] == done.log_probs
    assert all(len(row.top_logprobs) == 2 for row in rows)
    assert len(response.output_text) == 3
    assert said.endswith(response.output_text)


def test_a_response_that_is_cut(client):
    arguments = written("[a-z]{9}", max_output_tokens=4)
    response = client.responses.create(input="hello", **arguments)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    stream = client.responses.create(input="hello", stream=True, **arguments)
    assert list(stream)[-1].type == "response.incomplete"


def test_a_turn_knows_who_asked(client, session):
    about = {"client_metadata": {"thread": "t", "task": "b"}}
    client.responses.create(
        model="m",
        input="hello",
        max_output_tokens=4,
        safety_identifier="me",
        metadata={"task": "a"},
        extra_body=about,
        extra_headers={"x-request-id": "one"},
    )
    (turn,) = session.turns
    assert (turn.model, turn.user, turn.request_id) == ("m", "me", "one")
    assert turn.metadata == {"thread": "t", "task": "a"}


# Responses that are kept.


def test_a_response_is_kept(grammar_engine, tmp_path):
    body = {"metadata": {"task": "a"}, "tools": FUNCTIONS, "instructions": "Be kind."}
    path = tmp_path / "sessions"
    with gateway_of(grammar_engine, path=path) as gateway:
        session = gateway.session("a")
        client = openai_client(session)
        first = client.responses.create(input="hello", **written(TURN, **body))
        items = [{"role": "user", "content": "go"}, *outputs_of(first)]
        second = client.responses.create(
            input=items, previous_response_id=first.id, **written(TURN, **body)
        )
        client.close()
    # Another gateway goes on from the file.
    with gateway_of(grammar_engine, path=path) as gateway:
        session = gateway.find(name="a")
        client = openai_client(session)
        for each in (first, second):
            kept = client.responses.retrieve(each.id)
            assert kept.to_dict() == each.to_dict()
        told = client.responses.input_items.list(second.id, order="asc", limit=2)
        found = [item.type for item in told]
        assert found[:3] == ["message", "reasoning", "message"]
        assert len(found) == len(first.output) + 1 + len(items)
        logs = client.responses.retrieve(
            second.id, include=["message.output_text.logprobs"]
        )
        (said,) = [item for item in logs.output if item.type == "message"]
        assert len(said.content[0].logprobs) == second.usage.output_tokens
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.retrieve(first.id)
        assert client.responses.retrieve(second.id).id == second.id
        assert len(session.turns) == 2
        client.close()
    with gateway_of(grammar_engine, path=path) as gateway:
        session = gateway.find(name="a")
        names = [turn.name for turn in session.turns]
        assert names == ["", second.id.removeprefix("resp_")]
        assert session.turns[1].about["tools"] is session.turns[0].about["tools"]


def test_a_response_without_an_input(client, session):
    """Its prompt would end in the earlier response, which is complete."""
    first = client.responses.create(model="m", input="hello", max_output_tokens=4)
    with pytest.raises(openai.BadRequestError, match="ends in a message of the assist"):
        client.responses.create(model="m", previous_response_id=first.id)
    assert len(session.turns) == 1


def test_responses_that_are_not_stored_are_not_found(client, session, gateway):
    ask = {"model": "m", "input": "hello", "max_output_tokens": 4}
    response = client.responses.create(store=False, **ask)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    kept = client.responses.create(**ask)
    other = gateway.session()
    stranger = client.with_options(base_url=other.base_url, api_key=other.key)
    for asker, given in ((client, response.id), (stranger, kept.id), (client, "x")):
        with pytest.raises(openai.BadRequestError) as error:
            asker.responses.create(previous_response_id=given, **ask)
        assert error.value.code == "previous_response_not_found"
        assert error.value.param == "previous_response_id"
    item = {"type": "item_reference", "id": response.output[0].id}
    with pytest.raises(openai.NotFoundError, match="Item with id") as error:
        client.responses.create(**{**ask, "input": [item]})
    assert error.value.param == "input"
    assert len(session.turns) == 2


def test_a_repeated_request_gets_the_same_response(session):
    """Also in a stream, and by its name, where its first answer has been lost."""
    body = {"model": "m", "input": "hello", "max_output_tokens": 4, "stream": True}
    headers = {"Idempotency-Key": "one"}
    answers = [
        requests.post(
            session.base_url + "/responses", json=body, headers=headers, timeout=60
        )
        for _ in range(2)
    ]
    names = [re.findall(r"resp_[0-9a-f]{24}", answer.text) for answer in answers]
    assert len(set(names[0] + names[1])) == 1
    assert len(session.turns) == 1


# What clients send.

CODEX = {
    "input": [
        {
            "type": "message",
            "id": "msg_647a1d66-7043-53e0-a667-577ed8632585",
            "role": role,
            "content": [{"type": "input_text", "text": "Hi"}],
        }
        for role in ("developer", "developer", "user", "user")
    ],
    "tools": [
        {**FUNCTIONS[0], "strict": False},
        IN_SPACE,
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a20b07-16fa-7db3-9e6f-1732af538b5b",
    "client_metadata": {"session_id": "01a20b07"},
}
SAID = {"id": f"msg_{0:028x}", "role": "assistant", "content": "Hi"}
AGENTS = {"include": [], "instructions": "Help.", "tools": []}
GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "a+"}
AI_SDK = {
    "input": [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    ],
    "tools": FUNCTIONS,
    "tool_choice": "auto",
}


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        (AGENTS, None),
        (AI_SDK, None),
        (CODEX, "tools.web_search"),
        ({"tools": [{**FUNCTIONS[0], "strict": True}]}, "tools.strict"),
        ({"tools": [{**CUSTOM, "format": GRAMMAR}]}, "tools.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "disabled", "user": "me", "service_tier": "auto"}, None),
        (
            {"reasoning": {"effort": "low", "mode": "pro"}},
            "reasoning.mode, reasoning.effort",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        (
            {"context_management": [{"type": "compaction", "compact_threshold": 9}]},
            "context_management",
        ),
        ({"seed": None, "background": False, "max_tool_calls": 3}, None),
        ({"odd": 1}, "odd"),
    ],
)
def test_supported_fields_are_accepted(engine, body, ignored):
    with gateway_of(engine, ignored_params=["odd"]) as gateway:
        answer = post(gateway.session(), **body)
        counted = post(gateway.session(), "/responses/input_tokens", **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(IGNORED) == counted.headers.get(IGNORED) == ignored
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"background": True}, "background is not supported"),
        ({"conversation": "conv_1"}, "give previous_response_id"),
        ({"prompt": {"id": "p"}}, "as instructions or input"),
        ({"tools": [{"type": "file_search"}]}, "'file_search'"),
        ({"tools": [{"type": "code_interpreter"}]}, "a function of your own"),
        ({"tools": [*FUNCTIONS, *FUNCTIONS]}, "the second one with the name 'add'"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
        (
            {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "sub"}},
            "names 'sub'",
        ),
        ({"tool_choice": "required"}, "needs tools"),
        ({"include": [1]}, "include has 1, which is not a text"),
        ({"reasoning": {"budget": 3}}, "reasoning has 'budget'"),
        ({"reasoning": "high"}, "must be an object"),
        ({"text": {"format": {"type": "json_schema"}}}, "with a schema"),
        ({"top_logprobs": 21}, "top_logprobs=21"),
        ({"temprature": 1}, "Did you mean 'temperature'"),
        ({"input": None}, "input=None"),
        ({"input": []}, "at least one item"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call'"),
        ({"input": [SAID, SAID]}, "Duplicate item found"),
        ({"input": [{"role": "tool", "content": "a"}]}, "the role 'tool'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "'input_image'",
        ),
        ({"input": [{"type": "function_call"}]}, "a name and a call_id"),
        ({"input": [{"type": "function_call_output"}]}, "call_id=None"),
        ({"instructions": ["a"]}, "must be a text"),
    ],
)
def test_unsupported_fields_are_refused(engine, body, message):
    with gateway_of(engine) as gateway:
        answer = post(gateway.session(), **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_conversation_that_is_too_long(client, session):
    ask = {"model": "m", "input": "x" * 4000}
    with pytest.raises(openai.BadRequestError, match="exceeds the context window") as e:
        client.responses.create(**ask)
    assert e.value.code == "context_length_exceeded"
    assert e.value.param == "input"
    assert not session.turns
