"""Functions of the user that raise, hang, cancel themselves or return nonsense.

Whatever they do, each group is delivered whole, started again or reported; nothing
hangs, and nothing is delivered twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from datasets import Dataset
from helpers.collecting import ask_gateway, collection_of, one_turn_env, tasks, user
from helpers.slow import diagonal
from helpers.tool_template import TOOL_TEMPLATE
from helpers.waiting import wait_until
from torch.utils.data import DataLoader
from torchrl.envs import Transform

from torchrl_sglang import CollectorTimeouts, Gateway
from torchrl_sglang.collectors.groups.tools import Tools
from torchrl_sglang.errors import (
    CollectionError,
    ConfigurationError,
    TaskError,
    UserFunctionError,
)

TIMEOUTS = CollectorTimeouts(
    step=60.0, reward=60.0, agent=60.0, batch=60.0, shutdown=5.0, turn=60.0
)
# What is right takes longer than a moment on a busy machine.
TIMEOUTS_OF_FAULT = {"hangs": replace(TIMEOUTS, step=3.0, reward=3.0, agent=3.0)}
TURNS = 2


class Outlaw(BaseException):
    """As libraries for cancellation and tests raise."""


def cancels():
    raise asyncio.CancelledError


def cancelled_elsewhere():
    raise concurrent.futures.CancelledError


def exits():
    sys.exit(1)


def stops():
    raise StopIteration


def outlaw():
    raise Outlaw


def fails():
    raise KeyError("solution")


FAULTS = {
    "raises": fails,
    "cancels": cancels,
    "cancelled elsewhere": cancelled_elsewhere,
    "exits": exits,
    "stops": stops,
    "an outlaw": outlaw,
    "hangs": lambda: threading.Event().wait(4.5),
    "None": lambda: None,
    "wrong shape": lambda: [1.0, 2.0, 3.0],
    "wrong type": object,
    "nan": lambda: math.nan,
    "inf": lambda: -math.inf,
    "too large": lambda: 10**400,
}


class Once:
    """Does what it should, but for one call."""

    def __init__(self, right, fault, moment):
        self.right, self.fault, self.moment = right, fault, moment
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.moment:
            return FAULTS[self.fault]()
        return self.right(*args)

    def asynchronous(self):
        async def call(*args):
            await asyncio.sleep(0)
            if self.calls + 1 == self.moment and self.fault == "hangs":
                self.calls += 1
                # It ignores its cancellation, too.
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(1)
            if self.calls + 1 == self.moment and self.fault == "cancels":
                self.calls += 1
                asyncio.current_task().cancel()
                await asyncio.sleep(0)
            return self(*args)

        return call


def right_step(conversation, task):
    return "Go on." if len(conversation.turns) < TURNS else None


def parse(parser):
    """A parser that finds one call in the first response of a conversation."""
    seen = Counter()

    def find(response):
        seen["calls"] += 1
        found = [type("Call", (), {"tool": "look", "args": {"a": 1}})]
        return {"calls": found if seen["calls"] % 2 else []}

    return find if parser is None else lambda text: parser() or find(text)


def function_hooks(hook: str, once: Once, asynchronous: bool):
    """Returns arguments of a collector in which one hook has a fault."""
    function = once.asynchronous() if asynchronous else once
    plain = {
        "rewards": lambda conversation, task: 1.0,
        "step": right_step,
    }
    if hook == "tool":

        async def look(a: int):
            value = function(a)
            return await value if asyncio.iscoroutine(value) else value

        return {
            "rewards": plain["rewards"],
            "tools": {"look": (look, {"description": "", "parameters": {}})},
            "tool_parser": parse(None),
        }
    if hook == "group_rewards":
        plain["group_rewards"] = function
    else:
        plain[hook] = function
    return plain


RIGHT = {
    "rewards": lambda conversation, task: 1.0,
    "group_rewards": lambda conversations, task: [1.0] * len(conversations),
    "step": right_step,
    "tool": lambda a: a,
}


def collect(collector) -> tuple[Counter, list[torch.Tensor]]:
    """Takes all batches; returns how many conversations of each task were delivered."""
    delivered, rewards = Counter(), []
    for batch in collector:
        for row in batch.unbind(0):
            if row["next", "done"].all():
                delivered[row["query"]] += 1
            rewards.append(row["next", "reward"])
    return delivered, rewards


def check(collector, *, size: int, groups: int) -> None:
    delivered, rewards = collect(collector)
    assert len(delivered) == groups
    assert set(delivered.values()) == {size}
    for reward in rewards:
        assert reward.dtype == torch.float32
        assert reward.isfinite().all()
    stats = collector.stats()
    assert stats["groups_running"] == 0
    assert stats["groups_retried"] + stats["groups_failed"] <= 1
    assert bool(stats["errors"]) == bool(
        stats["groups_retried"] + stats["groups_failed"]
    )
    collector.shutdown()


def is_fault(hook: str, fault: str) -> bool:
    """Returns whether a group fails for it; some values are right, or told."""
    right = {("step", "None"), *(("tool", each) for each in FAULTS)}
    return (hook, fault) not in right


@pytest.mark.parametrize(
    ("hook", "asynchronous"), diagonal(sorted(RIGHT), [False, True])
)
def test_a_function_that_fails_once(make, hook, asynchronous):
    for fault in FAULTS:
        moment = random.Random(f"{hook} {fault} {asynchronous}").randint(1, 4)
        once = Once(RIGHT[hook], fault, moment)
        collector = make(
            group_size=2,
            total_groups=4,
            timeouts=TIMEOUTS_OF_FAULT.get(fault, TIMEOUTS),
            **function_hooks(hook, once, asynchronous),
        )
        check(collector, size=2, groups=4)
        stats = collector.stats()
        assert stats["groups_retried"] == is_fault(hook, fault), (hook, fault)
        assert once.calls >= moment


class Faulty(Transform):
    """Rewards every step; one reset or step has a fault."""

    def __init__(self, once, place):
        super().__init__()
        self.once, self.place = once, place

    def _reset(self, tensordict, tensordict_reset):
        if self.place == "reset":
            self.once()
        return tensordict_reset

    def _step(self, tensordict, next_tensordict):
        value = self.once() if self.place == "step" else 1.0
        return next_tensordict.set("reward", torch.full((1, 1, 1), value))


@pytest.mark.parametrize(
    "place", ["step", pytest.param("reset", marks=pytest.mark.slow)]
)
def test_an_environment_that_fails_once(make, place):
    for fault in FAULTS:
        moment = random.Random(f"{place} {fault}").randint(1, 4)
        once = Once(lambda: 1.0, fault, moment)

        collector = make(
            env=lambda once=once: one_turn_env(Faulty(once, place)),
            rewards=None,
            group_size=2,
            total_groups=4,
            timeouts=TIMEOUTS_OF_FAULT.get(fault, TIMEOUTS),
        )
        check(collector, size=2, groups=4)


@pytest.fixture
def gateway(policy):
    with Gateway(policy.model) as gateway:
        yield gateway


@pytest.mark.parametrize(
    "asynchronous",
    [
        pytest.param(False, id="threads", marks=pytest.mark.slow),
        pytest.param(True, id="coroutines"),
    ],
)
def test_an_agent_that_fails_once(make, gateway, asynchronous):
    async def ask(task, base_url, api_key):
        await ask_gateway(base_url, api_key, [user(task["query"])], max_tokens=3)

    for fault in FAULTS:
        moment = random.Random(f"agent {fault} {asynchronous}").randint(1, 4)
        once = Once(lambda: 1.0, fault, moment)
        function = once.asynchronous() if asynchronous else once

        async def agent(task, *, base_url, api_key, function=function):
            await ask(task, base_url, api_key)
            return await function()

        def blocking(task, *, base_url, api_key, function=function):
            asyncio.run(ask(task, base_url, api_key))
            return function()

        collector = make(
            agent=agent if asynchronous else blocking,
            gateway=gateway,
            rewards=None,
            group_size=2,
            total_groups=4,
            timeouts=TIMEOUTS_OF_FAULT.get(fault, TIMEOUTS),
        )
        check(collector, size=2, groups=4)
        assert not gateway.sessions


def test_a_reward_that_step_or_the_turn_has_is_checked(make):
    def step(conversation, task):
        conversation.turns[-1].reward = [1, math.nan, "1"][int(task["answer"]) % 3]

    collector = make(step=step, rewards=None, max_retries=0, total_groups=4)
    delivered, rewards = collect(collector)
    assert set(delivered) == {"question 0", "question 3", "question 6", "question 9"}
    assert {reward.dtype for reward in rewards} == {torch.float32}
    errors = collector.stats()["errors"]
    assert any("Prompt 1" in each and "nan" in each for each in errors)
    assert any("Prompt 2" in each and "'1'" in each for each in errors)


@pytest.mark.parametrize("name", ["reward", "done", "history", "policy_version"])
def test_reserved_names_of_rewards(make, name):
    with pytest.raises(ConfigurationError, match=f"{name!r}.*rename"):
        make(rewards={name: lambda conversation, task: 1.0})


def test_reserved_names_of_tasks(make):
    """One bad task does not end the run; nothing is generated for it."""
    given = tasks(6)
    given[1]["done"] = "1"
    given[2][3] = "no text"
    collector = make(prompts=given, total_groups=4)
    delivered, _ = collect(collector)
    assert set(delivered) == {f"question {n}" for n in (0, 3, 4, 5)}
    stats = collector.stats()
    assert (stats["groups_failed"], stats["groups_retried"]) == (2, 0)
    assert any("'done'" in each and "rename" in each for each in stats["errors"])


def test_a_task_and_a_reward_of_one_name(make):
    collector = make(
        rewards={"answer": lambda conversation, task: 1.0}, prompts=tasks(3)
    )
    with pytest.raises(CollectionError, match="'answer'"):
        collect(collector)


class Table(list):
    """Tasks with names of columns, as a dataset of Hugging Face has them."""

    def __init__(self, *names):
        super().__init__(tasks(3))
        self.column_names = [*names]


def test_reserved_columns_of_a_dataset(make):
    with pytest.raises(ConfigurationError, match="'log_probs'.*rename"):
        make(prompts=Table("query", "log_probs"))


def test_columns_of_a_dataset_that_a_reward_function_needs(make):
    def score(completions, gold):
        return [0.0] * len(completions)

    with pytest.raises(ConfigurationError, match="needs the column 'gold'"):
        make(prompts=Dataset.from_list(tasks(3)), rewards=score)


def test_the_reserved_names_are_those_of_a_row(make, gateway):
    """The names that are refused are the columns that a batch has."""

    async def agent(task, *, base_url, api_key):
        await ask_gateway(base_url, api_key, [user("Hi")])

    for options in (
        {},
        {"agent": agent, "gateway": gateway, "rewards": None},
    ):
        collector = make(total_groups=1, groups_per_batch=1, **options)
        batch = next(iter(collector))
        names = {*batch[0].keys(), *batch[0]["next"].keys()} - {"query", "answer"}
        for name in names:
            with pytest.raises(ConfigurationError, match=repr(name)):
                make(prompts=Table(name), **options)


def test_values_that_no_tensor_holds_are_kept(make):
    class Odd:
        pass

    odd = Odd()
    given = [{"query": "a", "answer": 2**70, "odd": odd, "n": 3, "x": math.nan}]
    batch = next(iter(make(prompts=given, total_groups=1)))
    assert batch[0]["answer"] == 2**70
    assert batch[0]["odd"] is odd
    assert batch[0]["n"] == 3


def test_prompts_that_can_never_work_are_not_tried_again(make, policy):
    room = policy.model.capabilities.max_prompt
    given = [{"query": "x" * 4 * room}, {"q": "none"}, *tasks(4)]
    collector = make(prompts=given, total_groups=3)
    collect(collector)
    stats = collector.stats()
    assert (stats["groups_failed"], stats["groups_retried"]) == (2, 0)
    long, missing = stats["errors"]
    assert long.startswith("Prompt 0")
    assert f"at most {room}" in long
    assert missing.startswith("Prompt 1")
    assert "query_key" in missing


async def changes(batch):
    return batch


def test_a_postproc_that_is_not_awaited(make):
    for each in (
        changes,
        partial(changes),
        type("Changes", (), {"__call__": changes})(),
    ):
        with pytest.raises(ConfigurationError, match="postproc=.* coroutine function"):
            make(postproc=each)
    collector = make(postproc=lambda batch: changes(batch[:1]))
    with pytest.raises(UserFunctionError, match="postproc returned a coroutine"):
        next(iter(collector))


def test_prompts_that_cannot_be_read_end_a_collector_at_once(make, fake):
    """Later groups have no prompts either."""
    given = [{"query": "a", "numbers": [1]}, {"query": "b", "numbers": []}]
    collector = make(prompts=DataLoader(given, batch_size=2))
    with pytest.raises(CollectionError, match=r"equal size; .*collate_fn=list\)"):
        collect(collector)
    assert collector.stats()["groups_failed"] < 8
    assert all(path != "/generate" for _, path, _ in fake.requests)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyError("row")])
def test_an_iterable_that_raises_ends_a_collector_at_once(make, error):
    def read():
        yield from tasks(2)
        raise error

    collector = make(prompts=read(), total_groups=8)
    with pytest.raises(
        CollectionError, match=r"prompts raised .*at prompt 2"
    ) as caught:
        collect(collector)
    assert caught.value.__cause__ is error
    assert collector.stats()["groups_failed"] < 8


def test_an_element_that_is_no_task_is_given_up(make):
    collector = make(prompts=[3, *tasks(3)], total_groups=2)
    assert set(collect(collector)[0]) == {"question 0", "question 1"}
    stats = collector.stats()
    assert (stats["groups_failed"], stats["groups_retried"]) == (1, 0)


def test_functions_with_other_arguments(make):
    with pytest.raises(ConfigurationError, match=r"\(conversation, task\)"):
        make(rewards=lambda prediction: 0.0)
    with pytest.raises(ConfigurationError, match=r"\(conversations, task\)"):
        make(group_rewards=lambda conversations: [])
    with pytest.raises(ConfigurationError, match="step"):
        make(step=lambda: None)


def test_no_rewards_are_told(make, caplog):
    make(rewards=None)
    assert "all rewards will be 0" in caplog.text


def test_the_function_that_ends_a_collector_is_named(make, caplog):
    def right(conversation, task):
        return task["solution"]

    collector = make(rewards=right, max_retries=0)
    for _ in range(2):
        with pytest.raises(CollectionError) as raised:
            next(iter(collector))
    assert isinstance(raised.value.__cause__, KeyError)
    message = str(raised.value)
    assert "The reward function 'right' raised KeyError: 'solution'" in message
    assert "prompt 7" in message
    assert 'return task["solution"]' in caplog.text


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


def found(name):
    def parser(response, calls=[]):  # noqa: B006
        calls.append(1)
        call = type("Call", (), {"tool": name, "args": {"a": 1, "b": 2}})
        return {"calls": [call] if len(calls) % 2 else []}

    return parser


def test_the_policy_gets_its_tools(make, policy):
    told = policy.get_new_version(chat_template=TOOL_TEMPLATE, prefer_tokens=True)
    collector = make(
        policy=told,
        tools=[add],
        tool_parser=found("add"),
        total_groups=1,
        groups_per_batch=1,
    )
    batch = next(iter(collector))
    first, second = batch[0]["text"].prompt, batch[1]["text"].prompt
    assert '"description": "Adds two numbers."' in first
    assert second.startswith(first)
    assert second.count("Adds two numbers") == 1
    before = batch[0]["tokens"].full.tolist()
    assert batch[1]["tokens"].prompt.tolist()[: len(before)] == before


def test_a_template_that_ignores_tools(make, policy, caplog):
    make(tools=[add], policy=policy.get_new_version(chat_template=TOOL_TEMPLATE))
    assert "says nothing of tools" not in caplog.text
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    make(tools=[add], policy=policy.get_new_version(chat_template=plain))
    assert "says nothing of tools" in caplog.text


def test_a_tool_without_a_schema(make):
    def search(query):
        return query

    with pytest.raises(ConfigurationError, match=r"tools\['search'\].*docstring"):
        make(tools=[search])
    schema = {"description": "Searches.", "parameters": {"type": "object"}}
    make(tools={"search": (search, schema)})


def test_functions_change_no_columns(make):
    """A function has a dict of its own; what it writes there is not the batch's."""

    def step(conversation, task):
        assert "done" not in task
        task["done"] = task["answer"] = True
        task.pop("query")

    batch = next(iter(make(step=step, group_size=2, groups_per_batch=1)))
    assert batch["done"].dtype == torch.bool
    assert not batch["done"].any()
    assert batch["next", "done"].all()
    assert list(batch["answer"]) == ["0", "0"]
    assert list(batch["query"]) == ["question 0", "question 0"]


