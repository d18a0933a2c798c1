"""AsyncLLMCollector on a fake server: order, staleness, faults, buffers, life cycle."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import weakref

import pytest
import torch
from helpers.collecting import begin, collection_of, length_reward, own_threads, tasks
from helpers.waiting import wait_until
from torch.utils.data import Dataset
from torchrl.data import (
    LazyStackStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
)
from torchrl.objectives.llm import MCAdvantage

from torchrl_sglang import AsyncLLMCollector, CollectorTimeouts, SGLangWrapper
from torchrl_sglang.collectors.groups.tools import Tools
from torchrl_sglang.collectors.scheduling.prompts import make_prompts
from torchrl_sglang.errors import (
    CollectionError,
    CollectionTimeoutError,
    ConfigurationError,
    UserFunctionError,
)


def positions(batch) -> list[int]:
    return [int(answer) for answer in batch["answer"]]


def test_groups_come_out_whole(make):
    collector = make(prompts=tasks(7), group_size=3, total_groups=7)
    batches = [positions(batch) for batch in collector]
    assert [len(batch) for batch in batches] == [6, 6, 6, 3]
    found = list(itertools.chain.from_iterable(batches))
    firsts = found[::3]
    assert found == [first for first in firsts for _ in range(3)]
    # One that is complete earlier comes earlier.
    assert sorted(firsts) == list(range(7))
    stats = collector.stats()
    assert (stats["frames"], stats["batches"]) == (21, 4)
    assert stats["age"] == {0: 21 * 6}
    assert stats["groups_failed"] == stats["groups_retried"] == 0


def test_prompts_that_end(make):
    collector = make(prompts=iter(tasks(5)))
    batches = [positions(batch) for batch in collector]
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(5))
    assert list(collector) == []


class Gate:
    """A step that waits for its conversation to be let through."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self._open: set[int] = set()
        self._closed = True

    def open(self, *numbers: int) -> None:
        self._open.update(numbers)

    def open_all(self) -> None:
        self._closed = False

    async def __call__(self, conversation, task):
        number = int(task["answer"])
        self.began.append(number)
        # It is opened by another thread.
        while self._closed and number not in self._open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_no_more_groups_than_can_be_consumed_in_time(make, update, max_staleness):
    gate = Gate()
    gate.open_all()
    collector = make(step=gate, max_staleness=max_staleness)
    batches, taken = iter(collector), []
    for version in range(4):
        # The first groups that are complete need not be the first that began.
        taken += positions(next(batches))
        assert len(taken) == 2 * (version + 1)
        ahead = 2 * (version + max_staleness + 1)
        wait_until(lambda ahead=ahead: len(gate.began) == ahead)
        wait_until(lambda: not collector.stats()["groups_running"])
        assert collector.stats()["groups_ready"] == 2 * max_staleness
        update(collector)
    assert sorted(taken) == list(range(8))
    assert max(collector.stats()["age"]) == max_staleness


def test_a_slow_group_is_overtaken_until_it_would_be_stale(make, update):
    gate = Gate()
    gate.open(*range(1, 100))
    collector = make(step=gate, max_staleness=1)
    batches = iter(collector)
    assert positions(next(batches)) == [1, 2]
    wait_until(lambda: collector.stats()["groups_running"] == 1)
    update(collector)
    # Its tokens are one update old: this batch waits for it.
    timer = threading.Timer(0.2, gate.open, [0])
    timer.start()
    assert 0 in positions(next(batches))
    timer.join()
    assert collector.stats()["groups_stale"] == 0
    assert collector.stats()["age_in_flight"][1] == 6


@pytest.mark.parametrize("on_stale", ["drop", "retry", "mask"])
def test_what_is_too_old_when_it_is_taken(make, update, on_stale):
    gate = Gate()
    gate.open(1)
    collector = make(
        step=gate, max_staleness=0, on_stale=on_stale, groups_per_batch=1,
        batches_per_update=2, total_groups=3, group_size=2,
    )  # fmt: skip
    batches = iter(collector)
    first = next(batches)
    assert positions(first) == [1, 1]
    # The trainer is out of step: it updates before its second batch.
    update(collector)
    gate.open_all()
    if on_stale == "mask":
        batch = next(batches)
        assert positions(batch) == [0, 0]
        masks = batch.get(("masks", "all_assistant_mask"), as_list=True)
        assert not any(mask.any() for mask in masks)
        log_probs = batch.get(("log_probs", "full"), as_list=True)
        assert all(row.isnan().all() for row in log_probs)
        assert collector.stats()["groups_stale"] == 0
        return
    rest = [*positions(next(batches)), *positions(next(batches))]
    expected = [2, 2, 3, 3] if on_stale == "drop" else [0, 0, 2, 2]
    assert sorted(rest) == expected
    assert collector.stats()["groups_stale"] == 1
    assert collector.stats()["age"] == {0: 36}


