"""Dialects are rows: one that the gateway has never heard of works like its own."""

from __future__ import annotations

import json

import pytest
import requests

from torchrl_sglang import Gateway
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.base import Dialect, Endpoint, Writer
from torchrl_sglang.gateway.dialects.registry import DIALECTS
from torchrl_sglang.gateway.policy import Sampling
from torchrl_sglang.gateway.request import Request


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
    assert answer["said"] == [turn.reply["content"]]
    assert answer["tokens"] == len(turn.completion.token_ids) <= 4
    streamed = post(gateway, "/v1/plain", {"say": "a", "live": True}, session=session)
    assert streamed.headers["Content-Type"].startswith("text/event-stream")
    content = json.loads(streamed.text.removeprefix("data: "))
    assert content["said"] == [session.turns[1].reply["content"]]
    counted = post(gateway, "/v1/plain/length", {"say": "hi"}, session=session).json()
    assert counted == {"length": turn.prompt.num_tokens}
    # What it wrote is trained on as everything else.
    assert gateway.to_tensordict([session]).shape[0] == 2


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
def test_what_is_no_dialect(engine, dialects, message):
    with pytest.raises(ConfigurationError, match=message):
        Gateway(engine, dialects=dialects)