@pytest.mark.parametrize("name", ["reward", "done", "query", "policy_version"])
def test_a_reward_that_a_function_names(make, name):
    def step(conversation, task):
        conversation.rewards[name] = 5.0

    collector = make(step=step, groups_per_batch=1, max_retries=0)
    with pytest.raises(CollectionError, match=f"A reward is named '{name}'"):
        next(iter(collector))


def test_a_reward_of_the_step(make):
    def step(conversation, task):
        conversation.rewards["steps"] = 5.0

    batch = next(iter(make(step=step, group_size=2, groups_per_batch=1)))
    assert batch["next", "steps"].flatten().tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [("add", None, "missing"), ([], {}, "unhashable"), ("add", 3, "TypeError")],
)
def test_calls_of_a_sloppy_parser(make, tool, arguments, told):
    """The policy is told of its calls; the conversation goes on."""

    def reward(conversation, task):
        return float(told in conversation.messages[2]["content"])

    def parse_once(response, calls=[]):  # noqa: B006
        calls.append(1)
        call = type("Call", (), {"tool": tool, "args": arguments})
        return {"calls": [call] if len(calls) == 1 else []}

    collector = make(
        tools=[add],
        tool_parser=parse_once,
        rewards=reward,
        group_size=1,
        groups_per_batch=1,
    )
    assert next(iter(collector))["next", "reward"][-1].item() == 1.0


