"""Sessions in a file: they survive the gateway, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import math
import signal
import sqlite3
import subprocess
import time

import pytest
import requests
from helpers.fake_server import FakeServer
from helpers.forked_starts import trainer_python

from torchrl_sglang import AsyncSGLang, Gateway
from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.session import Prompt, Session, Turn
from torchrl_sglang.gateway.store import Store
from torchrl_sglang.gateway.template import Setting
from torchrl_sglang.types import Completion, VersionSpan

WRITE_SECONDS = 0.001
"""Longest time that the event loop may spend on keeping a turn."""

TEXT = "grüß \ud800 \U0001f600"
"""With half of a pair of surrogates, as models produce."""

PROGRAM = """
import sys, time
from torchrl_sglang import AsyncSGLang, Gateway

url, path = sys.argv[1:]
gateway = Gateway(AsyncSGLang.connect(url), path=path, api_key="owner")
gateway.start()
print(gateway.url, flush=True)
time.sleep(600)
"""


def make_turn(number=0, origin=None, **changes):
    prompt = Prompt(
        setting=Setting(tools=[{"type": "function"}], template_kwargs={"a": [1]}),
        new_messages=[{"role": "user", "content": "grüß \ud800 \U0001f600"}],
        new_token_ids=[1, 2, 3, *range(10 * number)],
        origin=origin,
    )
    values = {
        "token_ids": [4, 5],
        "log_probs": [-0.123456789012345, math.nan],
        "logprobs_mode": "model",
        "top_token_ids": [[4, 6], [5, 7]],
        "top_log_probs": [[-0.1, -math.inf], [math.nan, -1.0]],
        "finish_reason": "stop",
        "matched_stop": 5,
        "versions": (
            VersionSpan(start=0, end=1, version="3"),
            VersionSpan(start=1, end=2, version="4"),
        ),
        "weight_version": "4",
        **changes,
    }
    return Turn(
        number=number,
        prompt=prompt,
        completion=Completion(**values),
        text="t",
        reply={"role": "assistant", "content": "t"},
        ended=True,
        reward=0.25,
    )


def chat(session_url, key, messages):
    answer = requests.post(
        f"{session_url}/v1/chat/completions",
        json={"model": "m", "messages": messages, "max_tokens": 4},
        headers={"Authorization": f"Bearer {key}"},
        timeout=30,
    )
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]


def state(session):
    """Returns all of a session as texts, in which NaN equals NaN."""
    about = (session.name, session.key, session.group, session.reward, session.created)
    return [repr(about), *(repr(dataclasses.asdict(turn)) for turn in session.turns)]


def test_a_session_is_read_back_as_it_was(tmp_path):
    store = Store(tmp_path / "s")
    session = Session("a", key="k", group="g")
    session.add(make_turn())
    first = session.turns[0]
    session.add(make_turn(1, first))
    session.add(make_turn(2, log_probs=None, top_token_ids=None, top_log_probs=None))
    text = Prompt(
        setting=Setting(tools=[]),
        new_messages=[],
        new_token_ids=[1],
        new_text="tell",
    )
    session.add(
        Turn(
            number=3,
            prompt=text,
            completion=Completion(token_ids=[], finish_reason="length"),
            text="",
            reply={"role": "assistant", "content": ""},
            ended=False,
        )
    )
    session.reward = -0.5
    store.save_session(session)
    for turn in session.turns:
        store.save_turn(session, turn)
    store.close()
    (again,) = (read := Store(tmp_path / "s")).load()
    read.close()
    assert state(again) == state(session)
    assert (tmp_path / "s").stat().st_mode & 0o77 == 0


def test_a_session_that_is_dropped_is_gone_with_its_later_turns(tmp_path):
    store = Store(tmp_path / "s")
    old, new = Session("a", key="old"), Session("a", key="new")
    store.save_session(old)
    store.save_turn(old, make_turn())
    store.delete(old)
    store.save_turn(old, make_turn(1))
    store.save_session(new)
    store.save_turn(new, make_turn())
    store.close()
    (left,) = (read := Store(tmp_path / "s")).load()
    read.close()
    assert (left.key, len(left.turns)) == ("new", 1)


def test_a_turn_of_8000_tokens_does_not_hold_the_loop_up(tmp_path):
    session, number = Session("a", key="k"), 8000
    session.add(
        make_turn(
            token_ids=list(range(number)),
            log_probs=[-1 / (i + 1) for i in range(number)],
            top_token_ids=None,
            top_log_probs=None,
        )
    )
    store = Store(tmp_path / "s")
    store.save_session(session)
    times = []
    for _ in range(50):
        start = time.thread_time()
        store.save_turn(session, session.turns[0])
        times.append(time.thread_time() - start)
    start = time.process_time()
    store.close()
    # Of the processor's time: others may use the machine, too.
    assert sorted(times)[len(times) // 2] < WRITE_SECONDS
    # The thread holds the interpreter's lock only shortly for each.
    assert (time.process_time() - start) / 50 < 10 * WRITE_SECONDS


def test_a_gateway_that_is_killed_goes_on_from_the_file(tiny_model_path, tmp_path):
    path = tmp_path / "s"
    with FakeServer(tiny_model_path) as server:
        process = subprocess.Popen(
            [trainer_python(), "-c", PROGRAM, server.url, str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            url = process.stdout.readline().strip()
            owner = {"Authorization": "Bearer owner"}
            about = requests.post(
                f"{url}/sessions",
                json={"name": "a", "group": "g"},
                headers=owner,
                timeout=30,
            ).json()
            said = [{"role": "user", "content": "hi"}]
            said += [chat(about["url"], about["key"], said)]
            said += [{"role": "user", "content": "more"}]
            reply = chat(about["url"], about["key"], said)
            chat(about["url"], about["key"], said)
            requests.post(
                f"{about['url']}/reward",
                json={"reward": 0.5, "turn": 1},
                headers=owner,
                timeout=30,
            ).raise_for_status()
            with pytest.raises(ConfigurationError, match="another gateway"):
                Store(path)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        with AsyncSGLang.connect(server.url) as engine:
            deadline = time.monotonic() + 10
            while True:
                # A fork outlives its interpreter by a moment.
                try:
                    gateway = Gateway(engine, path=path)
                    break
                except ConfigurationError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            with gateway:
                session = gateway.find(key=about["key"])
                assert (session.name, session.group) == ("a", "g")
                assert [turn.prompt.parent for turn in session.turns] == [None, 0, 0]
                assert session.turns[1].reward == 0.5
                said += [reply, {"role": "user", "content": "again"}]
                chat(session.url, session.key, said)
                turn = session.turns[3]
                assert turn.prompt.parent == 2
                known = session.turns[2].token_ids
                assert turn.prompt.token_ids[: len(known)] == known
                assert server.payloads()[-1]["input_ids"] == [turn.prompt.token_ids]


def damage(path, statement):
    with sqlite3.connect(path) as file:
        file.execute(statement)
    file.close()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("pragma user_version = 1", "its format is version 1"),
        ("pragma application_id = 7", "something else"),
        ("update turns set content = '{'", "Expecting"),
        ("update turns set token_ids = x'00'", "bytes length"),
        ("update turns set session = 'b'", "'b'"),
        ("drop table turns", "no such table"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, statement, problem):
    path = tmp_path / "s"
    store = Store(path)
    session = Session("a", key="k")
    store.save_session(session)
    store.save_turn(session, make_turn())
    store.close()
    damage(path, statement)
    for _ in range(2):  # The first one has let go of it.
        with pytest.raises(ConfigurationError, match=problem):
            Store(path).load()


def test_other_files_and_folders_are_refused(tmp_path):
    (tmp_path / "text").write_text("no database " * 1000)
    (tmp_path / "other").touch()
    damage(tmp_path / "other", "create table sessions (name text)")
    for path in (
        tmp_path / "text",
        tmp_path / "other",
        tmp_path / "none" / "s",
        tmp_path,
        "/proc/s",
    ):
        with pytest.raises(ConfigurationError, match="cannot be used as a file of"):
            Store(path)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["other", "text"]


def test_two_gateways_on_one_file_are_refused(fake_engine, tmp_path):
    with Gateway(fake_engine, path=tmp_path / "s") as gateway:
        gateway.session("a")
        with pytest.raises(ConfigurationError, match="another gateway has it open"):
            Gateway(fake_engine, path=tmp_path / "s")
    with Gateway(fake_engine, path=tmp_path / "s") as gateway:
        assert [session.name for session in gateway.sessions] == ["a"]


def test_a_file_that_cannot_be_written_is_told(fake_engine, tmp_path):
    with Gateway(fake_engine, path=tmp_path / "s") as gateway:
        session = gateway.session("a")
        # A key that SQLite has no type for stands for a disk that is full.
        session.created = object()
        gateway.set_reward(session, 1.0)
        answer = requests.post(
            f"{session.base_url}/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
            headers={"Authorization": f"Bearer {session.key}"},
            timeout=30,
        )
        assert answer.status_code == 503
        assert "cannot be written" in answer.json()["error"]["message"]
        with pytest.raises(GatewayError, match="cannot be written"):
            gateway.session("b")
