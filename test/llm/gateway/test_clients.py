"""Unmodified clients against a gateway in front of a real engine.

The model writes noise, so a regular expression says what it may write. Whatever a
client does, the recorded log-probs are Hugging Face's of the recorded tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json

import openai
import pytest
import torch
from helpers.gateway_client import anthropic_client, openai_client
from helpers.log_probs import TOLERANCE
from helpers.tool_template import ADD, CALL, THOUGHT, TOOLS, gateway_of
from langchain_core.messages import HumanMessage, ToolMessage
from pydantic import BaseModel

from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.support.event_loop import run_sync

HELLO = [{"role": "user", "content": "hello"}]
AS_ANTHROPIC = {
    "name": "add",
    "description": "Adds.",
    "input_schema": ADD["parameters"],
}


def written(regex, **arguments):
    """Arguments that make the model write this."""
    return {"extra_body": {"regex": regex}, "max_tokens": 200, **arguments}


@pytest.fixture
def session(gateway, score):
    """A session whose log-probs are compared with the model's at the end."""
    session = gateway.session()
    yield session
    check_log_probs(session, score)


def check_log_probs(session, score):
    for turn in session.turns:
        found = torch.tensor(turn.completion.log_probs)
        expected = score(turn.token_ids)[len(turn.prompt.token_ids) :]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture
def client(session):
    with openai_client(session) as client:
        yield client


def chat(client, messages=HELLO, **arguments):
    return client.chat.completions.create(
        model="policy", messages=messages, **{"max_tokens": 8, **arguments}
    )


# OpenAI's client.


def test_chat(client, session):
    letters = {"extra_body": {"regex": "[a-z]{9}"}}
    answer = chat(client, temperature=0.7, user="me", **letters)
    (turn,) = session.turns
    assert answer.choices[0].message.content == turn.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(turn.prompt.token_ids)
    assert answer.usage.completion_tokens == 8
    messages = [*HELLO, answer.choices[0].message, {"role": "user", "content": "go"}]
    chat(client, messages)
    assert session.turns[1].prompt.parent == 0
    assert session.turns[1].token_ids[: len(turn.token_ids)] == turn.token_ids


def test_a_stream_with_usage(client, session):
    chunks = list(
        chat(
            client,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            **written("[a-z]{12}"),
        )
    )
    text = "".join(
        choice.delta.content or "" for chunk in chunks for choice in chunk.choices
    )
    assert text == session.turns[0].text
    assert len(text) == 12
    assert chunks[-1].usage.completion_tokens == 13
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_the_streaming_helper(client, session):
    with client.chat.completions.stream(
        model="policy", messages=HELLO, tools=TOOLS, **written(f"so{CALL}")
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content == "so"
    assert message.tool_calls[0].function.name == "add"


def test_tools_and_reasoning(client, session):
    """Calls that the model wrote are joined by tokens, twice."""
    messages = list(HELLO)
    for _ in range(3):
        arguments = written(f"{THOUGHT}[g-k]{CALL}(\\n{CALL})?", tools=TOOLS)
        choice = chat(client, messages, **arguments).choices[0]
        calls = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert len(choice.message.reasoning_content) == 4
        assert len(choice.message.content) == 1
        messages.append(choice.message.to_dict())
        for call in calls:
            number = json.loads(call.function.arguments)["a"]
            result = {"role": "tool", "content": str(1 + number)}
            messages.append({**result, "tool_call_id": call.id})
    assert [turn.prompt.parent for turn in session.turns] == [None, 0, 1]
    (trajectory,) = session.trajectories()
    assert len(trajectory.turns) == 3


def test_forced_tools(grammar_engine, score):
    """A call that a grammar forced is parsed, scored and joined as any other."""
    number = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": number}}
        for name in ("add", "sub")
    ]
    sub = {"type": "function", "function": {"name": "sub"}}
    messages = list(HELLO)
    # Noise would begin to reason, and not end it.
    with gateway_of(grammar_engine, reasoning_parser=None) as gateway:
        session = gateway.session()
        client = openai_client(session)
        for choice in ({"tool_choice": sub}, {"tool_choice": "required"}):
            one = {"parallel_tool_calls": False, "max_tokens": 400}
            said = chat(client, messages, tools=tools, **choice, **one).choices[0]
            assert said.finish_reason == "tool_calls"
            (call,) = said.message.tool_calls
            assert json.loads(call.function.arguments)["a"] in (1, 2)
            result = {"role": "tool", "content": "3", "tool_call_id": call.id}
            messages += [said.message.to_dict(), result]
        # One call at a time: any text, and log-probs of a grammar's.
        chat(client, messages, tools=tools, parallel_tool_calls=False)
        client.close()
    calls = [turn.reply["tool_calls"] for turn in session.turns[:2]]
    assert calls[0][0]["function"]["name"] == "sub"
    assert [turn.prompt.parent for turn in session.turns] == [None, 0, 1]
    check_log_probs(session, score)