def test_versions_are_those_of_the_tokens(make, update):
    """Not those of the time when a batch is taken."""
    collector = make(max_staleness=2)
    batches = iter(collector)
    next(batches)
    wait_until(lambda: collector.stats()["groups_ready"] == 4)
    update(collector)
    for version in (0, 0, 1):
        batch = next(batches)
        assert batch["policy_version"].tolist() == [version] * 2
        assert batch["next", "policy_version"].tolist() == [version] * 2
        if version == 0:
            continue
        assert collector.policy_version == 1


def test_servers_that_do_not_tell_versions(make, fake, update):
    """Tokens are as old as their request."""
    fake.version_spans = False
    gate = Gate()
    collector = make(step=gate, max_staleness=1)
    batches = iter(collector)
    begin(collector)
    wait_until(lambda: len(gate.began) == 4)
    update(collector)
    gate.open_all()
    assert next(batches)["policy_version"].tolist() == [0, 0]


def test_rewards_of_all_kinds(make):
    async def bonus(conversation, task):
        await asyncio.sleep(0)
        return torch.tensor(0.5)

    def rank(conversations, task):
        assert task["answer"] == conversations[0].task["answer"]
        return torch.arange(len(conversations))

    collector = make(
        rewards={"length": length_reward, "bonus": bonus},
        group_rewards=[rank],
        group_size=3,
    )
    batch = next(iter(collector))
    length = batch["next", "length"].flatten()
    assert batch["next", "bonus"].flatten().tolist() == [0.5] * 6
    ranks = torch.tensor([0.0, 1.0, 2.0] * 2)
    assert torch.equal(batch["next", "reward"].flatten(), length + 0.5 + ranks)
    assert batch["next", "reward"].shape == (6, 1, 1)


def test_a_list_of_tools_with_schemas():
    """They have their functions' names."""

    def add(a, b):
        return a + b

    tools = Tools([(add, {"description": "Adds.", "parameters": {}})])
    (schema,) = tools.schemas
    assert schema["function"] == {
        "name": "add",
        "description": "Adds.",
        "parameters": {},
    }


