"""Sessions in a file: they survive the gateway, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import math
import signal
import sqlite3
import subprocess
import time

import pytest
import requests
from helpers.fake_server import FakeServer
from helpers.forked_starts import trainer_python
from helpers.gateway_client import message, post
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang, Gateway
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.session import RewardTarget, Session
from torchrl_sglang.gateway.store import Store
from torchrl_sglang.gateway.turns import Prompt, Turn
from torchrl_sglang.requests.token_values import concatenate, unknown_values
from torchrl_sglang.types import Completion, TokenLayout, VersionSpan

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
        setting=PromptSettings(
            tools=[{"type": "function"}], template_kwargs={"a": [1]}
        ),
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
        model="m",
        user="\udc00",
        metadata={"run": [1]},
        request_id="r",
    )


LISTS = TokenLayout(name="lists", dtype="int32", shape=None)


def read(path):
    """Returns the sessions in a file."""
    store = Store(path)
    sessions = store.load()
    store.close()
    return sessions


def state(session):
    """Returns all of a session as texts, in which NaN equals NaN."""
    about = (session.name, session.key, session.group, session.reward, session.created)

    def given(pairs):
        # What is computed of the rest, when it is first needed.
        return {name: value for name, value in pairs if name != "digest"}

    turns = [dataclasses.asdict(turn, dict_factory=given) for turn in session.turns]
    return [repr(about), *map(repr, turns)]


def test_a_session_is_read_back_as_it_was(tmp_path):
    store = Store(tmp_path / "s")
    session = Session("a", key="k", group="g")
    session.add(make_turn())
    first = session.turns[0]
    session.add(make_turn(1, first))
    session.add(make_turn(2, log_probs=None, top_token_ids=None, top_log_probs=None))
    text = Prompt(
        setting=PromptSettings(tools=[]),
        new_messages=[],
        new_token_ids=[1],
        new_text="tell",
    )
    session.add(
        Turn(
            number=3,
            prompt=text,
            completion=Completion(
                token_ids=[],
                finish_reason="length",
                columns={"lists": unknown_values(LISTS, 0)},
            ),
            text="",
            reply={"role": "assistant", "content": ""},
            ended=False,
        )
    )
    session.reward = -0.5
    store.save_session(session)
    asyncio.run(store.save_turns(session, session.turns))
    store.close()
    (again,) = read(tmp_path / "s")
    assert state(again) == state(session)
    for turn in (session.turns[-1], again.turns[-1]):
        empty = turn.completion.columns["lists"]
        assert concatenate([empty, empty]).tolist() == []
    assert (tmp_path / "s").stat().st_mode & 0o77 == 0


def test_a_session_that_is_dropped_is_gone_with_its_later_turns(tmp_path):
    store = Store(tmp_path / "s")
    old, new = Session("a", key="old"), Session("a", key="new")
    store.save_session(old)
    asyncio.run(store.save_turns(old, [make_turn()]))
    store.delete(old)
    asyncio.run(store.save_turns(old, [make_turn(1)]))
    store.save_session(new)
    asyncio.run(store.save_turns(new, [make_turn()]))
    store.close()
    (left,) = read(tmp_path / "s")
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

    async def save():
        for _ in range(50):
            start = time.thread_time()
            await store.save_turns(session, session.turns)
            times.append(time.thread_time() - start)

    start = time.process_time()
    asyncio.run(save())
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
            said += [message(post(about["url"], key=about["key"], messages=said))]
            said += [{"role": "user", "content": "more"}]
            reply, _ = (
                message(post(about["url"], key=about["key"], messages=said))
                for _ in range(2)
            )
            requests.post(
                f"{about['url']}/reward",
                json={"reward": 0.5, "turn": 1},
                headers=owner,
                timeout=30,
            ).raise_for_status()
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
                assert post(session, messages=said).ok
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
        ("pragma user_version = 2", "its format is version 2"),
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
    asyncio.run(store.save_turns(session, [make_turn()]))
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


def ask(session, content="hi"):
    return post(session, messages=[{"role": "user", "content": content}])


@contextlib.contextmanager
def full_disk(gateway):
    """SQLite says that the disk is full."""
    file = gateway.keeper.store._file

    def limit(pages):
        file.execute(f"pragma max_page_count = {pages}")

    gateway.keeper.store._writer.submit(limit, 1).result()
    # Free pages would still be used.
    yield
    gateway.keeper.store._writer.submit(limit, 1 << 30).result()


def test_a_file_that_cannot_be_written_is_written_when_it_can_be(
    fake, fake_engine, tmp_path
):
    path = tmp_path / "s"
    with Gateway(fake_engine, path=path) as gateway:
        session, other = gateway.session("a"), gateway.session("other")
        assert ask(session).status_code == 200
        with full_disk(gateway):
            # Nothing is free in the pages that there are.
            refused = ask(session, "x" * 1_500)
            assert refused.status_code == 503
            assert "cannot be written" in refused.json()["error"]["message"]
            generated = len(fake.payloads())
            gateway.drop(other)
        assert len(session.turns) == 1
        for number in range(3):
            assert ask(session, f"later {number}").status_code == 200
        assert len(fake.payloads()) == generated + 3
        gateway.session("b")
        gateway.set_reward(session, 1.0)
        gateway.set_reward(session, 0.5, turn=session.turns[-1].number)
        expected = [turn.number for turn in session.turns]
        assert len(expected) == 4
        assert len(session.trajectories()) == 4
    a, b = Gateway(fake_engine, path=path).sessions
    assert [turn.number for turn in a.turns] == expected
    assert [a.reward, a.turns[-1].reward, b.name] == [1.0, 0.5, "b"]


def test_changes_are_written_in_their_order_once_they_can_be(tmp_path, caplog):
    store = Store(tmp_path / "s")
    first, second = Session("a", key="1"), Session("b", key="2")
    store.save_session(first)
    asyncio.run(store.written())
    failing = [True]
    execute = store._execute

    def broken(change):
        if failing[0]:
            store._error = sqlite3.OperationalError("disk I/O error")
            raise store._error
        execute(change)

    store._execute = broken
    first.reward = 1.0
    store.save_reward(first, RewardTarget("session", ""), 1.0)
    store.save_session(second)
    for _ in range(2):
        with pytest.raises(GatewayError, match="disk I/O error"):
            asyncio.run(store.written())
        with pytest.raises(GatewayError, match="disk I/O error"):
            store.check()
        with pytest.raises(GatewayError, match="disk I/O error"):
            asyncio.run(store.save_turns(second, [make_turn()]))
    failing[0] = False
    store.check()
    assert not store.has_failed
    asyncio.run(store.save_turns(second, [make_turn()]))
    store.close()
    store.close()
    one, two = read(tmp_path / "s")
    assert [one.reward, len(one.turns), len(two.turns)] == [1.0, 0, 1]


def test_a_change_that_can_never_be_written_stops_no_other(fake_engine, tmp_path):
    store = Store(tmp_path / "s")
    bad, good = Session("a", key="1"), Session("b", key="2")
    bad.created = object()
    store.save_session(bad)
    store.save_session(good)
    asyncio.run(store.written())
    store.close()
    (left,) = read(tmp_path / "s")
    assert left.name == "b"
    with (
        Gateway(fake_engine) as gateway,
        pytest.raises(ConfigurationError, match="Unicode"),
    ):
        gateway.session(group="\ud800")


def test_a_reward_does_not_bring_a_dropped_session_back(fake_engine, tmp_path):
    with Gateway(fake_engine, path=tmp_path / "s") as gateway:
        session = gateway.session("a")
        assert ask(session).status_code == 200
        gateway.drop(session)
        gateway.set_reward(session, 1.0)
        gateway.set_reward(session, 1.0, turn=0)
    assert Gateway(fake_engine, path=tmp_path / "s").sessions == []


def test_turns_are_freed_with_their_session(fake_engine, tmp_path):
    def alive():
        gc.collect()
        return sum(type(each) is Turn for each in gc.get_objects())

    before = alive()
    with Gateway(fake_engine, path=tmp_path / "s") as gateway:
        for _ in range(5):
            session = gateway.session()
            for number in range(3):
                assert ask(session, f"{number}").status_code == 200
            gateway.drop(session)
        del session
        # The server ends its part of a request after the client has the response.
        wait_until(lambda: alive() == before)
