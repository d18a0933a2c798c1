"""Rewards of sessions, agents, branches and turns, and where they stand in rows."""

from __future__ import annotations

import math
import random
import sqlite3
from contextlib import closing
from threading import Lock

import pytest
import requests
import torch
from helpers.gateway_client import message, post

from torchrl_sglang import Gateway
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.credit import trained_rule
from torchrl_sglang.gateway.export import to_rows
from torchrl_sglang.gateway.keeping import Keeper
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.turns import Prompt, Turn
from torchrl_sglang.types import Completion


def add(session, origin=None, *, model="m", length=2, **fields):
    """Adds a turn that goes on from another one."""
    turn = Turn(
        number=session.next_number(),
        prompt=Prompt(
            setting=PromptSettings(),
            new_messages=[{"role": "user", "content": f"{len(session.turns)}"}],
            new_token_ids=[1, 2, 3],
            origin=origin,
        ),
        completion=Completion(
            token_ids=[4] * length, log_probs=[-1.0] * length, finish_reason="stop"
        ),
        text="t",
        reply={"role": "assistant", "content": "t"},
        ended=True,
        model=model,
        **fields,
    )
    session.add(turn)
    return turn


def family():
    """Returns a session: 0 - 1 - 2 and 0 - 3 of "m", and a root 4 of "sub"."""
    session = Session("s")
    first = add(session)
    add(session, add(session, first))
    add(session, first, request_id="third")
    add(session, model="sub", length=3)
    return session


@pytest.mark.parametrize(
    ("part", "sums", "places"),
    [
        ({}, [1, 1, 1], [2, 1, 0]),
        ({"turn": 1}, [1, 0, 0], [1]),
        ({"turn": 0}, [1, 1, 0], [0, 0]),
        ({"turn": "third"}, [0, 1, 0], [1]),
        ({"agent": "m"}, [1, 1, 0], [2, 1]),
        ({"agent": "sub"}, [0, 0, 1], [0]),
        ({"branch": 0}, [1, 1, 0], [2, 1]),
        ({"branch": 1}, [1, 0, 0], [2]),
        ({"branch": "third"}, [0, 1, 0], [1]),
    ],
)
def test_what_a_reward_counts_for(part, sums, places):
    session = family()
    session.set_reward(9.0, **part)
    session.set_reward(1.0, **part)
    rows = to_rows([session])
    assert [row["next", "reward"].item() for row in rows] == sums
    paths = session.trajectories()
    found = [list(path.rewards).index(1.0) for path in paths if any(path.rewards)]
    assert found == places
    for row, path in zip(rows, paths, strict=True):
        first = path.turns[0].prompt.num_tokens
        ends = {turn.num_tokens - 1 - first: i for i, turn in enumerate(path.turns)}
        for position, reward in enumerate(row["turn_rewards"].tolist()):
            expected = path.rewards[ends[position]] if position in ends else 0
            assert reward == expected


def test_all_of_them_add_up():
    session = family()
    assert [path.reward for path in session.trajectories()] == [None] * 3
    session.set_reward(1.0)
    session.set_reward(0.5, turn=0)
    session.set_reward(0.25, agent="m")
    session.set_reward(0.125, branch=1)
    assert [path.reward for path in session.trajectories()] == [1.875, 1.75, 1.0]
    kept = session.snapshot()
    session.set_reward(0.0, branch=1)
    session.set_reward(0.0, agent="m")
    assert [path.reward for path in kept.trajectories()] == [1.875, 1.75, 1.0]


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 1.0])
def test_returns_are_the_closed_form(discount):
    """Of random trees: with one reward R after n turns, d**n R, and so on."""
    chance = random.Random(int(discount * 10))
    session = Session("s")
    session.discount = discount
    for _ in range(30):
        origin = chance.choice([None, *session.turns[-3:]])
        add(session, origin, length=chance.randrange(1, 4))
    for turn in session.turns:
        session.set_reward(chance.random(), turn=turn.number)
    session.set_reward(2.0)
    rows, paths = to_rows([session]), session.trajectories()
    assert max(len(path.turns) for path in paths) > 3
    for row, path in zip(rows, paths, strict=True):
        standing = torch.tensor([turn.reward for turn in path.turns]).double()
        standing[-1] += 2.0
        count = len(standing)
        steps = (torch.arange(count)[None] - torch.arange(count)[:, None]).double()
        powers = torch.where(steps >= 0, discount ** steps.clamp(min=0), 0)
        wanted = powers @ standing
        torch.testing.assert_close(torch.tensor(path.returns).double(), wanted)
        assert row["next", "reward"].item() == pytest.approx(wanted[0].item())
        expected = torch.zeros(path.turns[-1].num_tokens)
        for value, (_, _, start, end) in zip(wanted, path.spans(), strict=True):
            expected[start:end] = value
        first = path.turns[0].prompt.num_tokens
        torch.testing.assert_close(row["turn_returns"], expected[first:])


