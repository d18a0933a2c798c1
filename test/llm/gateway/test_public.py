"""Agents on other machines: addresses by name, and keys that expire."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
import requests
from aiohttp import web

from torchrl_sglang import Gateway
from torchrl_sglang.errors import ConfigurationError, GatewayError

HELLO = [{"role": "user", "content": "hello"}]
PUBLIC = "https://gateway.example.org/agents"


def ask(url: str, key: str | None = None, **headers: str) -> requests.Response:
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    body = {"messages": HELLO, "max_tokens": 2}
    return requests.post(
        f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
    )


@pytest.fixture
def path(tmp_path: Any) -> str:
    return str(tmp_path / "sessions.sqlite")


def test_sessions_have_the_public_address(fake_engine: Any, path: str) -> None:
    options = {"public_url": f"{PUBLIC}/", "api_key": "sk-own", "path": path}
    with Gateway(fake_engine, **options) as gateway:
        session = gateway.session("mine")
        assert session.url == f"{PUBLIC}/sessions/mine"
        assert session.base_url == f"{PUBLIC}/sessions/mine/v1"
        made = requests.post(
            f"{gateway.url}/sessions",
            json={"name": "theirs"},
            headers={"Authorization": "Bearer sk-own"},
            timeout=60,
        ).json()
        assert made["url"] == gateway.find(name="theirs").url
        assert made["url"] == f"{PUBLIC}/sessions/theirs"
        assert made["expires"] is None
        # A proxy of this machine asks for everybody.
        local = f"{gateway.url}/sessions/mine"
        assert ask(local).status_code == 401
        assert ask(local, made["key"]).status_code == 403
        assert ask(local, session.key).status_code == 200
    with Gateway(fake_engine, **options) as gateway:
        assert gateway.find(name="mine").url == f"{PUBLIC}/sessions/mine"


@pytest.mark.parametrize(
    "wrong",
    [
        *("gateway.example.org", "ftp://a", "https://", "https://a b", "", 5),
        *(
            "https://user:secret@a",
            "https://a/?b=c",
            "http://0.0.0.0:80",
            "http://[::]",
        ),
    ],
)
def test_what_is_no_public_address_is_refused(fake_engine: Any, wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Gateway(fake_engine, public_url=wrong, api_key="sk-own")
    assert "secret" not in str(caught.value)


def test_a_public_address_needs_a_key(fake_engine: Any) -> None:
    with pytest.raises(ConfigurationError, match="api_key"):
        Gateway(fake_engine, public_url=PUBLIC)


def test_a_key_expires_and_says_so(fake_engine: Any, path: str) -> None:
    options = {"path": path, "api_key": "sk-own"}
    with Gateway(fake_engine, key_seconds=3600, **options) as gateway:
        session = gateway.session("mine")
        assert session.expires == session.created + 3600
        assert ask(gateway.url, session.key).status_code == 200
    # The session is older than that by now.
    with Gateway(fake_engine, key_seconds=1e-6, **options) as gateway:
        session = gateway.find(name="mine")
        for url in (gateway.url, session.url):
            answer = ask(url, session.key)
            error = answer.json()["error"]
            assert answer.status_code == 401
            assert error["code"] == "key_expired"
            assert "'mine' expired at 20" in error["message"]
            assert "key_seconds" in error["message"]
        with (
            openai.OpenAI(base_url=session.base_url, api_key=session.key) as client,
            pytest.raises(openai.AuthenticationError, match="expired"),
        ):
            client.chat.completions.create(model="policy", messages=HELLO)
        about = requests.get(
            session.url, headers={"x-api-key": session.key}, timeout=60
        )
        assert about.status_code == 401
        with pytest.raises(GatewayError, match="expired") as caught:
            gateway.find(key=session.key)
        assert caught.value.code == "key_expired"
        # What was recorded stays the trainer's.
        assert ask(session.url, "sk-own").status_code == 200
        gateway.set_reward(session, 1.0)
        assert len(gateway.find(name="mine").turns) == 2
    with Gateway(fake_engine, **options) as gateway:
        assert ask(gateway.url, gateway.find(name="mine").key).status_code == 200


@pytest.mark.parametrize("wrong", [0, -1, "1", float("nan")])
def test_a_time_that_is_none_is_refused(fake_engine: Any, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="key_seconds"):
        Gateway(fake_engine, key_seconds=wrong)


def test_a_proxy_hands_requests_on(fake_engine: Any) -> None:
    """Its clients see its address only, also in a stream."""

    async def run() -> list[str]:
        upstream: list[str] = []

        async def hand_on(request: web.Request) -> web.StreamResponse:
            url = upstream[0] + request.path.removeprefix("/agents")
            async with aiohttp.ClientSession() as client:
                headers = {"Authorization": request.headers["Authorization"]}
                body = await request.read()
                async with client.post(url, data=body, headers=headers) as answer:
                    response = web.StreamResponse(status=answer.status)
                    await response.prepare(request)
                    async for part in answer.content.iter_any():
                        await response.write(part)
            return response

        app = web.Application()
        app.router.add_post("/agents/{rest:.*}", hand_on)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        public = f"http://127.0.0.1:{runner.addresses[0][1]}/agents"
        try:
            options = {"public_url": public, "api_key": "sk-own"}
            with Gateway(fake_engine, **options) as gateway:
                upstream.append(gateway.url)
                session = gateway.session()
                async with openai.AsyncOpenAI(
                    base_url=session.base_url, api_key=session.key
                ) as client:
                    stream = await client.chat.completions.create(
                        model="policy", messages=HELLO, stream=True, max_tokens=2
                    )
                    parts = [part async for part in stream]
                assert len(session.turns) == 1
                return [str(part.choices[0].finish_reason) for part in parts][-1:]
        finally:
            await runner.cleanup()

    assert asyncio.run(run()) in (["length"], ["stop"])
