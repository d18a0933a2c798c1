"""Requests that are expected to be longest are begun first: decisions and faults."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from helpers.collecting import length_reward, tasks, wait_until
from helpers.fake_server import FakeServer
from tensordict import TensorDict
from torchrl.envs.llm import ChatEnv

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    SGLangLLMCollector,
    SGLangWrapper,
)
from torchrl_sglang.backends.client.control import info_limit, run_limit
from torchrl_sglang.collectors.scheduling.longest import LongestFirst, Sample
from torchrl_sglang.collectors.scheduling.room import most_in_flight, room_of
from torchrl_sglang.collectors.scheduling.slots import Slots
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    ServerTimeoutError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.policies.engine_call import SampleRequest
from torchrl_sglang.policies.engine_call import ask as ask_policy
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.types import Completion, ServerLoad

Load = Sequence[tuple[int, Sequence[int]]]
"""Prompts and the lengths of their responses."""


def long_tailed(seed: int, groups: int = 64, size: int = 8) -> Load:
    """Lengths like those of reasoning: some prompts have responses of 20 times."""
    draw = random.Random(seed)
    means = [draw.gauss(5.3, 1.0) for _ in range(groups)]
    return [
        (
            number,
            [
                min(2048, max(32, int(math.exp(mean + draw.gauss(0.0, 0.4)))))
                for _ in range(size)
            ],
        )
        for number, mean in enumerate(means)
    ]


def in_turn(lengths: Sequence[int], slots: int) -> float:
    """Returns when the last one ends, of jobs that begin in this order."""
    free = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def simulate(order: LongestFirst, load: Load, slots: int) -> float:
    """Returns when the last response ends; no slot is free while one waits."""
    lengths = {}
    for prompt, given in load:
        for length in given:
            sample = Sample(prompt=prompt)
            lengths[sample] = length
            order.add(sample)
    now, running, waiting = 0.0, [], len(lengths)
    while waiting or running:
        while waiting and len(running) < slots:
            sample = order.next(now)
            assert sample is not None, "A slot is free, and requests wait."
            waiting -= 1
            heapq.heappush(running, (now + lengths[sample], waiting, sample))
        assert len(order) == waiting
        now, _, sample = heapq.heappop(running)
        order.end(sample, now, lengths[sample])
    assert order.next(now) is None
    return now


@pytest.mark.parametrize("slots", [32, 64, 128])
def test_a_batch_ends_earlier(slots):
    """Half of what knowing all lengths gains at first; with known prompts all of it."""
    sums = defaultdict(float)
    for seed in range(10):
        load = long_tailed(seed)
        lengths = [length for _, group in load for length in group]
        least = max(*lengths, sum(lengths) / slots)
        order = LongestFirst()
        ends = {
            "arrival": in_turn(lengths, slots),
            "probes": simulate(order, load, slots),
            "again": simulate(order, load, slots),
            "known": in_turn(sorted(lengths, reverse=True), slots),
        }
        for name, end in ends.items():
            # Graham's bound for every order without idle slots.
            assert least <= end <= (2 - 1 / slots) * least * (1 + 1e-9)
            sums[name] += end
    gain = sums["arrival"] - sums["known"]
    assert sums["arrival"] - sums["probes"] > 0.3 * gain
    assert sums["arrival"] - sums["again"] > 0.9 * gain


def test_prompts_without_siblings_go_in_turn():
    load = [
        (number, [length]) for number, (_, (length, *_)) in enumerate(long_tailed(0))
    ]
    in_order = in_turn([length for _, (length,) in load], 8)
    assert simulate(LongestFirst(), load, 8) == in_order


class Plain:
    """The same decisions, each made anew from all that has happened."""

    def __init__(self) -> None:
        self.waiting: list[Sample] = []
        self.running: dict[Sample, float] = {}
        self.lengths: dict[object, list[int]] = defaultdict(list)
        self.earlier: dict[object, float] = {}
        self.ended: list[tuple[int, float]] = []

    def close(self, prompt: object) -> None:
        """Begins a prompt's next epoch when its last sample is done."""
        if any(each.prompt == prompt for each in (*self.waiting, *self.running)):
            return
        if lengths := self.lengths.pop(prompt, None):
            self.earlier[prompt] = sum(lengths) / len(lengths)

    def best(self, now: float) -> list[Sample]:
        """Returns those that may be next: of equal ones any."""
        tokens = seconds = 0.0
        for length, duration in self.ended:
            tokens, seconds = 0.99 * tokens + length, 0.99 * seconds + duration

        def key(sample: Sample) -> tuple[float, float]:
            begun = [
                when
                for other, when in self.running.items()
                if other.prompt == sample.prompt
            ]
            length = math.inf
            if known := self.lengths.get(sample.prompt):
                length = sum(known) / len(known)
            elif sample.prompt in self.earlier:
                length = self.earlier[sample.prompt]
            elif begun:
                length = (now - min(begun)) * tokens / seconds if seconds else 0.0
                longer = [each for each, _ in self.ended if each > length]
                length = sum(longer) / len(longer) if longer else length
            return sample.batch, -length

        least = min(map(key, self.waiting))
        return [each for each in self.waiting if key(each) == least]