def test_a_turn_is_credited_with_later_rewards():
    """Where it is in no row, as that of a summary that is not trained."""
    session = Session("s")
    session.is_trained = trained_rule("m")
    summary = add(session, add(session, add(session)), model="small")
    add(session, model="small", reward=3.0)
    add(session, summary, model="small", reward=0.5)
    session.set_reward(0.25, turn=summary.number)
    session.set_reward(1.0, turn=1)
    (path,) = session.trajectories()
    assert path.rewards == [0.0, 1.75]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"turn": 9}, "turn=9 of session 's', which has 7 turns up to 6"),
        ({"turn": True}, "turn=True"),
        ({"turn": "no"}, "turn='no'"),
        ({"turn": "twice"}, "2 turns; give one of their numbers, 5, 6"),
        ({"branch": -1}, "turn=-1"),
        ({"agent": "M"}, "agent='M' of session 's': .* 'm', 'sub'"),
        ({"turn": 0, "agent": "m"}, "got turn and agent"),
    ],
)
def test_rewards_of_nothing_are_refused(part, told):
    session = family()
    for _ in range(2):
        add(session, request_id="twice")
    with pytest.raises(ConfigurationError, match=told):
        session.set_reward(1.0, **part)


@pytest.mark.parametrize("discount", [-0.1, 1.5, True, "0.5", float("nan")])
def test_wrong_discounts_are_refused(fake_engine, discount):
    with pytest.raises(ConfigurationError, match="in \\[0, 1\\]"):
        Gateway(fake_engine, discount=discount)


def test_over_http_and_in_the_file(fake_engine, tmp_path):
    path = tmp_path / "s"
    rewards = {"agent": "m", "branch": 1, "turn": "mine"}
    with Gateway(fake_engine, path=path, discount=0.5) as gateway:
        session = gateway.session("a")
        messages = [{"role": "user", "content": "hello"}]
        key = {"Authorization": f"Bearer {session.key}"}
        for name in ("other", "mine"):
            answer = post(session, headers={"x-request-id": name}, messages=messages)
            messages += [message(answer), messages[0]]
        url = f"{session.url}/reward"
        for name, part in rewards.items():
            body = {"reward": 1.0, name: part}
            assert requests.post(url, json=body, headers=key, timeout=30).ok
        for wrong in ({"agent": "x"}, {"turn": "x"}, {"turm": 0}, {"branch": 7}):
            body = {"reward": 1.0, **wrong}
            answer = requests.post(url, json=body, headers=key, timeout=30)
            assert answer.status_code == 400
        shown = requests.get(session.url, headers=key, timeout=30).json()
        assert shown["trajectories"][0]["rewards"] == [0.0, 3.0]
        assert shown["trajectories"][0]["returns"] == [1.5, 3.0]
        dropped = gateway.session("b")
        gateway.drop(dropped)
    with Gateway(fake_engine, path=path, discount=0.5) as gateway:
        (row,) = gateway.to_tensordict()
        assert row["next", "reward"].item() == 1.5
        gateway.drop(gateway.find(name="a"))
    with closing(sqlite3.connect(path)) as file, file:
        assert file.execute("select count(*) from rewards").fetchone() == (0,)


def test_discarded_turns_and_metrics_over_http_and_in_the_file(fake_engine, tmp_path):
    path = tmp_path / "s"
    with Gateway(fake_engine, path=path) as gateway:
        session = gateway.session("a")
        messages = [{"role": "user", "content": "hello"}]
        for name in ("first", "first", "second/2"):
            answer = post(session, messages=messages, model=name)
            messages += [message(answer), messages[0]]
        post(session, messages=[{"role": "user", "content": "other"}], model="first")
        gateway.set_reward(session, 1.0, agent="first")
        gateway.set_metrics(session, {"right": 1.0, "calls/all": 2})
        key = {"Authorization": f"Bearer {session.key}"}
        url = f"{session.url}/agents/second%2F2"
        assert requests.delete(url, timeout=30).status_code == 401
        assert requests.delete(url, headers=key, timeout=30).ok
        assert [turn.model for turn in session.turns] == ["first"] * 3
        gateway.discard(session, "nobody")
    with Gateway(fake_engine, path=path) as gateway:
        (session,) = gateway.sessions
        rows = gateway.to_tensordict()
        assert [turn.model for turn in session.turns] == ["first"] * 3
        assert session.agent_rewards == {"first": 1.0}
        for row in rows:
            metrics = row["next", "metrics"]
            assert {k: v.item() for k, v in metrics.items()} == {
                "right": 1.0,
                "calls/all": 2.0,
            }
        gateway.discard(session, "first")
        assert not session.turns
        assert not session.agent_rewards


def test_a_discarded_turn_stays_where_another_agent_continues_it():
    session = Session("s")
    first = add(session)
    add(session, first, model="sub")
    keeper = Keeper(Lock())
    keeper.withdraw(session, session.turns[::-1][1:])
    assert first in session.turns


@pytest.mark.parametrize("metrics", [{"a": math.nan}, {"a": "1"}, {1: 1.0}, [1.0]])
def test_metrics_that_are_no_numbers_are_refused(metrics):
    with pytest.raises(ConfigurationError, match="metric"):
        Session("s").set_metrics(metrics)