def test_the_context_is_full(make, policy):
    """A conversation that has no room for another turn is truncated, not an error."""
    room = policy.model.capabilities.max_prompt

    def step(conversation, task):
        return "x" * (room // 2)

    batch = next(iter(make(step=step, rewards=None)))
    ends = batch["next", "truncated"].flatten()
    assert int(ends.sum()) == 2
    assert len(batch) < 10


def test_functions_that_fail_are_retried_and_given_up(make):
    attempts: dict[str, int] = {}

    def fails(conversation, task):
        answer = task["answer"]
        attempts[answer] = attempts.get(answer, 0) + 1
        if answer == "0" or (answer == "1" and attempts[answer] < 3):
            raise ValueError(f"no reward for {answer}")
        return 1.0

    collector = make(rewards=fails, max_retries=2)
    batches = iter(collector)
    taken = positions(next(batches)) + positions(next(batches))
    assert 0 not in taken
    assert attempts["0"] == attempts["1"] == 3
    stats = collector.stats()
    assert (stats["groups_failed"], stats["groups_retried"]) == (1, 4)
    told = "Prompt 0: The reward function 'fails' raised ValueError: no reward for 0."
    assert told in stats["errors"]


def test_a_reward_function_that_hangs(make, gate):
    def hangs(conversation, task):
        if task["answer"] == "0":
            gate.wait()
        return 1.0

    collector = make(
        rewards=hangs, max_retries=0, timeouts=CollectorTimeouts(reward=0.1),
        num_threads=1,
    )  # fmt: skip
    assert positions(next(iter(collector))) == [1, 2]
    assert "'hangs' did not return" in collector.stats()["errors"][0].replace(
        "function hangs", "function 'hangs'"
    )


def test_servers_that_fail_for_a_while(make, fake):
    collector = make(prompts=tasks(4), total_groups=4)
    batches = iter(collector)
    with fake.misbehaving("abort"):
        begin(collector)
        wait_until(lambda: collector.stats()["groups_retried"])
    taken = [position for batch in batches for position in positions(batch)]
    assert sorted(taken) == [0, 1, 2, 3]
    assert collector.stats()["groups_failed"] == 0


def test_a_group_that_only_the_engine_fails(make, fake, policy, caplog):
    """It is given up in time, and others are complete meanwhile."""
    (marked,) = policy.tokenizer("~")["input_ids"]

    def when(content):
        return marked in content["input_ids"]

    collector = make(
        prompts=[{"query": "~", "answer": "0"}, *tasks(8)[1:]],
        max_retries=0,
        timeouts=CollectorTimeouts(engine=0.2),
        total_groups=6,
    )
    with fake.misbehaving("abort", when=when):
        taken = [position for batch in collector for position in positions(batch)]
    assert 0 not in taken
    assert len(taken) == 6
    assert collector.stats()["groups_failed"] == 1
    # Said before it is given up, and not at each attempt.
    told = caplog.text.count("The engine failed, and its groups are tried again")
    assert 1 <= told <= collector.stats()["groups_retried"]


def test_an_engine_that_is_gone(make, fake):
    """The collector ends, and no prompt is lost."""
    collector = make(max_retries=0, timeouts=CollectorTimeouts(engine=0.2))
    with fake.misbehaving("abort"), pytest.raises(CollectionError, match="has ended"):
        next(iter(collector))
    assert collector.state_dict()["pool"]["prompts"]["open"] == [0, 1, 2, 3]
    assert collector.stats()["groups_failed"] == 0


def test_no_batch_in_time(make):
    collector = make(step=Gate(), timeouts=CollectorTimeouts(batch=0.2))
    with pytest.raises(CollectionTimeoutError, match=r"No batch of 2 .* 4 run and"):
        next(iter(collector))


@pytest.mark.parametrize("max_in_flight", [1, 3, 5])
def test_a_limit_of_conversations(make, max_in_flight):
    at_once, most, full = 0, 0, asyncio.Event()

    async def step(conversation, task):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once >= max_in_flight:
            full.set()
        await full.wait()
        # Any others that may start do so now.
        await asyncio.sleep(0.01)
        at_once -= 1

    collector = make(
        step=step, max_in_flight=max_in_flight, group_size=2, max_staleness=3
    )
    batches = iter(collector)
    for _ in range(2):
        next(batches)
    assert most == max_in_flight


def test_a_pause_starts_no_groups(make, fake):
    collector = make(groups_per_batch=1, max_staleness=0)
    batches = iter(collector)
    with collector.pause():
        begin(collector)
        collector.timeouts = CollectorTimeouts(batch=0.1)
        with pytest.raises(CollectionTimeoutError):
            next(batches)
        assert not fake.payloads()
    collector.timeouts = CollectorTimeouts()
    assert positions(next(iter(collector))) == [0]
    collector.pause()
    collector.resume()
    assert positions(next(iter(collector))) == [1]


def test_a_run_goes_on_where_it_was_saved(make, update):
    """Prompts in flight and in the queue are not lost, and none comes twice."""
    collector = make(prompts=tasks(12), shuffle=True, seed=3, max_staleness=2)
    batches = iter(collector)
    before = positions(next(batches))
    update(collector)
    before += positions(next(batches))
    state = collector.state_dict()
    collector.shutdown()
    again = make(
        prompts=tasks(12), shuffle=True, seed=3, max_staleness=2, total_groups=12
    )
    again.load_state_dict(state)
    assert again.policy_version == 1
    after = [position for batch in again for position in positions(batch)]
    assert sorted(before + after) == list(range(12))
    assert again.stats()["frames"] == 12
    running = make()
    next(iter(running))
    with pytest.raises(CollectionError, match="before the collector is started"):
        running.load_state_dict(state)


class Recorded(Dataset):
    """Tasks that tell the order in which they were read."""

    def __init__(self, count: int) -> None:
        self._tasks = tasks(count)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index):
        self.read.append(index)
        return self._tasks[index]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_seed_is_an_order_at_any_speed(make, update, max_staleness):
    """Groups start in the same order, however long each of them takes."""
    rng = random.Random(max_staleness)

    async def step(conversation, task):
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.03]))

    recorded = Recorded(12)
    collector = make(
        prompts=recorded, shuffle=True, step=step, total_groups=24,
        max_staleness=max_staleness,
    )  # fmt: skip
    assert collector.set_seed(5) == 6
    seen = []
    for batch in collector:
        seen += positions(batch)
        update(collector)
    assert sorted(seen) == sorted([*range(12), *range(12)])
    expected = make_prompts(tasks(12), query_key="query", shuffle=True, seed=5)
    order = [int(expected.fetch(position)["answer"]) for position in range(24)]
    assert recorded.read == order


def make_buffer(**kwargs) -> ReplayBuffer:
    options = {
        "storage": LazyStackStorage(64),
        "sampler": SamplerWithoutReplacement(),
        "transform": MCAdvantage(grpo_size=2),
        "batch_size": 4,
        **kwargs,
    }
    return ReplayBuffer(**options)


def test_iterating_extends_a_buffer(make):
    buffer = make_buffer()
    collector = make(replay_buffer=buffer, group_size=2, total_groups=4)
    assert list(collector) == [None, None]
    assert len(buffer) == 8
    assert "advantage" in buffer.sample().keys()


