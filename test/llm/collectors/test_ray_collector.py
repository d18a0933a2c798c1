"""RayAsyncLLMCollector: the collector in a Ray actor, the weights sent from here."""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.collecting import tasks
from helpers.log_probs import TOLERANCE, difference, score
from helpers.waiting import wait_until
from torchrl.data import LazyStackStorage, ReplayBuffer, StalenessAwareSampler
from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from torchrl_sglang import (
    AsyncLLMCollector,
    CollectorTimeouts,
    FunctionGroups,
    RayAsyncLLMCollector,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.errors import (
    CollectionError,
    ConfigurationError,
    WeightSyncStateError,
)
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.weight_update.sender import SGLangWeightSender

pytestmark = [
    pytest.mark.timeout(300),
    # Ray's own, about futures and processes.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def scheme(restored_engine):
    scheme = SGLangWeightSyncScheme(restored_engine)
    yield scheme
    scheme.shutdown()


def make(engine, kind=RayAsyncLLMCollector, **kwargs) -> Any:
    policy = SGLangWrapper(
        engine,
        generate_kwargs={"max_new_tokens": 16, "ignore_eos": True},
        return_generation_info=True,
    )
    options = {
        "policy": policy,
        "prompts": tasks(50),
        "rewards": lambda conversation, task: float(conversation.sample),
        "group_size": 2,
        "groups_per_batch": 2,
        **kwargs,
    }
    return kind(**options)


def test_the_same_methods_as_on_this_machine():
    """With the same arguments, so that one takes the place of the other."""
    here, there = AsyncLLMCollector.__dict__, RayAsyncLLMCollector.__dict__
    names = {name for name in here if name[0] != "_" or name in ("__len__", "__repr__")}
    assert names <= there.keys()
    for name in names:
        method = here[name]
        assert inspect.signature(there[name]) == inspect.signature(method), name
        assert (there[name].__doc__ is None) == (method.__doc__ is None), name


def test_weights_are_sent_again_while_a_batch_is_waited_for(monkeypatch):
    """Servers that were all started again answer the actor only then."""
    ray = pytest.importorskip("ray")
    answer: Future[Any] = Future()

    def wait(answers, timeout):
        done, open_ = futures.wait(answers, timeout)
        return [*done], [*open_]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda each, timeout: each.result(timeout))
    collector = RayAsyncLLMCollector.__new__(RayAsyncLLMCollector)
    collector.timeouts = CollectorTimeouts()
    remote = SimpleNamespace(remote=lambda: answer)
    collector._actor = SimpleNamespace(next=remote)
    collector._finalizer = SimpleNamespace(alive=True)
    collector._refresh_weights = lambda: answer.set_result((True, None))
    assert list(collector.iterator()) == []
    collector._finalizer.alive = False


@pytest.mark.slow
def test_arguments_that_an_actor_cannot_have_are_refused(restored_engine, ray_here):
    """It is named: the argument, the function and what that uses."""
    lock = threading.Lock()

    def waits(conversation, task):
        with lock:
            return

    used = r"step, the function '.*waits', which uses 'lock', a lock, cannot be sent"
    with pytest.raises(ConfigurationError, match=used):
        make(restored_engine, step=waits)
    with pytest.raises(ConfigurationError, match=used):
        make(restored_engine, groups=FunctionGroups(step=waits))
    with pytest.raises(ConfigurationError, match=r"rewards\['b'\], the function"):
        make(restored_engine, rewards={"a": max, "b": waits})
    with pytest.raises(ConfigurationError, match="prompts, a generator, cannot be"):
        make(restored_engine, prompts=(task for task in tasks(3)))
    with pytest.raises(ConfigurationError, match="64 of 'CPU', and no machine .* 8"):
        make(restored_engine, remote_config={"num_cpus": 64})
    with pytest.raises(ConfigurationError, match="ReplayBuffer of this process"):
        make(restored_engine, replay_buffer=ReplayBuffer())


def has_ended(collector) -> bool:
    try:
        collector.stats()
    except CollectionError:
        return True
    return False


@pytest.fixture
def counts_late(monkeypatch):
    """Responses end between an update's arrival on the servers and its count."""
    count = SGLangWeightSender._count

    def count_late(self, *args):
        time.sleep(0.5)
        return count(self, *args)

    monkeypatch.setattr(SGLangWeightSender, "_count", count_late)


@pytest.mark.slow
def test_a_collector_in_an_actor(
    restored_engine, hf_model, scheme, tokenizer, ray_here, counts_late
):
    """Updates count there, tokens are of the version that they name, and it may die."""
    models = [hf_model, make_tiny_model(tokenizer, seed=11)]
    collector = make(
        restored_engine,
        max_staleness=1,
        weight_sync_schemes={"policy": scheme},
        timeouts=CollectorTimeouts(batch=60.0, shutdown=5.0),
    )
    first = restored_engine.weight_version
    counts = {int(first) if first.isdigit() else -1: 0}
    with pytest.raises(ConfigurationError, match="seed must be"):
        collector.set_seed(-1)
    seen = []
    for batch in itertools.islice(collector, 4):
        version = collector.policy_version
        seen += [int(answer) for answer in batch["answer"]]
        for tokens, log_probs, served, oldest in zip(
            batch.get(("tokens", "full"), as_list=True),
            batch.get(("log_probs", "response"), as_list=True),
            batch.get(("generation_info", "weight_version"), as_list=True),
            batch["policy_version"].tolist(),
            strict=True,
        ):
            known = [counts[each] for each in served.tolist()]
            assert min(known) == oldest >= version - 1
            for own in set(known):
                reference = score(models[own % 2], tokens)[-len(log_probs) :]
                error = (log_probs - reference)[torch.tensor(known) == own]
                assert float(error.abs().max()) < TOLERANCE
        report = collector.update_policy_weights_(models[(version + 1) % 2])
        counts[int(report.version)] = collector.policy_version
        assert collector.policy_version == version + 1
        assert collector.last_sync_report is report
    assert sorted(seen) == [n for n in range(8) for _ in range(2)]
    assert collector.stats()["age"].keys() <= {0, 1}
    # Another one goes on from its state.
    state = collector.state_dict()
    assert state["pool"]["consumed"] == 8
    with pytest.raises(CollectionError, match="before the collector is started"):
        collector.load_state_dict(state)
    with collector.pause():
        assert collector.is_running()
    ray_here.kill(collector._actor)
    # Ray ends it in the background.
    wait_until(lambda: has_ended(collector))
    for call in (collector.stats, partial(next, iter(collector)), collector.resume):
        with pytest.raises(CollectionError, match="actor has ended .* load the state"):
            call()
    # Its own trainer is told; for others it is forgotten.
    served = restored_engine.weight_version
    with pytest.raises(CollectionError, match="actor has ended"):
        collector.update_policy_weights_(models[0])
    assert restored_engine.weight_version == served
    other = make(restored_engine, weight_sync_schemes={"policy": scheme})
    for count in (1, 2):
        other.update_policy_weights_(models[0])
        assert other.policy_version == count
    collector.shutdown()
    collector.shutdown()
    other.shutdown()
    with pytest.raises(CollectionError, match="was shut down"):
        collector.stats()
    with make(restored_engine, AsyncLLMCollector) as again:
        again.load_state_dict(state)
        batch = next(iter(again))
        assert [int(answer) for answer in batch["answer"]] == [8, 8, 9, 9]
    wait_until(lambda: restored_engine.get_num_unfinished_requests(0) == 0)


@pytest.mark.slow
def test_a_buffer_on_ray(restored_engine, hf_model, scheme, tokenizer, ray_here):
    """Two rounds of GRPO with collector and buffer in actors, and faults of both."""
    buffer = RayReplayBuffer(
        storage=partial(LazyStackStorage, 64),
        sampler=partial(StalenessAwareSampler, max_staleness=1),
        transform_factory=partial(MCAdvantage, grpo_size=2),
        batch_size=4,
        remote_config={"num_cpus": 1},
    )
    collector = make(
        restored_engine,
        replay_buffer=buffer,
        weight_sync_schemes={"policy": scheme},
        timeouts=CollectorTimeouts(batch=60.0, shutdown=5.0),
    )
    actor = TransformersWrapper(
        hf_model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    loss = GRPOLoss(actor, entropy_bonus=False)
    for number, nothing in enumerate(itertools.islice(collector, 2), start=1):
        assert nothing is None
        data = buffer.sample()
        assert collector.policy_version - int(data["policy_version"].min()) <= 1
        loss(data).loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        collector.update_policy_weights_(hf_model)
        sampler = ray_here.get(buffer._rb._getattr.remote("_sampler"))
        assert sampler.consumer_version == number
    collector.start()
    wait_until(lambda: collector.getattr_rb("write_count") > 8)
    assert difference(restored_engine, hf_model) < TOLERANCE
    with collector.pause():
        rows = len(buffer)
        consumed = collector.state_dict()["pool"]["consumed"]
        assert rows == 2 * consumed
    # What is written to is gone.
    buffer.close()
    with suppress(CollectionError, WeightSyncStateError):
        # It may know already.
        collector.update_policy_weights_(hf_model)
    wait_until(lambda: not collector.is_running())
    with pytest.raises(CollectionError, match="has ended"):
        collector.getattr_rb("write_count")
    collector.shutdown()
