"""Dialects are rows: one that the gateway has never heard of works like its own."""

from __future__ import annotations

import json
from functools import partial

import pytest
import requests

from torchrl_sglang import Gateway
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.base import Dialect, Endpoint, Writer
from torchrl_sglang.gateway.dialects.registry import DIALECTS
from torchrl_sglang.gateway.policy import Sampling
from torchrl_sglang.gateway.request import Request
from torchrl_sglang.testing.dialect_contract import DialectContract


def read(body):
    if "say" not in body:
        raise ConfigurationError("say is required.")
    return Request(
        messages=[{"role": "user", "content": body["say"]}],
        sampling=Sampling(params={"max_new_tokens": body.get("most", 4)}),
        model="",
        stream=bool(body.get("live")),
    )


class PlainWriter(Writer):
    def __init__(self, request, info):
        self._name = info.name

    def answer(self, turns, usage):
        said = [turn.reply["content"] for turn in turns]
        return {"name": self._name, "said": said, "tokens": usage.response}

    def events(self, turns, usage):
        yield b"data: " + json.dumps(self.answer(turns, usage)).encode() + b"\n\n"


class Plain(Dialect):
    endpoints = (
        Endpoint(path="/v1/plain", read=read, write=PlainWriter),
        Endpoint(path="/v1/plain/length", read=read, count=lambda n: {"length": n}),
    )

    def key(self, headers):
        return headers.get("x-plain-key")

    def error(self, failure):
        return {"wrong": failure.message, "status": failure.status}


def contents_of(events):
    """Returns the contents of server-sent events."""
    lines = [line for line in events.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


class _UsesEngine:
    @pytest.fixture(autouse=True)
    def _use(self, engine):
        self.new_gateway = partial(Gateway, engine, dialects=[*DIALECTS, Plain()])

    def gateway(self):
        return self.new_gateway()


class TestPlain(_UsesEngine, DialectContract):
    path = "/v1/plain"

    def body(self, text, *, stream):
        return {"say": text, "live": stream}

    def headers(self, key):
        return {"x-plain-key": key}

    def said(self, answer):
        return answer["said"][0]

    def joined(self, events):
        return self.said(json.loads(events.removeprefix("data: ")))


class TestOpenAI(_UsesEngine, DialectContract):
    path = "/v1/chat/completions"

    def body(self, text, *, stream):
        messages = [{"role": "user", "content": text}]
        return {"model": "m", "messages": messages, "max_tokens": 4, "stream": stream}

    def headers(self, key):
        return {"Authorization": f"Bearer {key}"}

    def said(self, answer):
        return answer["choices"][0]["message"]["content"]

    def joined(self, events):
        chunks = contents_of(events.removesuffix("data: [DONE]\n\n"))
        deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)


class TestResponses(TestOpenAI):
    path = "/v1/responses"

    def body(self, text, *, stream):
        return {"model": "m", "input": text, "max_output_tokens": 4, "stream": stream}

    def said(self, answer):
        return answer["output"][0]["content"][0]["text"]

    def joined(self, events):
        return "".join(each.get("delta", "") for each in contents_of(events))


class TestAnthropic(TestOpenAI):
    path = "/v1/messages"

    def headers(self, key):
        return {"x-api-key": key}

    def said(self, answer):
        return "".join(block["text"] for block in answer["content"])

    def joined(self, events):
        deltas = (each.get("delta", {}) for each in contents_of(events))
        return "".join(delta.get("text", "") for delta in deltas)


class _CarelessWriter(PlainWriter):
    def answer(self, turns, usage):
        return {"said": ["something else"]}


class _Careless(Plain):
    """Answers something else than the policy, and refuses nothing."""

    endpoints = (
        Endpoint(
            path="/v1/plain",
            read=lambda body: read({"say": "Hi", "live": "live" in str(body)}),
            write=_CarelessWriter,
        ),
    )

    def key(self, headers):
        return "the same for all"


class TestThatFails(TestPlain):
    """The contract finds a dialect that does not keep it."""

    def gateway(self):
        return self.new_gateway(dialects=[_Careless()], api_key="the same for all")

    @pytest.fixture(autouse=True)
    def _fails(self, request):
        request.applymarker(
            pytest.mark.xfail(raises=AssertionError, strict=True, reason="on purpose")
        )


@pytest.fixture
def gateway(engine):
    with Gateway(engine, dialects=[*DIALECTS, Plain()]) as gateway:
        yield gateway


def post(gateway, path, body, *, session):
    url = f"{gateway.url}{path}"
    headers = {"x-plain-key": session.key}
    return requests.post(url, json=body, headers=headers, timeout=60)


def test_a_dialect_of_somebody_else(gateway):
    session = gateway.session()
    answer = post(gateway, "/v1/plain", {"say": "hi"}, session=session).json()
    (turn,) = session.turns
    assert answer["tokens"] == len(turn.completion.token_ids) <= 4
    streamed = post(gateway, "/v1/plain", {"say": "a", "live": True}, session=session)
    assert streamed.headers["Content-Type"].startswith("text/event-stream")
    counted = post(gateway, "/v1/plain/length", {"say": "hi"}, session=session).json()
    assert counted == {"length": turn.prompt.num_tokens}


def test_its_errors(gateway):
    session = gateway.session()
    refused = post(gateway, "/v1/plain", {}, session=session)
    assert refused.status_code == 400
    assert refused.json() == {"wrong": "say is required.", "status": 400}
    # A key of another dialect's is none here.
    headers = {"Authorization": f"Bearer {session.key}"}
    url = f"{gateway.url}/v1/plain"
    answer = requests.post(url, json={"say": "a"}, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["status"]) == (401, 401)
    # So is an address without a route, which belongs to a dialect by its path.
    assert requests.get(url, timeout=60).json()["status"] == 405


@pytest.mark.parametrize(
    ("dialects", "message"),
    [
        ([], "must be objects"),
        ([Plain], "must be objects"),
        ([*DIALECTS, *DIALECTS], "Two of dialects have /v1/chat/completions"),
    ],
)
def test_invalid_dialects_are_refused(engine, dialects, message):
    with pytest.raises(ConfigurationError, match=message):
        Gateway(engine, dialects=dialects)
