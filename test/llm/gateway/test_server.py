"""The gateway's routes, in front of a server that computes nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import aiohttp
import pytest
import requests
from aiohttp import web
from helpers.gateway_client import CHAT, HELLO, MESSAGES, message, post
from yarl import URL

from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.connections import STRANGERS, BoundedSite, Strangers
from torchrl_sglang.gateway.dialects.anthropic import read_count
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.gateway.registry import SessionRegistry
from torchrl_sglang.gateway.routes import sending
from torchrl_sglang.support.event_loop import run_sync

ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture
def gateway(fake_engine):
    with Gateway(fake_engine) as gateway:
        yield gateway


@pytest.fixture
def session(gateway):
    return gateway.session()


@contextmanager
def hanging(fake, count=1):
    """A server that answers no request; yields when that many have come."""
    with fake.misbehaving("hang"), ThreadPoolExecutor(16) as pool:
        yield pool, lambda: fake.wait_for("/generate", count)
        fake.recover()


DEPTH = 900 if sys.version_info < (3, 12) else 1200
"""Python reads JSON that is nested so deeply, and does not write it."""
NESTED = {"name": "f", "arguments": "[" * DEPTH + "]" * DEPTH}
DEEP = {"role": "assistant", "tool_calls": [{"function": NESTED}]}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("chat/completions", {"messages": [*HELLO, DEEP, *HELLO]}, "nested too deeply"),
        ("messages", {"output_config": "format"}, "may have effort, format"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "cut \ud83d"}]},
            "half of a character in .*cut .*ud83d",
        ),
    ],
)
def test_parameters_that_no_policy_reads_are_refused(session, path, body, told):
    answer = post(session, f"/v1/{path}", **body)
    assert answer.status_code == 400
    assert re.search(told, answer.json()["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_that_is_text_stays_in_the_message(session, tokenizer, stream):
    post(session, temperature=0)
    stop = session.turns[0].completion.token_ids[-1]
    body = {"temperature": 0, "stop_token_ids": [stop, tokenizer.eos_token_id]}
    answer = post(session, messages=HELLO, stream=stream, **body)
    assert answer.status_code == 200
    turn = session.turns[1]
    assert (turn.completion.token_ids[-1], turn.ended) == (stop, True)
    assert turn.reply["content"] == tokenizer.decode(turn.completion.token_ids)
    if stream:
        lines = [line[6:] for line in answer.text.splitlines() if '"content"' in line]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        said = "".join(delta.get("content") or "" for delta in deltas)
    else:
        said = answer.json()["choices"][0]["message"]["content"]
    assert said == turn.reply["content"]
    reply = {"role": "assistant", "content": said}
    post(session, messages=[*HELLO, reply, *HELLO], **body)
    assert session.turns[2].prompt.token_ids[: turn.num_tokens] == turn.token_ids


# Keys and paths.


def test_a_path_opens_its_session_on_this_machine_only(gateway, session, fake_engine):
    assert post(session, key="EMPTY").status_code == 200
    assert post(session).status_code == 200
    with Gateway(fake_engine, api_key="mine", host="0.0.0.0") as other:
        session = other.session()
        session.url = session.url.replace("0.0.0.0", "127.0.0.1")
        assert post(session).status_code == 401
        assert post(session, key="guess").status_code == 403
        assert post(session, key="gästekey").status_code == 403
        assert post(session, key=session.key).status_code == 200
        assert post(session, key="mine").status_code == 200
    with pytest.raises(ConfigurationError, match=r"host='0.0.0.0'.*api_key"):
        Gateway(fake_engine, host="0.0.0.0")
    with pytest.raises(ConfigurationError, match=r"AsyncSGLang\.connect\(URL\)"):
        Gateway(fake_engine.server_url)


def test_a_key_names_its_session(gateway, session):
    other = gateway.session()

    def status(**headers):
        return post(gateway.url, headers=headers, max_tokens=1).status_code

    assert status(Authorization=f"Bearer {session.key}") == 200
    assert status(**{"x-api-key": other.key}) == 200
    assert [len(session.turns), len(other.turns)] == [1, 1]
    assert status() == status(**{"x-api-key": "sk-none"}) == 401
    # The gateway's own key names no session.
    assert status(**{"x-api-key": gateway.api_key}) == 401


@pytest.mark.parametrize("name", ["chat/completions", "completions", "messages"])
def test_sessions_do_not_open_each_other(gateway, session, name):
    other = gateway.session()
    answer = post(session, f"/v1/{name}", key=other.key)
    assert answer.status_code == 403
    kind = answer.json()["error"]["type"]
    assert kind == "permission_error"
    assert (answer.json().get("type") == "error") == (name == "messages")
    assert not session.turns
    new = f"{gateway.url}/sessions/new/v1/models"
    bearer = {"Authorization": f"Bearer {other.key}"}
    assert requests.get(new, headers=bearer, timeout=30).status_code == 403
    assert len(gateway.sessions) == 2


def test_a_session_is_shown_to_holders_of_its_key(gateway, session):
    other = gateway.session()
    post(session)

    def get(**headers):
        return requests.get(session.url, headers=headers, timeout=30)

    assert get().status_code == 401
    assert get(Authorization=f"Bearer {other.key}").status_code == 403
    shown = get(Authorization=f"Bearer {session.key}").json()
    assert shown["turns"] == 1
    assert shown["trajectories"][0]["token_ids"] == session.turns[0].token_ids
    assert get(Authorization=f"Bearer {gateway.api_key}").status_code == 200


def test_sessions_are_made_rewarded_and_dropped_over_http(gateway):
    own = {"Authorization": f"Bearer {gateway.api_key}"}
    url = f"{gateway.url}/sessions"
    made = requests.post(url, json={"name": "a", "group": "g"}, headers=own, timeout=30)
    assert made.json()["url"] == f"{gateway.url}/sessions/a"
    key = {"Authorization": f"Bearer {made.json()['key']}"}
    session = gateway.find(name="a")
    assert post(session, key=session.key).status_code == 200
    for body, status in [
        ({"reward": 2}, 200),
        ({"reward": 0.5, "turn": 0}, 200),
        ({"reward": "much"}, 400),
        ({"reward": 1, "turn": "first"}, 400),
        ({"reward": 1, "turn": 7}, 400),
        ({"reward": 10**400}, 400),
    ]:
        answer = requests.post(f"{url}/a/reward", json=body, headers=key, timeout=30)
        assert answer.status_code == status, answer.text
    assert "must be a finite number" in answer.json()["error"]["message"]
    assert [session.reward, session.turns[0].reward] == [2.0, 0.5]
    assert requests.post(url, headers=key, timeout=30).status_code == 403
    assert requests.post(url, timeout=30).status_code == 401
    refused = requests.post(url, json={"name": "a/b"}, headers=own, timeout=30)
    assert refused.status_code == 400
    assert requests.delete(f"{url}/a", headers=key, timeout=30).status_code == 200
    assert requests.get(f"{url}/a", headers=own, timeout=30).status_code == 410
    assert requests.get(f"{url}/b", headers=own, timeout=30).status_code == 404
    assert gateway.sessions == []


def test_a_path_opens_only_what_there_is(gateway, session):
    session.url = f"{gateway.url}/sessions/other"
    assert post(session).status_code == post(session, key="EMPTY").status_code == 404
    # With the gateway's own key it is made.
    assert post(session, key=gateway.api_key).status_code == 200
    assert post(session).status_code == 200
    assert [len(each.turns) for each in gateway.sessions] == [0, 2]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_dropped_session_does_not_come_back(gateway, path):
    session = gateway.session("a")
    gateway.drop(session)
    gateway.drop(session)
    for key in ("", "EMPTY", session.key, gateway.api_key):
        answer = post(session, path, key=key)
        assert answer.status_code == 410, key
        assert "was dropped" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
    root = post(gateway.url, path, headers={"x-api-key": session.key})
    assert root.status_code == 410
    assert gateway.sessions == session.turns == []
    # Who asks for the name again gets another session, which the old key does not open.
    new = gateway.session("a")
    assert post(new, path, key=session.key).status_code == 410
    assert post(new, path, key=new.key).status_code == 200


def test_few_names_of_dropped_sessions_are_kept(gateway):
    registry = SessionRegistry(threading.Lock(), max_dropped=3)
    for number in range(5):
        session = gateway.session(str(number))
        registry.add(session)
        registry.remove(session)
    statuses = []
    for name in "01234":
        with pytest.raises(GatewayError) as error:
            registry.find(name=name)
        statuses.append(error.value.status)
    assert statuses == [404, 404, 410, 410, 410]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:80", "Origin": "http://127.0.0.1:3000"}, 200),
        ({"Host": "[::1]:80", "Origin": "http://localhost"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:80"}, 403),
        ({"Host": "127.0.0.1@evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost@evil.example"}, 403),
    ],
)
def test_a_page_of_another_host_writes_nothing(session, headers, status):
    """A browser on this machine sends what such a page tells it to."""
    plain = {"Content-Type": "text/plain", **headers}
    assert post(session, headers=plain).status_code == status
    assert len(session.turns) == (status == 200)
    if headers.get("Host") not in ("", "[::1"):
        # A page has no key.
        assert post(session, key=session.key, headers=plain).status_code == 200


def test_unknown_paths(gateway, session):
    unknown = requests.get(f"{gateway.url}/nothing", timeout=30)
    assert unknown.status_code == 404
    assert "POST /v1/chat/completions" in unknown.json()["error"]["message"]
    for odd in ("/v1/embeddings", "/%ff%00", "/a\\b", "/sessions/%2e%2e%2f"):
        assert requests.post(session.url + odd, timeout=30).status_code == 404
    assert requests.get(session.url + MESSAGES, timeout=30).status_code == 405
    health = requests.get(f"{gateway.url}/health", timeout=30)
    assert health.json() == {"status": "ok"}


# Limits.


def test_limits_of_sessions(fake_engine):
    with Gateway(
        fake_engine, max_sessions=2, max_turns=2, session_seconds=60
    ) as gateway:
        session = gateway.session()
        assert [post(session).status_code for _ in range(3)] == [200, 200, 403]
        answer = post(session)
        assert "max_turns=2" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "permission_error"
        assert answer.headers["x-should-retry"] == "false"
        anthropic = post(session, MESSAGES).json()
        assert anthropic["error"]["type"] == "permission_error"
        gateway.session()
        with pytest.raises(GatewayError, match="max_sessions"):
            gateway.session()
        # This limit goes away when others are dropped.
        session.url = f"{gateway.url}/sessions/third"
        answer = post(session, key=gateway.api_key)
        assert answer.status_code == 429
        assert "x-should-retry" not in answer.headers


def test_requests_at_a_time_share_the_limit_of_turns(fake_engine):
    with Gateway(fake_engine, max_turns=3) as gateway:
        session = gateway.session()
        assert post(session, n=4).status_code == 403
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: post(session), range(8)))
        assert sorted(a.status_code for a in answers) == [200] * 3 + [403] * 5
        assert len(session.turns) == 3


def test_limits_of_tokens_and_time(fake_engine):
    with Gateway(fake_engine, max_tokens=6) as gateway:
        session = gateway.session()
        assert [post(session).status_code for _ in range(3)] == [200, 200, 403]
        # The last response was cut to what was left.
        assert session.num_tokens == 6
    with Gateway(fake_engine, session_seconds=0.001) as gateway:
        session = gateway.session()
        time.sleep(0.01)
        assert "session_seconds" in post(session).text


def test_a_large_request_is_refused(session):
    answer = requests.post(session.url + MESSAGES, data=b" " * (65 << 20), timeout=60)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "request_too_large"


def test_weights_that_have_diverged_are_not_the_clients_mistake(fake, session):
    with fake.misbehaving("null_log_probs"):
        answer = post(session)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "api_error")
    assert "not numbers" in answer.text


# Clients that hang up, and ask again.


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_the_server(fake, gateway, session, stream):
    async def hang_up():
        async with aiohttp.ClientSession() as client:
            url = f"{session.url}/v1/chat/completions"
            body = {"messages": HELLO, "stream": stream, "n": 2}
            ask = asyncio.ensure_future(client.post(url, json=body))
            await asyncio.to_thread(fake.wait_for, "/generate", 1)
            ask.cancel()
            await asyncio.wait([ask])

    with fake.misbehaving("hang"):
        asyncio.run(hang_up())
        fake.wait_for("/abort_request", 1)
        fake.recover()
    assert not session.turns
    assert message(post(session))
    assert len(session.turns) == 1


def test_a_client_that_hangs_up_between_signs_of_life(fake, fake_engine):
    """The stream has begun when it hangs up."""
    with Gateway(fake_engine, keep_alive_seconds=0.02) as gateway:
        session = gateway.session()
        with fake.misbehaving("hang"):
            with requests.post(
                f"{session.url}/v1/chat/completions",
                json={"messages": HELLO, "stream": True},
                stream=True,
                timeout=30,
            ) as answer:
                lines = filter(None, answer.iter_lines())
                begun = next(line for line in lines if line != b": waiting")
                assert b'"role":"assistant"' in begun
                assert [next(lines) for _ in range(2)] == [b": waiting"] * 2
            fake.wait_for("/abort_request", 1)
            fake.recover()
        assert not session.turns


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_error_within_a_stream(fake, fake_engine, path):
    with Gateway(fake_engine, keep_alive_seconds=0.02, request_timeout=0.2) as gateway:
        session = gateway.session()
        with fake.misbehaving("hang"):
            answer = post(session, path, stream=True)
            fake.recover()
    assert answer.status_code == 200
    event, data = answer.text.strip().rsplit("\n", 1)
    assert event.endswith("event: error")
    assert "no answer" in json.loads(data.removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_request_is_answered_once(fake, session, stream):
    headers = {"Idempotency-Key": "7"}
    first = post(session, headers=headers, stream=stream)
    again = post(session, headers=headers, stream=stream)
    assert len(session.turns) == len(fake.payloads()) == 1
    assert first.status_code == again.status_code == 200
    # Another content is no repetition, whatever the header says, nor another session.
    assert post(session, headers=headers, max_tokens=3).status_code == 200
    assert len(session.turns) == 2


@contextmanager
def hanging_up(session, **body):
    """A client that has sent a request, and hangs up without reading."""
    url = URL(session.url)
    given = {"model": "m", "max_tokens": 4, "messages": HELLO, **body}
    content = json.dumps(given).encode()
    head = (
        f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nHost: {url.authority}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        yield


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_responses_that_no_client_saw_are_not_kept(
    fake_engine, monkeypatch, tmp_path, stream, kept
):
    """A client that hangs up when its answer is complete, but not sent."""
    path = tmp_path / "sessions" if kept else None
    complete, goes_on, usage = threading.Event(), threading.Event(), sending.usage_of

    def slow_usage(turns):
        complete.set()
        assert goes_on.wait(30)
        return usage(turns)

    monkeypatch.setattr(sending, "usage_of", slow_usage)
    with Gateway(fake_engine, path=path) as gateway:
        session = gateway.session("a")
        with hanging_up(session, stream=stream):
            assert complete.wait(30)
            assert len(session.turns) == 1
        goes_on.set()
        post(session, messages=[{"role": "user", "content": "other"}])
        assert [turn.number for turn in session.turns] == [1]
        # Its repetition gets it, and once only.
        post(session, headers=RETRY, stream=stream)
        assert [turn.number for turn in session.turns] == [0, 1]
        post(session, headers=RETRY, stream=stream)
        assert [turn.number for turn in session.turns] == [0, 1, 2]
        gateway.set_reward(session, 0.5, turn=0)
    if kept:
        (read,) = Gateway(fake_engine, path=path).sessions
        assert [turn.reward for turn in read.turns] == [0.5, None, None]


def test_a_retry_gets_the_answer_of_the_only_equal_request(fake, session):
    """Its client has not seen the answer, although its connection took it."""
    first = post(session)
    again = post(session, headers=RETRY)
    assert len(session.turns) == len(fake.payloads()) == 1
    assert first.json()["id"] == again.json()["id"]


def test_the_same_request_asks_for_another_response(session):
    for _ in range(3):
        post(session)
    assert len(session.turns) == 3
    assert [turn.prompt.parent for turn in session.turns] == [None] * 3


# Errors.


LINKED = {"type": "document", "source": {"type": "url"}}
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
ASSISTANT = [*HELLO, {"role": "assistant", "content": "I"}]
REFUSED = {
    CHAT: [
        ({"temprature": 1}, "Did you mean 'temperature'"),
        ({"n": 0}, "n=0"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21"),
        ({"temperature": -1}, "temperature=-1"),
        ({"stop": ""}, "stop"),
        ({"seed": 1}, "deterministic"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": []}, "use tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot"}]}, "robot"),
        ({"messages": ASSISTANT}, "beginnings"),
        ({"messages": IMAGE}, "no images"),
    ],
    MESSAGES: [
        ({"max_tokens": None}, "max_tokens"),
        ({"seed": 1}, "seed"),
        ({"temprature": 1}, "Did you mean 'temperature'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "input_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images"),
        ({"messages": ASSISTANT}, "beginnings"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "always"}}, "between_tools"),
        ({"thinking": {"type": "x", "display": "updates"}}, "between_tools"),
        ({"context_management": {"edits": 1}}, "list of edits"),
        ({"messages": [{"role": "user", "content": [LINKED]}]}, "reads no files"),
    ],
}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [(path, *row) for path, rows in REFUSED.items() for row in rows],
)
def test_unsupported_fields_are_refused(fake, session, path, body, words):
    answer = post(session, path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert not session.turns
    assert not fake.payloads()


FIELDS = {
    "/v1/chat/completions": (
        *("messages", "tools", "tool_choice", "n", "logprobs", "top_logprobs", "stop"),
        *("stream_options", "response_format", "chat_template_kwargs", "temperature"),
        *("reasoning_effort", "max_tokens", "logit_bias", "model", "metadata"),
        "parallel_tool_calls",
    ),
    "/v1/completions": ("prompt", "logprobs", "echo", "n", "suffix", "stop"),
    MESSAGES: (
        *("messages", "system", "tools", "tool_choice", "thinking", "stop_sequences"),
        *("max_tokens", "metadata", "top_k"),
    ),
}
VALUES = [1, -1, 1.5, True, "x", "", [], {}, [1], ["x"], {"type": 1}, [{}], [[]]]


@pytest.mark.parametrize("path", FIELDS)
def test_no_value_of_a_field_breaks_the_gateway(session, path):
    """It is taken or refused."""
    with requests.Session() as client:
        for name in FIELDS[path]:
            base = {"max_tokens": 1}
            base |= {"prompt": "a"} if path == "/v1/completions" else {}
            base |= {"messages": HELLO} if "prompt" not in base else {}
            for value in VALUES:
                answer = client.post(
                    session.url + path, json={**base, name: value}, timeout=30
                )
                assert answer.status_code in (200, 400), (name, value, answer.text)


def test_a_tool_that_failed_says_so():
    result = {"type": "tool_result", "tool_use_id": "call", "content": "no such file"}
    for failed, text in ((False, "no such file"), (True, "Error: no such file")):
        message = {"role": "user", "content": [{**result, "is_error": failed}]}
        (read,) = read_count({"messages": [message]}).messages
        assert read == {"role": "tool", "content": text, "tool_call_id": "call"}


ODD_MESSAGES = [
    {"role": "user", "content": 1},
    {"role": "user", "content": [{"type": "text", "text": 3}]},
    {"role": "assistant", "content": None, "tool_calls": 5},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": 1}}]},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "name": 7}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": 7}]},
    {"role": "user", "content": [{"type": "tool_result", "content": 1}]},
    {"role": "tool", "content": "1", "tool_call_id": 5},
    {"role": "assistant", "reasoning_content": {"a": 1}},
    {"role": 1},
    "hello",
]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_no_message_breaks_the_gateway(session, path):
    for each in ODD_MESSAGES:
        answer = post(session, path, messages=[*HELLO, each, *HELLO])
        assert answer.status_code in (200, 400), (each, answer.text)


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"[]", b'"a"', b"\xff", b"[" * 100_000, b'{"a": NaN}'),
        rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_malformed_json(session, path, content):
    answer = requests.post(session.url + path, data=content, timeout=30)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_a_conversation_that_is_too_long(session):
    messages = [{"role": "user", "content": "x" * 4096}]
    answer = post(session, messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    words = r"model's maximum context length is (\d+) tokens.*resulted in (\d+) tokens"
    said = answer.json()["error"]["message"]
    longest, number = map(int, re.search(words, said).groups())
    assert longest < 4096 < number
    anthropic = post(session, MESSAGES, messages=messages)
    assert anthropic.status_code == 400
    said = anthropic.json()["error"]["message"]
    # As Claude Code and LangChain search for it.
    assert re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", said)
    # What is asked for beyond the context is cut.
    assert post(session, max_tokens=10**6).json()["choices"][0]["finish_reason"] == (
        "length"
    )


def test_a_server_that_is_down(fake, session):
    fake.die()
    assert post(session).status_code == 503
    answer = post(session, MESSAGES)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "api_error")
    assert not session.turns


def test_a_server_that_does_not_answer(fake, fake_engine):
    with Gateway(fake_engine, request_timeout=0.2) as gateway:
        session = gateway.session()
        with fake.misbehaving("hang"):
            assert post(session).status_code == 504
        assert not session.turns


# Weight updates, and many clients.


def test_requests_wait_for_a_weight_update(fake, fake_engine, session):
    fake.silent_while_paused = True
    with ThreadPoolExecutor(2) as pool:
        run_sync(fake_engine.control.pause("retract"))
        answers = [pool.submit(post, session, stream=each) for each in (False, True)]
        fake.wait_for("/generate", 2)
        assert not any(answer.done() for answer in answers)
        fake.weight_version = "1"
        run_sync(fake_engine.control.resume())
        assert [answer.result().status_code for answer in answers] == [200, 200]
    spans = [turn.completion.versions for turn in session.turns]
    assert {span.version for (span,) in spans} == {"1"}


# Parsers.


def test_without_tools_nothing_is_a_call(fake_engine):
    with Gateway(fake_engine, tool_call_parser="qwen25") as gateway:
        asked = [{"role": "user", "content": CALL}]
        answer = post(gateway.session(), messages=asked, max_tokens=200)
        assert CALL in message(answer)["content"]


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>\n[1]\n</tool_call>",  # SGLang's parser fails on it.
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": \n</tool_call>',
    ],
)
def test_unparsable_calls_are_content(fake_engine, said):
    with Gateway(fake_engine, tool_call_parser="qwen25") as gateway:
        session = gateway.session()
        asked = [{"role": "user", "content": said}]
        found = message(post(session, messages=asked, tools=TOOLS, max_tokens=200))
        assert said in found["content"]
        assert "tool_calls" not in found
        assert len(session.turns) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"tool_call_parser": "qwen_25"}, "tool_call_parser='qwen_25'.*mean 'qwen25'"),
        ({"reasoning_parser": "qwen-3"}, "reasoning_parser='qwen-3'.*mean 'qwen3'"),
        ({"tool_call_parser": "xyz"}, "SGLang's name of the model's format. .http"),
    ],
)
def test_a_parser_that_the_servers_do_not_have(engine, arguments, told):
    with pytest.raises(ConfigurationError, match=told):
        Gateway(engine, **arguments).start()


def test_servers_that_do_not_answer_are_asked_for_parsers_later(fake, fake_engine):
    gateway = Gateway(fake_engine, tool_call_parser="qwen25")
    with fake.misbehaving("hang_up", "/parse_function_call"):
        gateway.start()
    gateway.shutdown()


@pytest.mark.parametrize("fault", ["error_500", "hang_up", "malformed_json"])
def test_a_parser_that_fails_loses_no_turn(fake, fake_engine, fault):
    with Gateway(
        fake_engine, tool_call_parser="qwen25", reasoning_parser="qwen3"
    ) as gateway:
        session = gateway.session()
        with (
            fake.misbehaving(fault, "/separate_reasoning"),
            fake.misbehaving(fault, "/parse_function_call"),
        ):
            found = message(post(session, tools=TOOLS, max_tokens=5))
        assert found["content"] == session.turns[0].text
        assert len(session.turns[0].completion.token_ids) == 5


THOUGHT = "<think>hm\nso</think>\n\n42"


BARE = (
    "{% for each in messages %}{% if each.reasoning_content %}<think>"
    "{{ each.reasoning_content }}</think>{% endif %}{{ each.content }}{% endfor %}"
)
"""The server says what it is asked."""


def thinking(fake_engine):
    return Gateway(fake_engine, reasoning_parser="qwen3", chat_template=BARE)


def test_content_behind_reasoning_begins_with_itself(fake_engine):
    with thinking(fake_engine) as gateway:
        session = gateway.session()
        asked = [{"role": "user", "content": THOUGHT}]
        found = message(post(session, messages=asked, max_tokens=len(THOUGHT)))
        (turn,) = session.turns
        assert found["content"].startswith("42")
        assert "\n\n42" in turn.text
        post(session, messages=[*asked, found, *HELLO])
        assert session.turns[1].prompt.parent == 0
        assert session.turns[1].prompt.token_ids[: turn.num_tokens] == turn.token_ids


def test_thinking_is_signed_and_joins_when_it_comes_back(fake_engine):
    with thinking(fake_engine) as gateway:
        session = gateway.session()
        asked = [{"role": "user", "content": THOUGHT}]
        given = {"messages": asked, "max_tokens": len(THOUGHT)}
        answer = post(session, MESSAGES, **given)
        blocks = answer.json()["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        assert blocks[0]["signature"]
        assert blocks[1]["text"].startswith("42")
        said = {"role": "assistant", "content": blocks}
        post(session, MESSAGES, messages=[*asked, said, *HELLO])
        assert session.turns[1].prompt.parent == 0
        stream = post(session, MESSAGES, **given, stream=True).text
        deltas = [
            json.loads(line.removeprefix("data: ")).get("delta", {})
            for line in stream.splitlines()
            if line.startswith("data: ")
        ]
        (signed,) = (each for each in deltas if each.get("type") == "signature_delta")
        assert signed["signature"] == blocks[0]["signature"]


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("parser", [None, "qwen25"])
def test_one_call_at_a_time_is_no_matter_without_calls(fake_engine, tools, parser):
    """Calls that nothing parses are text; a grammar is needed for others only."""
    status = 400 if tools and parser else 200
    given = [{"name": "add", "input_schema": {"type": "object"}}] if tools else []
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    with Gateway(fake_engine, tool_call_parser=parser) as gateway:
        session = gateway.session()
        answer = post(session, tools=tools, parallel_tool_calls=False)
        assert answer.status_code == status
        answer = post(session, MESSAGES, tools=given, tool_choice=choice)
        assert answer.status_code == status


def test_an_empty_response(session):
    found = message(post(session, max_tokens=0))
    assert found["content"] == ""
    stream = post(session, max_tokens=0, stream=True)
    assert stream.text.endswith("data: [DONE]\n\n")
    blocks = post(session, MESSAGES, max_tokens=0).json()["content"]
    assert blocks == [{"type": "text", "text": ""}]


def test_log_probs_of_a_stream_without_content(fake_engine):
    with Gateway(fake_engine, tool_call_parser="qwen25") as gateway:
        session = gateway.session()
        answer = post(
            session,
            messages=[{"role": "user", "content": CALL}],
            tools=TOOLS,
            max_tokens=200,
            logprobs=True,
            stream=True,
        )
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.split("\n\n")
        if line.startswith("data: {")
    ]
    rows = [
        row
        for chunk in chunks
        for row in (chunk["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    assert len(rows) == len(session.turns[0].completion.token_ids)


# Start and end.


def test_the_end_with_requests_in_flight(fake, fake_engine):
    with hanging(fake, 8) as (pool, has_come):
        with Gateway(fake_engine) as gateway:
            session = gateway.session()
            asked = [pool.submit(post, session, stream=i % 2 == 0) for i in range(8)]
            has_come()
            start = time.monotonic()
        assert time.monotonic() - start < 30
        for each in asked:
            with pytest.raises(
                (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
            ):
                each.result()
        fake.wait_for("/abort_request", 1)
    assert not session.turns
    assert repr(gateway) == "Gateway(not started, sessions=1)"
    gateway.shutdown()


@pytest.mark.parametrize("turns", range(5))
def test_connections_that_are_accepted_at_the_end_are_closed(turns):
    async def run():
        app = web.Application()
        app[STRANGERS] = Strangers()
        runner = web.AppRunner(app)
        await runner.setup()
        site = BoundedSite(runner, "127.0.0.1", 0, app[STRANGERS])
        await site.start()
        clients = [
            socket.create_connection(runner.addresses[0], timeout=30) for _ in range(3)
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        await runner.cleanup()
        return clients

    for client in asyncio.run(run()):
        with client, suppress(ConnectionResetError):
            assert client.recv(1) == b""
    # The warning of a socket that nobody closed is an error of this test.
    gc.collect()


def test_a_port_in_use(fake_engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}.*in use"):
            Gateway(fake_engine, port=port).start()


def test_a_gateway_starts_once(fake_engine):
    gateway = Gateway(fake_engine)
    gateway.shutdown()
    gateway.start()
    with pytest.raises(ConfigurationError, match="already"):
        gateway.start()
    assert post(gateway.session()).status_code == 200
    gateway.shutdown()
    with pytest.raises(ConfigurationError, match="already"):
        gateway.start()


def test_a_session_that_is_dropped_while_it_generates(fake, fake_engine, tmp_path):
    """Nothing of it is in the file, which can be read back."""
    path = tmp_path / "sessions"
    fake.silent_while_paused = True
    with Gateway(fake_engine, path=path) as gateway, ThreadPoolExecutor(1) as pool:
        session = gateway.session()
        run_sync(fake_engine.control.pause("retract"))
        asked = pool.submit(post, session)
        fake.wait_for("/generate", 1)
        gateway.drop(session)
        run_sync(fake_engine.control.resume())
        assert asked.result().status_code == 410
        assert session.turns == []
    assert Gateway(fake_engine, path=path).sessions == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"default_sampling_params": {"temprature": 1}}, "'temperature'"),
        ({"forced_sampling_params": {"max_token": 1}}, "'max_new_tokens'"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"session_seconds": 0}, "session_seconds"),
        ({"keep_alive_seconds": 0}, "keep_alive_seconds"),
        ({"request_timeout": -1}, "request_timeout"),
        ({"port": 70_000}, "port"),
    ],
)
def test_arguments_are_checked(fake_engine, arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        Gateway(fake_engine, **arguments)


def test_sampling_parameters_of_the_gateway(fake, fake_engine):
    with Gateway(
        fake_engine,
        default_sampling_params={"temperature": 0.5, "max_tokens": 3},
        forced_sampling_params={"top_p": 0.9},
    ) as gateway:
        post(gateway.session(), max_tokens=None, top_p=0.1, min_tokens=2)
    (sent,) = fake.payloads()[0]["sampling_params"]
    assert sent["temperature"] == 0.5
    assert sent["top_p"] == 0.9
    assert sent["max_new_tokens"] == 3
    assert sent["min_new_tokens"] == 2