@pytest.mark.parametrize("found", [None, {}, {"calls": None}, "text"], ids=str)
def test_a_parser_that_returns_something_else_is_named(make, found):
    collector = make(
        tools=[add],
        tool_parser=lambda response: found,
        groups_per_batch=1,
        max_retries=0,
    )
    with pytest.raises(CollectionError, match="The tool_parser '<lambda>' raised"):
        next(iter(collector))


def test_a_sandbox_for_each_conversation(make):
    """Tools get the conversation; what they left for its end is called."""
    closed = []

    def run(a: int, b: int, conversation) -> str:  # noqa: D417
        """Runs.

        Args:
            a: the first one.
            b: the second one.
        """
        if "sandbox" not in conversation.state:
            conversation.state["sandbox"] = conversation.task["query"]
            conversation.at_end(lambda: closed.append(conversation.task["query"]))
            conversation.at_end(lambda: 1 / 0)
        return conversation.state["sandbox"]

    def reward(conversation, task):
        assert not closed
        return float(conversation.messages[2]["content"] == task["query"])

    collector = make(
        tools=[run], tool_parser=found("run"), rewards=reward, total_groups=1
    )
    batch = next(iter(collector))
    assert batch["next", "reward"].flatten().tolist() == [0.0, 1.0]
    assert closed == ["question 0"]
    assert "conversation" not in str(Tools([run]).schemas)


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize(
    "value",
    [{(1, 2): 3}, {1, 2}, "\ud800", UnspeakableError(), partial(int, "x")],
    ids=lambda value: type(value).__name__,
)
def test_the_policy_is_told_of_results_that_cannot_be_written(make, value):
    def look(a, b):
        if isinstance(value, Exception):
            raise value
        return value

    collector = make(
        tools={"look": (look, {"parameters": {}})},
        tool_parser=found("look"),
        total_groups=1,
        groups_per_batch=1,
    )
    batch = next(iter(collector))
    assert list(batch[1]["history"].prompt.role)[-1] == "tool"
    assert collector.stats()["errors"] == []


