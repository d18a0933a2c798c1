"""Which requests a server begins first, of an engine and of a collector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import aiohttp
import pytest
import torch
from helpers.collecting import length_reward, tasks, wait_until
from helpers.fake_server import FakeServer
from tensordict import TensorDict
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    Gateway,
    SGLangLLMCollector,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.collectors.scheduling.slots import Slots
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.requests.request import GenerateRequest, RequestSlot
from torchrl_sglang.types import Completion

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

    begun = asyncio.create_task(one(-1, ask(0, tokens=1000)))
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


class ToldSlot:
    """A slot that tells which request has come to its end."""

    def __init__(self, slot: RequestSlot, ended: Callable[[], None]) -> None:
        self.slot = slot
        self.ended = ended

    async def acquire(self) -> None:
        await self.slot.acquire()

    def release(self, completion: Completion | None) -> None:
        assert completion is not None
        self.slot.release(completion)
        self.ended()


def asked_of(lengths: list[int], size: int) -> list[GenerateRequest]:
    """Returns requests for samples of prompts whose responses have these lengths."""
    return [
        replace(ask(None, length), input_ids=[5 + number, 6, 7])
        for number, length in enumerate(lengths)
        for _ in range(size)
    ]


def test_probes_first_and_then_the_longest(one_at_a_time):
    """A server that runs one request ends them in the order in which it began them."""
    lengths, slots = [10, 40, 20, 30, 15, 35], Slots(one_at_a_time)
    asked = asked_of(lengths, 3)
    plain = one_at_a_time.generate_requests(asked)
    for known in (False, True):
        ended: list[int] = []
        outcomes = one_at_a_time.generate_requests(
            [
                replace(each, slot=ToldSlot(each.slot, partial(ended.append, index)))
                for index, each in enumerate(slots.assign(asked))
            ]
        )
        assert [each.token_ids for each in outcomes] == [
            each.token_ids for each in plain
        ]
        prompts = [index // 3 for index in ended]
        if known:
            assert prompts == [1] * 3 + [5] * 3 + [3] * 3 + [2] * 3 + [4] * 3 + [0] * 3
        else:
            assert prompts[:6] == list(range(6))
            # All but those that were on their way when the last probe ended.
            assert sorted(prompts[9:], key=lambda each: -lengths[each]) == prompts[9:]
    assert (slots.in_flight, slots.waiting) == (0, 0)


def test_an_update_in_the_middle(one_at_a_time, hf_model):
    """Requests that run go on, those that wait come after it, and no slot is lost."""
    slots = Slots(one_at_a_time)
    asked = asked_of([200, 100, 50], 2)
    plain = one_at_a_time.generate_requests(asked)
    scheme = SGLangWeightSyncScheme(one_at_a_time, hf_model)
    sender = scheme.create_sender()
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(one_at_a_time.generate_requests, slots.assign(asked))
        wait_until(lambda: one_at_a_time.stats().servers[0].running == 1)
        assert slots.waiting
        report = sender.update_weights()
        outcomes = work.result(120)
    scheme.shutdown()
    # The weights are those that the server had.
    assert [each.token_ids for each in outcomes] == [each.token_ids for each in plain]
    assert outcomes[-1].weight_version == report.version
    assert len({span.version for each in outcomes for span in each.versions}) == 2
    assert (slots.in_flight, slots.waiting) == (0, 0)


class LengthsOfRows(SGLangWrapper):
    """A policy whose responses have a length that their row gives."""

    def _to_requests(self, prompts, params):
        made = super()._to_requests(prompts, params)
        return [
            replace(each, sampling_params={**params.engine, "max_new_tokens": 5 + row})
            for row, each in enumerate(made)
        ]


def test_a_synchronous_batch_is_the_same(one_at_a_time):
    """Its rows, tokens, log-probs and versions, in two epochs."""
    texts, batches = ["Hi", "Hello", "Hi", "Good day", "Hello", "Hi"], {}
    rows = len(texts)
    for order in ("arrival", "longest"):
        env = ChatEnv.from_dataloader(
            [TensorDict(query=texts, batch_size=rows)],
            tokenizer=one_at_a_time.get_tokenizer(),
            batch_size=(rows,),
        )
        policy = LengthsOfRows(
            one_at_a_time,
            generate_kwargs={"temperature": 0.0, "ignore_eos": True},
            return_generation_info=True,
        )
        collector = SGLangLLMCollector(
            env,
            policy=policy,
            dialog_turns_per_batch=rows,
            total_dialog_turns=2 * rows,
            reset_at_each_iter=True,
            track_policy_version=True,
            request_order=order,
        )
        batches[order] = list(collector)
        collector.shutdown()
    assert [len(each) for each in batches.values()] == [2, 2]
    for plain, other in zip(batches["arrival"], batches["longest"], strict=True):
        assert plain.batch_size == other.batch_size == (rows, 1)
        assert set(plain.keys(True, True)) == set(other.keys(True, True))
        for old, new in zip(plain.unbind(0), other.unbind(0), strict=True):
            assert (old["tokens", "full"] == new["tokens", "full"]).all()
            torch.testing.assert_close(
                old["log_probs", "full"],
                new["log_probs", "full"],
                rtol=0,
                atol=1e-4,
                equal_nan=True,
            )
            for key in (("text", "full"), "policy_version"):
                assert old[key] == new[key]
            was, now = old["generation_info"], new["generation_info"]
            assert was.finish_reason == now.finish_reason
            assert (was.weight_version == now.weight_version).all()


def test_an_asynchronous_batch_is_the_same(one_at_a_time):
    """Its rows, with prompts that come twice."""
    policy = SGLangWrapper(
        one_at_a_time, generate_kwargs={"max_new_tokens": 24, "temperature": 0.0}
    )
    batches = {}
    for order in ("arrival", "longest"):
        collector = AsyncLLMCollector(
            policy=policy,
            prompts=tasks(3),
            rewards=length_reward,
            group_size=2,
            groups_per_batch=6,
            total_groups=6,
            max_staleness=0,
            deterministic=True,
            request_order=order,
        )
        batches[order] = []
        for batch in collector:
            batches[order] += [
                (row["answer"], row["tokens", "full"].tolist())
                for row in batch.reshape(-1).unbind(0)
            ]
        collector.shutdown()
    assert len(batches["arrival"]) == 12
    assert batches["arrival"] == batches["longest"]


@pytest.fixture
def ordered(tiny_model_path):
    with FakeServer(tiny_model_path, server_args=ORDERED) as server:
        yield server


async def agent(task, *, base_url, api_key):
    async with aiohttp.ClientSession() as client:
        answer = await client.post(
            f"{base_url}/chat/completions",
            headers={"Authorization": f"Bearer {api_key}"},
            json={"messages": [{"role": "user", "content": task["query"]}]},
        )
        assert answer.ok
    return 1.0


def make_env():
    return ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=1))


@pytest.mark.parametrize("kind", ["functions", "environments", "agents"])
def test_of_every_kind_of_group(ordered, kind):
    with AsyncSGLang.connect(ordered.url) as engine, Gateway(engine) as gateway:
        given = {
            "functions": {"rewards": length_reward},
            "environments": {"env": make_env},
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
    with pytest.raises(ConfigurationError, match="request_order=.shortest."):
        AsyncLLMCollector(
            policy=SGLangWrapper(fake_engine), request_order="shortest", **given
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