@pytest.mark.parametrize("seed", range(20))
def test_decisions_are_those_of_the_rule(seed):
    draw, now = random.Random(seed), 0.0
    order, plain = LongestFirst(), Plain()
    for _ in range(400):
        now += draw.random()
        event = draw.random()
        if event < 0.4:
            sample = Sample(prompt=draw.randrange(12), batch=draw.randrange(2))
            order.add(sample)
            plain.waiting.append(sample)
        elif event < 0.45 and plain.waiting:
            sample = plain.waiting.pop(draw.randrange(len(plain.waiting)))
            order.discard(sample)
            plain.close(sample.prompt)
        elif event < 0.7 and plain.running:
            sample = draw.choice(list(plain.running))
            length = draw.choice([None, draw.randrange(1, 500)])
            order.end(sample, now, length)
            began = plain.running.pop(sample)
            if length is not None:
                plain.ended.append((length, now - began))
                plain.lengths[sample.prompt].append(length)
            plain.close(sample.prompt)
        elif plain.waiting:
            best = plain.best(now)
            sample = order.next(now)
            assert sample in best
            # Of one prompt, and of several of which nothing is known, the first one.
            assert sample is best[0] or sample.prompt != best[0].prompt
            plain.waiting.remove(sample)
            plain.running[sample] = now
        assert len(order) == len(plain.waiting)


def busy(running: int, queued: int, limit: int | None = 256) -> ServerLoad:
    return ServerLoad(running=running, queued=queued, limit=limit)


@pytest.mark.parametrize(
    ("servers", "in_flight", "before", "most"),
    [
        ([busy(256, 16)], 272, 272, 272),
        # The memory holds 200; 56 of those in their queues are too many.
        ([busy(200, 72)], 272, 272, 216),
        ([busy(200, 16)], 216, 216, 216),
        # There is room again.
        ([busy(206, 10)], 216, 216, 222),
        ([busy(200, 0)], 200, 216, 250),
        ([busy(256, 0)], 256, 270, 272),
        ([busy(10, 0)], 10, 272, 272),
        # Whatever a server says, some are sent.
        ([busy(1, 300)], 301, 272, 17),
        ([busy(0, 16)], 16, 1, 16),
        ([busy(0, 280), busy(0, 0)], 280, 272, 32),
        ([busy(0, 17, 1)], 17, 3, 2),
        # Somebody else's requests wait as well.
        ([busy(100, 1000)], 200, 272, 272),
        ([busy(100, 1000)], 0, 272, 272),
    ],
)
def test_how_many_are_in_flight(servers, in_flight, before, most):
    assert most_in_flight(servers, in_flight, before) == most


@pytest.mark.parametrize(
    ("limits", "most"), [([256], 272), ([8, 8], 20), ([1], 3), ([256, 512], 816)]
)
def test_as_many_as_servers_run_and_some_to_go_on_with(limits, most):
    assert room_of([busy(0, 0, limit) for limit in limits]).most == most


def test_servers_that_tell_no_limit():
    with pytest.raises(UnsupportedByServerError, match="max_running_requests"):
        room_of([busy(0, 0), busy(0, 0, None)])
    assert run_limit([{"max_running_requests": 4}, {"max_running_requests": 5}]) == 9
    for loads in ([], [{}], [{"max_running_requests": 0}, {"max_running_requests": 4}]):
        assert run_limit(loads) is None
    states = [{"effective_max_running_requests_per_dp": 4}] * 2
    assert info_limit({"internal_states": states, "max_running_requests": 9}) == 8
    assert info_limit({"max_running_requests": 9}) == 9
    assert info_limit({"max_running_requests": None}) is None


@pytest.fixture
def two_at_a_time(tiny_model_path: str) -> Iterator[FakeServer]:
    """A server that says it runs two requests, so that it gets four."""
    with FakeServer(tiny_model_path, server_args={"max_running_requests": 2}) as server:
        yield server


@pytest.fixture
def few(two_at_a_time: FakeServer) -> Iterator[AsyncSGLang]:
    with AsyncSGLang.connect(two_at_a_time.url) as engine:
        yield engine