class Holder(Transform):
    """Holds something that has to be closed."""

    living: set[int] = set()  # noqa: RUF012

    def __init__(self, fault=None):
        super().__init__()
        self.fault = fault
        self.living.add(id(self))

    def _step(self, tensordict, next_tensordict):
        if self.fault is not None:
            self.fault()
        return next_tensordict.set("reward", torch.ones(1, 1, 1))

    def close(self):
        self.living.discard(id(self))


def holding(fault=None):
    return one_turn_env(Holder(fault))


def test_environments_are_closed(make):
    Holder.living.clear()
    collector = make(env=holding, rewards=None, group_size=2, total_groups=4)
    collect(collector)
    assert Holder.living
    collector.shutdown()
    assert not Holder.living
    # Also where it never ran, and where they fail.
    make(env=holding, rewards=None).shutdown()
    assert not Holder.living
    failing = make(env=partial(holding, fails), rewards=None, max_retries=0)
    with pytest.raises(CollectionError, match="when it was stepped, raised KeyError"):
        collect(failing)
    failing.shutdown()
    wait_until(lambda: not Holder.living)


def test_an_environment_that_cannot_be_closed(make, caplog, gate):
    class Stubborn(Holder):
        def close(self):
            gate.wait(5.0)

    collector = make(
        env=lambda: one_turn_env(Stubborn()),
        rewards=None,
        timeouts=CollectorTimeouts(shutdown=0.2),
    )
    assert len(next(iter(collector)))
    collector.shutdown(timeout=5.0)
    assert "were not closed within 0.2 s" in caplog.text