def test_writing_in_the_background(make, update):
    buffer = make_buffer(sampler=StalenessAwareSampler(max_staleness=1), batch_size=16)
    collector = make(replay_buffer=buffer, group_size=2, max_staleness=1)
    collector.start()
    assert collector.is_running()
    # Groups of two updates and no more: the trainer has to train first.
    wait_until(lambda: len(buffer) == 8)
    with pytest.raises(ConfigurationError, match="instead of iterating"):
        next(iter(collector))
    update(collector)
    wait_until(lambda: len(buffer) == 12)
    assert collector.getattr_rb("write_count") == 12
    assert buffer.sampler.consumer_version == 1
    assert int(buffer.sample()["policy_version"].min()) >= 0
    update(collector)
    wait_until(lambda: len(buffer) == 16)
    assert int(buffer.sample()["policy_version"].min()) == 1
    # Emptying the buffer sets it to zero.
    buffer.empty()
    update(collector)
    wait_until(lambda: len(buffer) == 4)
    assert buffer.sampler.consumer_version == 3
    collector.async_shutdown()
    assert not collector.is_running()


def test_nothing_is_written_during_a_pause(make):
    """What is saved meanwhile of the collector and of the buffer belongs together."""
    gate, buffer = Gate(), make_buffer(transform=None)
    gate.open(0, 1)
    collector = make(replay_buffer=buffer, step=gate)
    collector.start()
    wait_until(lambda: len(buffer) == 2)
    with collector.pause(resume=False):
        gate.open_all()
        wait_until(lambda: collector.stats()["groups_ready"] == 2)
        assert sorted(positions(buffer[:])) == [0, 1]
        state = collector.state_dict()["pool"]
    assert (state["consumed"], state["prompts"]["open"]) == (2, [2, 3])
    collector.resume()
    wait_until(lambda: len(buffer) == 4)


def test_a_buffer_that_fails_ends_the_collector(make):
    def fails(batch):
        raise ValueError("no room")

    collector = make(replay_buffer=make_buffer(), postproc=fails, group_size=2)
    collector.start()
    wait_until(lambda: not collector.is_running())
    with pytest.raises(CollectionError, match="no room"):
        collector.start()
    with pytest.raises(ConfigurationError, match="give replay_buffer"):
        make().start()


def test_a_collector_that_is_dropped_ends(fake_engine):
    collector = AsyncLLMCollector(
        policy=SGLangWrapper(fake_engine), prompts=tasks(9), groups_per_batch=1
    )
    next(iter(collector))
    core = weakref.ref(collection_of(collector))
    del collector
    gc.collect()
    wait_until(lambda: not own_threads())
    gc.collect()
    assert core() is None


def test_shutdown_ends_what_hangs(make, gate):
    def hangs(conversation, task):
        gate.wait()

    collector = make(step=hangs)
    begin(collector)
    wait_until(lambda: "torchrl_sglang-functions" in own_threads())
    collector.shutdown(timeout=5.0)
    assert not collector.is_running()
    assert list(collector) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 0}, "group_size must be"),
        ({"max_staleness": -1}, "max_staleness must be"),
        ({"groups_per_batch": 1.5}, "groups_per_batch must be"),
        ({"on_stale": "keep"}, "on_stale='keep' is not one of 'drop', 'retry'"),
        ({"shuffle": 1}, "shuffle must be a bool"),
        ({"rewards": 3}, "rewards takes a function"),
        ({"rewards": [1]}, "rewards takes a function"),
        ({"tools": {"a": 1}}, r"tools\['a'\] must be a function"),
        ({"policy": object()}, "policy must be an SGLangWrapper"),
        ({"weight_sync_schemes": {"policy": 1}}, "weight_sync_schemes takes"),
        ({"prompts": "text"}, "prompts must be"),
    ],
)
def test_wrong_arguments(make, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_mode": "text"}, "input_mode='history'"),
        ({"num_samples": 4}, "num_samples=None"),
        ({"pad_output": True}, "pad_output=False"),
        ({"batching": True}, "batching=False"),
    ],
)
def test_policies_that_it_cannot_use(make, policy, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make(policy=policy.get_new_version(**arguments))


def test_calls_without_a_scheme(make):
    collector = make()
    with pytest.raises(ConfigurationError, match="No scheme is attached"):
        collector.update_policy_weights_()
    with pytest.raises(ConfigurationError, match="close_env"):
        collector.shutdown(close_env=False)
    assert "running=0" in repr(collector)


def test_a_postproc_that_returns_nothing(make):
    """``None`` would be the end of the batches."""
    collector = make(postproc=lambda batch: None)
    with pytest.raises(UserFunctionError, match="postproc returned None"):
        next(iter(collector))
