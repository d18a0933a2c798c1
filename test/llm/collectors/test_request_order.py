"""Which requests a server begins first, of an engine and of a collector."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from helpers.collecting import (
    ask_gateway,
    length_reward,
    one_turn_env,
    tasks,
    user,
)
from helpers.fake_server import FakeServer
from helpers.waiting import wait_until

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    Gateway,
    SGLangWrapper,
)
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.requests.request import GenerateRequest

ORDERED = {"enable_priority_scheduling": True, "disable_priority_preemption": True}


@pytest.fixture(scope="module")
def one_at_a_time(tiny_model_path: str) -> Iterator[AsyncSGLang]:
    """An engine whose server runs one request."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", max_running_requests=1, **ORDERED
    ) as engine:
        yield engine


def ask(priority: int | None, tokens: int = 2) -> GenerateRequest:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    return GenerateRequest(
        input_ids=[5, 6, 7], sampling_params=params, priority=priority
    )


async def order_of(engine: AsyncSGLang, priorities: list[int | None]) -> list[int]:
    """Returns the numbers of requests in the order in which they are complete."""
    ended: list[int] = []

    async def one(number: int, request: GenerateRequest) -> None:
        await engine.agenerate_requests([request])
        ended.append(number)

    begun = asyncio.create_task(one(-1, ask(0, tokens=400)))
    queued = [begun]
    loop = asyncio.get_running_loop()

    async def until(count: int) -> None:
        def waits() -> bool:
            (server,) = engine.stats().servers
            return (server.running, server.queued) == (1, count)

        await loop.run_in_executor(None, lambda: wait_until(waits))

    await until(0)
    for number, priority in enumerate(priorities):
        queued.append(asyncio.create_task(one(number, ask(priority))))
        await until(number + 1)
    await asyncio.gather(*queued)
    assert ended[0] == -1
    return ended[1:]


def test_the_greatest_is_begun_first(one_at_a_time):
    given = [0, -7, None, 12, 3]
    assert asyncio.run(order_of(one_at_a_time, given)) == [3, 4, 0, 1, 2]


def turns_of(engine, order):
    """Returns group and number of each turn of two, in the order in which they end."""
    turns = []

    def step(conversation, task):
        turns.append((task["answer"], len(conversation.turns)))
        return "Go on." if len(conversation.turns) < 2 else None

    policy = SGLangWrapper(
        engine, generate_kwargs={"max_new_tokens": 100, "ignore_eos": True}
    )
    collector = AsyncLLMCollector(
        policy=policy,
        prompts=tasks(4),
        rewards=length_reward,
        step=step,
        groups_per_batch=4,
        total_groups=4,
        max_staleness=0,
        request_order=order,
    )
    (batch,) = collector
    collector.shutdown()
    assert len(batch) == 8
    return turns


@pytest.mark.slow
def test_later_turns_of_older_groups(one_at_a_time):
    """They wait behind the first turns of all others, or go before them."""
    turns = turns_of(one_at_a_time, "arrival")
    assert [turn for _, turn in turns] == [1, 1, 1, 1, 2, 2, 2, 2]
    for _ in range(4):
        turns = turns_of(one_at_a_time, "oldest")
        # While its first turn was read, the next one's began. A client that gets no
        # processor meanwhile sends its second one too late.
        if turns.index(("0", 2)) < turns.index(("2", 1)) and (
            turns.index(("1", 2)) < turns.index(("3", 1))
        ):
            break
    else:
        pytest.fail(f"Older groups did not go first: {turns}")


@pytest.fixture
def ordered(tiny_model_path):
    with FakeServer(tiny_model_path, server_args=ORDERED) as server:
        yield server


async def agent(task, *, base_url, api_key):
    await ask_gateway(base_url, api_key, [user(task["query"])])
    return 1.0


@pytest.mark.parametrize("kind", ["functions", "environments", "agents"])
def test_of_every_kind_of_group(ordered, kind):
    with AsyncSGLang.connect(ordered.url) as engine, Gateway(engine) as gateway:
        given = {
            "functions": {"rewards": length_reward},
            "environments": {"env": one_turn_env},
            "agents": {"agent": agent, "gateway": gateway},
        }
        collector = AsyncLLMCollector(
            policy=SGLangWrapper(engine, generate_kwargs={"max_new_tokens": 4}),
            prompts=tasks(3),
            groups_per_batch=3,
            total_groups=3,
            group_size=2,
            request_order="oldest",
            **given[kind],
        )
        assert len(list(collector)) == 1
        collector.shutdown()
    sent = [number for each in ordered.payloads() for number in each["priority"]]
    assert sorted(sent) == [-2, -2, -1, -1, 0, 0]


def test_servers_that_begin_small_numbers_first(tiny_model_path):
    arguments = {**ORDERED, "schedule_low_priority_values_first": True}
    with (
        FakeServer(tiny_model_path, server_args=arguments) as server,
        AsyncSGLang.connect(server.url) as engine,
    ):
        params = {"max_new_tokens": 2}
        engine.generate(
            input_ids=[[5], [6]], sampling_params=params, priority=[3, None]
        )
        sent = {each["input_ids"][0][0]: each for each in server.payloads()}
        assert sent[5]["priority"] == [-3]
        assert "priority" not in sent[6]
        for wrong in ("high", 1.5, True, 2**40):
            with pytest.raises(ConfigurationError, match="not an integer"):
                engine.generate(input_ids=[5], priority=wrong)


def test_servers_that_ignore_priorities(fake, fake_engine):
    with pytest.raises(UnsupportedByServerError, match="enable_priority_scheduling"):
        fake_engine.generate(input_ids=[5], priority=1)
    assert not fake.payloads()
    given = {"prompts": tasks(3), "rewards": length_reward, "groups_per_batch": 3}
    with pytest.raises(UnsupportedByServerError, match="enable_priority_scheduling"):
        AsyncLLMCollector(
            policy=SGLangWrapper(fake_engine), request_order="oldest", **given
        )
    for order in ("shortest", "longest"):
        with pytest.raises(ConfigurationError, match=f"request_order='{order}'"):
            AsyncLLMCollector(
                policy=SGLangWrapper(fake_engine), request_order=order, **given
            )


def test_servers_that_interrupt(tiny_model_path):
    arguments = {"enable_priority_scheduling": True}
    with (
        FakeServer(tiny_model_path, server_args=arguments) as server,
        AsyncSGLang.connect(server.url) as engine,
        pytest.raises(UnsupportedByServerError, match="disable_priority_preemption"),
    ):
        AsyncLLMCollector(
            policy=SGLangWrapper(engine),
            prompts=tasks(3),
            rewards=length_reward,
            groups_per_batch=3,
            request_order="oldest",
        )