def test_turns_after_an_agents_end_change_nothing(make, gateway):
    """A request that the agent left in flight is no part of what it returned."""
    sessions = []

    async def agent(task, *, base_url, api_key):
        await ask_gateway(base_url, api_key, [user("Hi")], max_tokens=3)
        sessions.append(gateway.sessions[-1])
        return 1.0

    collector = make(
        agent=agent, gateway=gateway, rewards=None, total_groups=1, groups_per_batch=1
    )
    groups = collection_of(collector).groups
    write = groups.write

    def late(group):
        # The session goes on while the group is being written.
        sessions[0].turns.append(sessions[0].turns[0])
        sessions[0].set_reward(5.0)
        return write(group)

    groups.write = late
    batch = next(iter(collector))
    assert len(batch) == 1
    assert batch["next", "reward"].flatten().tolist() == [1.0]


PROGRAM = """
import asyncio, sys, threading, time
from tensordict import set_list_to_stack
set_list_to_stack(True).set()
from torchrl_sglang import AsyncLLMCollector, AsyncSGLang, Gateway, SGLangWrapper
began = threading.Event()

async def agent(task, *, base_url, api_key):
    began.set()
    await asyncio.to_thread(time.sleep, 600)

with AsyncSGLang.connect(sys.argv[1]) as engine, Gateway(engine) as gateway:
    collector = AsyncLLMCollector(
        policy=SGLangWrapper(engine), prompts=["a"], agent=agent, gateway=gateway,
        groups_per_batch=1,
    )
    threading.Thread(target=lambda: next(iter(collector)), daemon=True).start()
    assert began.wait(30.0)
    collector.shutdown()
    print("ended", flush=True)
"""


@pytest.mark.slow
def test_blocking_agents_keep_no_process_from_ending(fake):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fake.url],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "ended" in done.stdout, done.stderr
    assert time.monotonic() - begin < 90


def test_a_task_error_is_a_configuration_error():
    assert issubclass(TaskError, ConfigurationError)


def test_one_bug_is_one_traceback(make, caplog):
    """Of each place that raised, however many groups fail there."""

    def reward(conversation, task):
        if int(task["answer"]) % 2:
            raise ValueError(f"no verdict on {task['answer']}")
        return task["no such key"]

    collector = make(rewards=reward, max_retries=0)
    with pytest.raises(CollectionError, match="8 groups in a row"):
        next(iter(collector))
    shown = [each.exc_info[0] for each in caplog.records if each.exc_info]
    assert sorted(kind.__name__ for kind in shown) == ["KeyError", "ValueError"]