def test_clients_that_change_what_they_send_back(client, session):
    """Reasoning is left out, ids are others, arguments are written in another way."""
    arguments = written(f"{THOUGHT}{CALL}", tools=TOOLS)
    said = chat(client, **arguments).choices[0].message.to_dict()
    del said["reasoning_content"]
    (call,) = said["tool_calls"]
    call["id"] = "mine"
    call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
    result = {"role": "tool", "content": "3", "tool_call_id": "mine"}
    chat(client, [*HELLO, {**said, "content": "  "}, result], **arguments)
    assert session.turns[1].prompt.parent == 0


def test_several_responses_with_log_probs(client, session):
    answer = chat(client, n=3, logprobs=True, top_logprobs=2)
    assert len(answer.choices) == len(session.turns) == 3
    for choice, turn in zip(answer.choices, session.turns, strict=True):
        rows = choice.logprobs.content
        assert [row.logprob for row in rows] == turn.completion.log_probs
        assert "".join(row.token for row in rows).startswith(turn.text)
        assert all(len(row.top_logprobs) == 2 for row in rows)
    chat(client, [*HELLO, answer.choices[1].message, *HELLO])
    assert session.turns[3].prompt.parent == 1


def test_seeds(client):
    """Where the server draws no numbers from them, they are refused."""
    with pytest.raises(openai.BadRequestError, match="deterministic"):
        chat(client, seed=3)
    texts = {
        chat(client, seed=3, temperature=0).choices[0].message.content for _ in range(2)
    }
    assert len(texts) == 1


def test_stop(client, session):
    choice = chat(client, stop=["#", "!"], **written("[a-c]{3}#[a-c]{3}")).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == session.turns[0].text[:3]
    assert session.turns[0].text[3:] == "#"
    chat(client, [*HELLO, choice.message, *HELLO])
    assert session.turns[1].prompt.parent == 0


class Sum(BaseModel):
    number: int
    known: bool


def test_structured_output(client, session):
    answer = client.chat.completions.parse(
        model="policy", messages=HELLO, response_format=Sum, temperature=0.1
    )
    assert isinstance(answer.choices[0].message.parsed, Sum)
    answer = chat(
        client,
        response_format={"type": "json_object"},
        max_tokens=60,
        temperature=0.1,
    )
    assert answer.choices[0].message.content.startswith("{")


def test_completions(client, session):
    def complete(prompt, **arguments):
        return client.completions.create(
            model="policy", prompt=prompt, max_tokens=5, temperature=0, **arguments
        ).choices[0]

    first = complete("abc", logprobs=2)
    assert first.logprobs.token_logprobs == session.turns[0].completion.log_probs
    # A token that ends a turn has several letters.
    lengths = [3, *map(len, first.logprobs.tokens)]
    assert first.logprobs.text_offset == list(itertools.accumulate(lengths))[:-1]
    echoed = complete("abc" + first.text + "d", echo=True, n=2)
    assert echoed.text.startswith("abc" + first.text + "d")
    assert [turn.prompt.parent for turn in session.turns] == [None, 0, 0]


def test_errors(gateway, session, client):
    with pytest.raises(openai.BadRequestError, match="Did you mean 'temperature'"):
        chat(client, extra_body={"temprature": 1})
    long = [{"role": "user", "content": "x" * 4000}]
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, long)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="policy", input="hello")
    other = gateway.session().key
    with pytest.raises(openai.PermissionDeniedError):
        chat(client.with_options(api_key=other))
    root = client.with_options(base_url=f"{gateway.url}/v1", api_key="sk-none")
    with pytest.raises(openai.AuthenticationError):
        chat(root)
    assert not session.turns


def test_limits_are_not_asked_again(grammar_engine):
    with gateway_of(grammar_engine, max_turns=1) as gateway:
        session = gateway.session()
        with openai_client(session, max_retries=5) as client:
            chat(client)
            with pytest.raises(openai.PermissionDeniedError, match="max_turns=1"):
                chat(client)


def test_a_client_that_asks_again(fake, fake_engine):
    """It gave up on the first request, which the server keeps waiting."""
    fake.silent_while_paused = True
    run_sync(fake_engine.control.pause("retract"))
    with Gateway(fake_engine) as gateway:
        session = gateway.session()
        with openai_client(session, timeout=0.3, max_retries=1) as client:
            with pytest.raises(openai.APITimeoutError):
                chat(client)
            fake.wait_for("/abort_request", 2)
            assert not session.turns
            run_sync(fake_engine.control.resume())
            chat(client.with_options(timeout=30))
        assert len(session.turns) == 1


def test_a_server_that_is_down(fake, fake_engine):
    fake.die()
    with Gateway(fake_engine) as gateway:
        session = gateway.session()
        with openai_client(session, max_retries=0) as client:
            with pytest.raises(openai.InternalServerError):
                chat(client)
            # The stream has begun by then.
            with pytest.raises(openai.APIError, match="Server disconnected"):
                list(chat(client, stream=True))


