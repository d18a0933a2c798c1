"""Which turns are kept when clients hang up, and when others do so meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from urllib.parse import urlsplit

import pytest
from helpers.gateway_client import openai_client
from helpers.waiting import wait_until

from torchrl_sglang import Gateway
from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.dialects.openai import read_chat

TURNS = 60


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def chat(*messages):
    return read_chat({"model": "p", "messages": list(messages), "max_tokens": 4})


def test_clients_that_hang_up_after_the_last_event(fake_engine):
    """OpenAI's client closes a stream at ``[DONE]``, before its end."""
    with Gateway(fake_engine) as gateway:
        session = gateway.session()
        client = openai_client(session, max_retries=0)
        for number in range(TURNS):
            stream = client.chat.completions.create(
                model="p", messages=[user(str(number))], max_tokens=4, stream=True
            )
            assert list(stream)
        client.close()
        wait_until(lambda: len(session.turns) >= TURNS)
        time.sleep(0.2)
        assert len(session.turns) == TURNS


@pytest.fixture
def slow_disk(monkeypatch):
    """Returns a function that makes the next writes of a gateway slow."""

    def slow_down(gateway):
        store, entered = gateway.keeper.store, asyncio.Event()
        loop, write = asyncio.get_running_loop(), store._write_turns

        def slowly(*args):
            loop.call_soon_threadsafe(entered.set)
            time.sleep(0.1)
            write(*args)

        monkeypatch.setattr(store, "_write_turns", slowly)
        return entered

    return slow_down


def numbers(session) -> list[int]:
    return [turn.number for turn in session.turns]


def test_a_turn_that_others_go_on_from_is_not_withdrawn(
    fake_engine, tmp_path, slow_disk
):
    path = str(tmp_path / "sessions.sqlite")

    async def main(gateway):
        session = gateway.session("a")
        (first,) = await gateway.respond(session, chat(user("hi")))
        entered = slow_disk(gateway)
        going_on = chat(user("hi"), first.reply, user("go on"))
        task = asyncio.ensure_future(gateway.respond(session, going_on))
        await entered.wait()
        # Its connection seems to have broken; another request shows that it has not.
        gateway.keeper.withdraw(session, [first])
        (second,) = await task
        assert second.prompt.origin is first
        assert numbers(session) == [0, 1]
        assert gateway.to_tensordict([session]).shape == (1,)

    with Gateway(fake_engine, path=path) as gateway:
        asyncio.run(main(gateway))
    with Gateway(fake_engine, path=path) as gateway:
        assert numbers(gateway.session("a")) == [0, 1]


def test_a_client_that_hangs_up_deletes_no_turn_of_others(
    fake_engine, tmp_path, slow_disk
):
    """Two go on from a turn that was withdrawn, and one of them is cancelled."""
    path = str(tmp_path / "sessions.sqlite")

    async def main(gateway):
        session = gateway.session("a")
        (first,) = await gateway.respond(session, chat(user("hi")))
        gate, respond = asyncio.Event(), gateway.policy.respond

        async def held(*args, **kwargs):
            answer = await respond(*args, **kwargs)
            await gate.wait()
            return answer

        gateway.policy.respond = held
        tasks = [
            asyncio.ensure_future(
                gateway.respond(session, chat(user("hi"), first.reply, user(said)))
            )
            for said in ("one", "two")
        ]
        while session.generating < 2:  # noqa: ASYNC110 - It is a number of others.
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        gateway.keeper.withdraw(session, [first])
        entered = slow_disk(gateway)
        gate.set()
        await entered.wait()
        tasks[1].cancel()
        await tasks[0]
        return numbers(session)

    with Gateway(fake_engine, path=path) as gateway:
        known = asyncio.run(main(gateway))
        assert known[0] == 0
    with Gateway(fake_engine, path=path) as gateway:
        assert numbers(gateway.session("a")) == known


def test_a_reward_after_the_file_was_closed(fake_engine, tmp_path):
    with Gateway(fake_engine, path=str(tmp_path / "sessions.sqlite")) as gateway:
        session = gateway.session()
    with pytest.raises(GatewayError, match="closed by shutdown"):
        gateway.set_reward(session, 1.0)
    with Gateway(fake_engine) as gateway:
        session = gateway.session()
    gateway.set_reward(session, 1.0)
    assert session.reward == 1.0


def test_a_limit_of_tokens_where_the_default_has_none(fake_engine):
    with Gateway(
        fake_engine, max_tokens=5, default_sampling_params={"max_new_tokens": None}
    ) as gateway:
        session = gateway.session()
        client = openai_client(session, max_retries=0)
        client.chat.completions.create(
            model="p", messages=[user("hi")], modalities=["text"]
        )
        assert session.num_tokens == 5


SAID = {"messages": [user("hi")], "max_tokens": 4}
REQUESTS = {
    "/v1/chat/completions": {**SAID, "n": 2},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": SAID,
}


def post(session, path, body, attempt):
    """Returns the connection of a request, whose answer is to be read."""
    place = urlsplit(session.url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    headers = {"x-api-key": session.key, "x-stainless-retry-count": str(attempt)}
    content = json.dumps({"model": "p", **body})
    connection.request("POST", place.path + path, content, headers)
    return connection


def read(connection) -> bytes:
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content
    return content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_a_client_that_repeats_a_request_gets_the_answer_that_it_did_not_read(
    fake_engine, tmp_path, path, stream
):
    """The first one stays in its connection's buffers; also after the gateway ends."""
    body = {**REQUESTS[path], "stream": stream}
    number = body.get("n", 1)
    file = tmp_path / "sessions.sqlite"
    with Gateway(fake_engine, path=file) as gateway:
        session = gateway.session("a")
        unread = post(session, path, body, 0)
        wait_until(lambda: len(session.turns) == number and not session.generating)
        gateway.set_reward(session, 0.5, turn=0)
        contents = [read(post(session, path, body, attempt)) for attempt in (1, 2)]
        known = numbers(session)
        unread.close()
    with Gateway(fake_engine, path=file) as gateway:
        session = gateway.session("a")
        contents.append(read(post(session, path, body, 1)))
        assert numbers(session) == known == list(range(number))
        assert session.turns[0].reward == 0.5
        # An equal request is not a repetition, and two of them are ambiguous.
        other = read(post(session, path, body, 0))
        assert len(session.turns) == 2 * number
    texts = [turn.answer_name.encode() for turn in session.turns]
    assert all(texts[0] in content for content in contents)
    assert texts[0] not in other


def test_a_repetition_after_the_conversation_went_on_is_another_request(fake_engine):
    with Gateway(fake_engine) as gateway:
        session = gateway.session()
        first = json.loads(read(post(session, "/v1/chat/completions", SAID, 0)))
        reply = first["choices"][0]["message"]
        going_on = {**SAID, "messages": [*SAID["messages"], reply, user("more")]}
        read(post(session, "/v1/chat/completions", going_on, 0))
        read(post(session, "/v1/chat/completions", SAID, 1))
        assert [turn.prompt.parent for turn in session.turns] == [None, 0, None]