def ask(prompt: int, tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(
        input_ids=[prompt, 5], sampling_params={"max_new_tokens": tokens}
    )


def sent(server: FakeServer) -> list[int]:
    return [each["input_ids"][0][0] for each in server.payloads()]


def test_a_sample_of_each_prompt_is_sent_first(few, two_at_a_time):
    slots = Slots(few)
    asked = [ask(prompt, 10 * prompt) for prompt in range(1, 9) for _ in range(3)]
    outcomes = few.generate_requests(slots.assign(asked))
    assert [(each.token_ids[0], len(each.token_ids)) for each in outcomes] == [
        (prompt, 10 * prompt) for prompt in range(1, 9) for _ in range(3)
    ]
    # Those of four connections may overtake each other.
    assert set(sent(two_at_a_time)[:11]) == set(range(1, 9))
    assert (slots.in_flight, slots.waiting) == (0, 0)
    # Now their lengths are known.
    begun = len(two_at_a_time.payloads())
    few.generate_requests(slots.assign(asked))
    order = sent(two_at_a_time)[begun:]
    assert all(abs(order.index(p) - 3 * (8 - p)) < 4 for p in range(1, 9))


def test_no_more_are_sent_than_servers_run(few, two_at_a_time):
    slots = Slots(few)
    asked = slots.assign([ask(prompt) for prompt in range(9)])

    async def run() -> None:
        with two_at_a_time.misbehaving("hang"):
            work = asyncio.create_task(few.agenerate_requests(asked))
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, two_at_a_time.wait_for, "/generate", 4)
            # It has looked again, and sees what it sent.
            loads = two_at_a_time.wait_for
            count = len(two_at_a_time.payloads("/v1/loads"))
            await loop.run_in_executor(None, loads, "/v1/loads", count + 2)
            assert (slots.in_flight, slots.waiting) == (4, 5)
            assert len(two_at_a_time.payloads()) == 4
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work

    asyncio.run(run())
    wait_until(lambda: (slots.in_flight, slots.waiting) == (0, 0))
    assert few.generate_requests(slots.assign([ask(1)]))


@pytest.mark.parametrize("fault", ["abort", "hang"])
def test_a_probe_that_fails(few, two_at_a_time, fault):
    """Another sample takes its place, and each gets what it would have got."""
    slots = Slots(few)
    asked = [ask(prompt) for prompt in range(1, 7) for _ in range(3)]
    first = {}

    def is_probe(content) -> bool:
        ids = content["input_ids"]
        prompt = ids[0][0] if isinstance(ids[0], list) else ids[0]
        rid = first.setdefault(prompt, content["rid"])
        return prompt % 2 == 0 and rid == content["rid"]

    with two_at_a_time.misbehaving(fault, when=is_probe):
        outcomes = few.generate_requests(
            slots.assign(asked), return_exceptions=True, request_timeout=0.5
        )
    failed = [
        index for index, each in enumerate(outcomes) if not isinstance(each, Completion)
    ]
    assert [asked[index].input_ids[0] for index in failed] == [2, 4, 6]
    assert all(index % 3 == 0 for index in failed)
    if fault == "abort":
        assert [outcomes[index].index for index in failed] == failed
    assert (slots.in_flight, slots.waiting) == (0, 0)


def test_an_error_ends_the_batch_as_without(few, two_at_a_time):
    slots = Slots(few)
    asked = [ask(prompt) for prompt in range(1, 9) for _ in range(2)]
    with (
        two_at_a_time.misbehaving("abort", when=lambda each: 3 in each["input_ids"]),
        pytest.raises(GenerationAbortedError, match=r"item [45] of 16") as raised,
    ):
        few.generate_requests(slots.assign(asked))
    assert raised.value.index in (4, 5)
    assert (slots.in_flight, slots.waiting) == (0, 0)
    with (
        two_at_a_time.misbehaving("hang"),
        pytest.raises(ServerTimeoutError),
    ):
        few.generate_requests(slots.assign(asked), timeout=0.5)
    wait_until(lambda: (slots.in_flight, slots.waiting) == (0, 0))


def test_requests_that_are_aborted_while_they_wait(few, two_at_a_time):
    slots = Slots(few)
    asked = [
        GenerateRequest(
            input_ids=[prompt, 5],
            sampling_params={"max_new_tokens": 2},
            request_id=f"request-{prompt}",
        )
        for prompt in range(8)
    ]

    async def run() -> list[object]:
        with two_at_a_time.misbehaving("hang"):
            work = asyncio.create_task(
                few.agenerate_requests(slots.assign(asked), return_exceptions=True)
            )
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, two_at_a_time.wait_for, "/generate", 4)
            await loop.run_in_executor(None, few.abort)
            return await work

    outcomes = asyncio.run(run())
    assert all(isinstance(each, GenerationAbortedError) for each in outcomes)
    assert len(two_at_a_time.payloads()) == 4
    assert (slots.in_flight, slots.waiting) == (0, 0)