def test_the_asynchronous_client(session):
    async def ask_all():
        async with openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.key
        ) as client:
            return await asyncio.gather(*(chat(client) for _ in range(16)))

    answers = asyncio.run(ask_all())
    texts = sorted(answer.choices[0].message.content for answer in answers)
    assert texts == sorted(turn.text for turn in session.turns)


# Anthropic's client.


@pytest.fixture
def claude(request, grammar_engine, score):
    """A session whose model writes a text of this form, and Anthropic's client."""
    forced = {"regex": request.param}
    with gateway_of(grammar_engine, forced_sampling_params=forced) as gateway:
        session = gateway.session()
        with anthropic_client(session) as client:
            yield session, client
        check_log_probs(session, score)


def writes(regex):
    return pytest.mark.parametrize("claude", [regex], indirect=True)


def ask(client, messages=HELLO, **arguments):
    return client.messages.create(
        model="policy", messages=messages, **{"max_tokens": 8, **arguments}
    )


@writes("[a-z]{9}")
def test_messages(claude):
    session, client = claude
    more = {"temperature": 0.9, "top_k": 5}
    answer = ask(client, system="Be short.", extra_body=more)
    (turn,) = session.turns
    assert answer.content[0].text == turn.text
    assert answer.stop_reason == "max_tokens"
    usage = answer.usage
    read = usage.input_tokens + usage.cache_read_input_tokens
    assert [read, usage.output_tokens] == [len(turn.prompt.token_ids), 8]
    assert turn.prompt.messages[0] == {"role": "system", "content": "Be short."}
    counted = client.messages.count_tokens(
        model="policy", messages=HELLO, system="Be short."
    )
    assert counted.input_tokens == len(turn.prompt.token_ids)
    messages = [*HELLO, {"role": "assistant", "content": answer.content}, *HELLO]
    ask(client, messages, system="Be short.")
    assert session.turns[1].prompt.parent == 0


@writes(f"{THOUGHT}so{CALL}")
def test_messages_with_tools_and_thinking(claude):
    session, client = claude
    thinking = {"type": "enabled", "budget_tokens": 1024}
    messages = list(HELLO)
    for _ in range(2):
        about = {"tools": [AS_ANTHROPIC], "thinking": thinking, "max_tokens": 2000}
        answer = ask(client, messages, **about)
        kinds = [block.type for block in answer.content]
        assert kinds == ["thinking", "text", "tool_use"]
        assert answer.stop_reason == "tool_use"
        call = answer.content[-1]
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": str(call.input["a"] + 1),
        }
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
    assert session.turns[1].prompt.parent == 0


@writes(f"{THOUGHT}so{CALL}")
def test_a_stream_of_messages(claude):
    session, client = claude
    with client.messages.stream(
        model="policy", messages=HELLO, max_tokens=200, tools=[AS_ANTHROPIC]
    ) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert texts == ["so"]
    assert message.content[-1].name == "add"
    assert message.content[-1].input["a"] in range(1, 10)
    assert message.usage.output_tokens == len(session.turns[0].completion.token_ids)


@writes("[a-c]{3}#[a-c]{3}")
def test_stop_sequences(claude):
    session, client = claude
    answer = ask(client, stop_sequences=["#"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "#")
    assert answer.content[0].text == session.turns[0].text[:3]


def test_errors_of_anthropics_client(grammar_engine):
    import anthropic

    with gateway_of(grammar_engine) as gateway:
        session, other = gateway.session(), gateway.session()
        client = anthropic_client(session)
        with pytest.raises(anthropic.BadRequestError, match="seed"):
            ask(client, extra_body={"seed": 1})
        with pytest.raises(anthropic.PermissionDeniedError):
            ask(client.with_options(api_key=other.key))
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("another")
        client.close()
        assert not session.turns


# LangChain.


def test_langchain(session):
    """Its messages go round twice, and streamed ones once."""
    from langchain_openai import ChatOpenAI

    def add(a: int) -> int:
        """Adds."""
        return a + 1

    model = ChatOpenAI(
        model="policy",
        base_url=session.base_url,
        api_key=session.key,
        max_tokens=200,
        extra_body={"regex": f"{THOUGHT}so{CALL}"},
    ).bind_tools([add])
    messages = [HumanMessage("hello")]
    for _ in range(2):
        said = model.invoke(messages)
        (call,) = said.tool_calls
        assert call["name"] == "add"
        result = str(add(**call["args"]))
        messages += [said, ToolMessage(result, tool_call_id=call["id"])]
    streamed = list(model.stream(messages))
    whole = sum(streamed[1:], streamed[0])
    assert whole.tool_calls[0]["name"] == "add"
    assert [turn.prompt.parent for turn in session.turns] == [None, 0, 1]
