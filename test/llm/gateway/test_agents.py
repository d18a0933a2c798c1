"""Agents: hundreds at once, and those that fail."""

from __future__ import annotations

import asyncio
import logging
import sys

import aiohttp
import numpy as np
import pytest
import torch

from torchrl_sglang import Gateway
from torchrl_sglang.errors import ConfigurationError, GatewayError

AGENTS = 200


@pytest.fixture
def gateway(fake_engine):
    with Gateway(fake_engine) as gateway:
        yield gateway


async def ask(base_url, api_key, *messages):
    body = {"model": "m", "messages": messages, "max_tokens": 4}
    headers = {"Authorization": f"Bearer {api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{base_url}/chat/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        return (await answer.json())["choices"][0]["message"]


def run(gateway, agent, tasks, **kwargs):
    return asyncio.run(gateway.run_agents(agent, tasks, **kwargs))


def test_hundreds_of_agents_at_once(gateway):
    async def agent(task, *, base_url, api_key):
        first = {"role": "user", "content": str(task)}
        said = await ask(base_url, api_key, first)
        more = {"role": "user", "content": f"more {task}"}
        await ask(base_url, api_key, first, said, more)
        return task / 2

    groups = run(gateway, agent, range(AGENTS // 2), group_size=2)
    assert [len(group) for group in groups] == [2] * (AGENTS // 2)
    for task, group in enumerate(groups):
        assert [session.reward for session in group] == [task / 2] * 2
        assert len({session.group for session in group}) == 1
        for session in group:
            assert [turn.prompt.parent for turn in session.turns] == [None, 0]
            assert session.turns[1].prompt.messages[0]["content"] == str(task)
    assert len({group[0].group for group in groups}) == AGENTS // 2
    assert len(gateway.sessions) == AGENTS


def test_at_most_so_many_run_at_once(gateway):
    running, most = 0, 0

    async def agent(task, *, base_url, api_key):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    run(gateway, agent, range(20), max_concurrent=3)
    assert most == 3


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (None, None),
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (torch.tensor([0.25]), 0.25),
    ],
)
def test_what_a_reward_is(gateway, reward, expected):
    async def agent(task, *, base_url, api_key):
        return reward

    ((session,),) = run(gateway, agent, [0])
    assert session.reward == expected
    assert type(session.reward) is type(expected)


async def fails(task):
    raise ValueError("no luck")


async def hangs(task):
    await asyncio.sleep(600)


async def leaves(task):
    # As a client's own timeout does.
    raise asyncio.CancelledError


async def cancels_itself(task):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


def exits(task):
    sys.exit(3)


@pytest.mark.parametrize(
    ("behaviour", "kind", "told"),
    [
        (fails, ValueError, "ValueError: no luck"),
        (hangs, TimeoutError, "longer than timeout=0.2 s"),
        (leaves, RuntimeError, "awaited something that was cancelled"),
        (cancels_itself, RuntimeError, "cancelled itself"),
        (exits, RuntimeError, "SystemExit"),
        *(
            (value, ConfigurationError, "it returns a reward, a finite number")
            for value in ("1", float("nan"), float("inf"), [1.0, 2.0], {}, 1j)
        ),
    ],
)
def test_an_agent_that_fails_drops_its_session_alone(
    gateway, caplog, behaviour, kind, told
):
    def agent(task, *, base_url, api_key):
        if task != "bad":
            return good(task)
        return behaviour(task) if callable(behaviour) else returns(behaviour)

    async def good(task):
        return 1.0

    async def returns(value):
        return value

    with caplog.at_level(logging.WARNING, logger="torchrl"):
        groups = run(gateway, agent, ["a", "bad", "b"], group_size=2, timeout=0.2)
    assert [len(group) for group in groups] == [2, 0, 2]
    assert "The agent 'agent' failed at task 1, 'bad', and its" in caplog.text
    assert len(gateway.sessions) == 4
    with pytest.raises(GatewayError, match=f"All 1 agents failed.*{told}") as caught:
        run(gateway, agent, ["bad"], timeout=0.2)
    assert isinstance(caught.value.__cause__, kind)
    assert len(gateway.sessions) == 4


def test_a_wrong_signature_is_refused_at_once(gateway):
    async def agent(task, base_url):
        return 1.0

    with pytest.raises(GatewayError, match="All 200 agents failed.*TypeError") as error:
        run(gateway, agent, range(AGENTS))
    assert isinstance(error.value.__cause__, TypeError)
    assert gateway.sessions == []


def test_agents_beyond_the_limit_of_sessions_fail(fake_engine):
    async def agent(task, *, base_url, api_key):
        return 1.0

    with Gateway(fake_engine, max_sessions=3) as gateway:
        groups = run(gateway, agent, range(5))
        assert [len(group) for group in groups] == [1, 1, 1, 0, 0]


def test_a_run_that_is_cancelled_leaves_no_session(gateway):
    begun = asyncio.Event()

    async def agent(task, *, base_url, api_key):
        begun.set()
        await asyncio.sleep(600)

    async def cancelled():
        task = asyncio.ensure_future(gateway.run_agents(agent, range(4)))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert gateway.sessions == []


def test_without_tasks_there_is_nothing(gateway):
    assert run(gateway, fails, []) == []