def test_servers_that_end(few, two_at_a_time):
    """Requests that wait are not waited for: they fail as the others do."""
    slots = Slots(few)
    asked = slots.assign([ask(prompt) for prompt in range(9)])
    with two_at_a_time.misbehaving("hang"), ThreadPoolExecutor(1) as thread:
        work = thread.submit(few.generate_requests, asked, return_exceptions=True)
        two_at_a_time.wait_for("/generate", 4)
        two_at_a_time.die()
        two_at_a_time.recover()
        outcomes = work.result(60)
    assert len(outcomes) == 9
    assert sum(isinstance(each, ServerUnavailableError) for each in outcomes) >= 5
    assert (slots.in_flight, slots.waiting) == (0, 0)


def test_responses_in_two_parts(tiny_model_path, tokenizer):
    """A server without a tokenizer gets the least number of tokens first."""
    arguments = {"skip_tokenizer_init": True, "max_running_requests": 2}
    asked = [
        SampleRequest(
            input_ids=[prompt, 5],
            sampling_params={"min_new_tokens": 2, "max_new_tokens": 6},
        )
        for prompt in range(5, 14)
    ]
    with (
        FakeServer(tiny_model_path, server_args=arguments) as server,
        AsyncSGLang.connect(server.url) as engine,
    ):
        slots = Slots(engine)
        outcomes = ask_policy(engine, slots.assign(asked), tokenizer=tokenizer)
        assert len(server.payloads()) == 18
    assert [len(each.token_ids) for each in outcomes] == [6] * 9
    assert (slots.in_flight, slots.waiting) == (0, 0)


def environment(tokenizer, rows: int) -> ChatEnv:
    queries = [TensorDict(query=["Hi"] * rows, batch_size=rows)] * 2
    return ChatEnv.from_dataloader(queries, tokenizer=tokenizer, batch_size=(rows,))


def test_policies_and_environments_that_have_no_batch(fake_engine, few):
    env = environment(few.get_tokenizer(), 2)
    options = {"dialog_turns_per_batch": 2, "request_order": "longest"}
    policy = SGLangWrapper(few)
    for wrong, match in (
        (policy.get_new_version(batching=True), "batching=True"),
        (policy.get_new_version(generate=False), "that generates"),
        (lambda batch: batch, "needs an SGLangWrapper"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            SGLangLLMCollector(env, policy=wrong, **options)
    for order in ("oldest", "shortest", None):
        with pytest.raises(ConfigurationError, match="request_order"):
            SGLangLLMCollector(
                env, policy=policy, dialog_turns_per_batch=2, request_order=order
            )
    with pytest.raises(UnsupportedByServerError, match="max_running_requests"):
        SGLangLLMCollector(env, policy=SGLangWrapper(fake_engine), **options)


def test_conversations_of_several_turns(few):
    given = {
        "policy": SGLangWrapper(few),
        "prompts": tasks(3),
        "groups_per_batch": 3,
        "request_order": "longest",
    }

    def step(conversation, task):
        return None

    functions = {"rewards": length_reward, "step": step}
    for further in (
        {"env": lambda: environment(few.get_tokenizer(), 1)},
        {"agent": step, "gateway": None},
        functions,
        {**functions, "max_turns": 2},
    ):
        with pytest.raises(ConfigurationError, match="a conversation has several"):
            AsyncLLMCollector(**given, **further)
    collector = AsyncLLMCollector(**given, **functions, max_turns=1)
    collector.shutdown()


def test_batches_of_an_asynchronous_collector(few, two_at_a_time):
    """All of a batch is begun before the first sample of the next one."""
    collector = AsyncLLMCollector(
        policy=SGLangWrapper(few, generate_kwargs={"max_new_tokens": 4}),
        prompts=tasks(8),
        rewards=length_reward,
        groups_per_batch=4,
        group_size=3,
        total_groups=8,
        max_staleness=1,
        request_order="longest",
    )
    two_at_a_time.silent_while_paused = True
    requests.post(f"{two_at_a_time.url}/pause_generation", timeout=10)
    buffered = iter(collector)
    with ThreadPoolExecutor(1) as thread:
        batches = thread.submit(list, buffered)
        wait_until(lambda: collector.stats()["conversations_in_flight"] == 24)
        requests.post(f"{two_at_a_time.url}/continue_generation", timeout=10)
        assert [len(batch) for batch in batches.result(60)] == [12, 12]
    collector.shutdown()
    tokenizer = few.get_tokenizer()
    texts = [
        tokenizer.decode(each["input_ids"][0]) for each in two_at_a_time.payloads()
    ]
    numbers = [int(re.search(r"question (\d)", text)[1]) for text in texts]
    assert len(numbers) == 24
    # Those of four connections may overtake each other.
    assert sum(number > 3 for number in numbers[:12]) < 4
    # All of the second batch waited when the first of it were sent.
    assert set(numbers[9:19]) >= {4, 5, 6, 7}
