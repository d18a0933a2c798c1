"""Two collections with ``deterministic=True`` are equal, whatever finishes first."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial

import pytest
from helpers.collecting import tasks
from helpers.fake_server import FakeServer
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_sglang import AsyncSGLang, Gateway, SGLangWrapper
from torchrl_sglang.collectors.groups.deterministic import check_deterministic
from torchrl_sglang.collectors.scheduling.admission import Limits
from torchrl_sglang.collectors.scheduling.group_pool import GroupPool
from torchrl_sglang.errors import (
    CollectionError,
    ConfigurationError,
    UnsupportedByServerError,
)

PROMPTS = 5
"""So few that all are visited again and again."""


@pytest.fixture
def fake(tiny_model_path):
    with FakeServer(tiny_model_path, enable_deterministic_inference=True) as server:
        yield server


def reward(conversation, task):
    return float(sum(conversation.turns[-1].token_ids) % 3)


def keep(returns):
    return sum(returns) % 2 == 0


def delayed(order: int):
    """Returns a step after which conversations end in an order of its own."""
    delays = random.Random(order)

    async def step(conversation, task):
        await asyncio.sleep(delays.random() * 0.02)
        return "More." if len(conversation.turns) == 1 else None

    return step


def contents(batch):
    return [
        (
            row["query"],
            tuple(row["tokens", "full"].tolist()),
            tuple(row["log_probs", "response"].tolist()),
            float(row["next", "reward"].sum()),
        )
        for row in batch.reshape(-1).unbind(0)
    ]


@pytest.fixture
def collect(make, update):
    """Returns batches of a new collector, with an update after every two."""

    def run(order: int, batches: int = 6, state=None, **kwargs):
        collector = make(
            **{
                "prompts": tasks(PROMPTS),
                "rewards": reward,
                "step": delayed(order),
                "keep_group": keep,
                "group_size": 3,
                "batches_per_update": 2,
                "max_staleness": 0,
                "deterministic": True,
                "shuffle": True,
                "seed": 3,
                **kwargs,
            }
        )
        if state is not None:
            collector.load_state_dict(state)
        found = []
        for number, batch in enumerate(collector, 1):
            found.append(contents(batch))
            if number % 2 == 0:
                update(collector)
            if number == batches:
                break
        state = collector.state_dict()
        collector.shutdown()
        return found, state

    return run


@pytest.mark.parametrize("on_stale", ["drop", "retry", "mask"])
def test_batches_do_not_depend_on_what_finishes_first(collect, on_stale):
    first, _ = collect(1, on_stale=on_stale)
    second, _ = collect(2, on_stale=on_stale, max_in_flight=2)
    assert first == second
    # Each sample of each visit has tokens of its own.
    rows = [row[1] for batch in first for row in batch]
    assert len(rows) == len(set(rows)) == 6 * 2 * 3 * 2
    asked = Counter(row[0] for batch in first for row in batch)
    assert max(asked.values()) > 2 * 3


def test_a_run_with_another_seed_is_another(collect):
    assert collect(1, batches=2)[0] != collect(1, batches=2, seed=4)[0]


def test_a_run_that_goes_on_is_the_run_that_did_not_end(collect):
    whole, _ = collect(1, batches=6)
    first, state = collect(2, batches=4)
    # The seed is the state's.
    rest, _ = collect(3, batches=2, state=state, seed=99)
    assert [*first, *rest] == whole


@pytest.mark.parametrize("fault", ["hang_up", "abort"])
def test_an_answer_that_is_asked_for_again_is_the_same(collect, fake, fault):
    """Also where a part of it was there already."""
    whole, _ = collect(1, batches=1)
    met = set()

    def once(content):
        asked = str(content["sampling_params"])
        return asked not in met and (met.add(asked) or True)

    with fake.misbehaving(fault, when=once):
        again, _ = collect(2, batches=1)
    assert met
    assert again == whole


def test_order_alone_without_seeds(collect, tiny_model_path, make):
    with (
        FakeServer(tiny_model_path) as plain,
        AsyncSGLang.connect(plain.url) as engine,
    ):
        kwargs = {"max_new_tokens": 6, "temperature": 0.0}
        policy = SGLangWrapper(engine, generate_kwargs=kwargs)
        runs = [
            collect(n, batches=1, policy=policy, keep_group=None)[0] for n in range(3)
        ]
        assert runs[0] == runs[1] == runs[2]
        for payload in plain.payloads():
            assert all("sampling_seed" not in p for p in payload["sampling_params"])


def test_servers_that_ignore_seeds_are_refused(make, tiny_model_path):
    with (
        FakeServer(tiny_model_path) as plain,
        AsyncSGLang.connect(plain.url) as engine,
    ):
        policy = SGLangWrapper(engine, generate_kwargs={"max_new_tokens": 6})
        with pytest.raises(UnsupportedByServerError, match="deterministic=True"):
            make(policy=policy, max_staleness=0, deterministic=True)


def test_a_server_on_cpu_is_refused_before_it_starts(tiny_model_path):
    with pytest.raises(ConfigurationError, match="servers on GPUs"):
        AsyncSGLang.from_pretrained(tiny_model_path, device="cpu", deterministic=True)


def test_arguments_that_depend_on_timing_are_refused(make, policy, fake_engine):
    make = partial(make, deterministic=True)
    with pytest.raises(ConfigurationError, match="max_staleness=0, got 1"):
        make()
    seeded = SGLangWrapper(fake_engine, generate_kwargs={"seed": 1})
    with pytest.raises(ConfigurationError, match="seed=1"):
        make(policy=seeded, max_staleness=0)
    with (
        Gateway(fake_engine) as gateway,
        pytest.raises(ConfigurationError, match="agent"),
    ):
        make(
            agent=lambda task, *, base_url, api_key: None,
            gateway=gateway,
            rewards=None,
            max_staleness=0,
        )
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=2)
    collector = make(replay_buffer=buffer, max_staleness=0)
    with pytest.raises(ConfigurationError, match="iterate"):
        collector.start()


def test_an_update_before_its_batches_ends_the_collection(make, update):
    collector = make(batches_per_update=2, max_staleness=0, deterministic=True)
    batches = iter(collector)
    next(batches)
    update(collector)
    with pytest.raises(CollectionError, match="batches_per_update"):
        next(batches)


@pytest.mark.parametrize("order", range(5))
def test_the_pool_takes_the_first_groups_that_are_kept(order):
    """Any order of ends gives the batches of the order of prompts."""
    draw = random.Random(order)
    pool = GroupPool(Limits(max_staleness=0, groups_per_update=4), in_order=True)
    running, taken, failed = [], [], set()
    while len(taken) < 40:
        running += [pool.start() for _ in range(pool.free())]
        draw.shuffle(running)
        position = running.pop()
        if position % 5 == 1 and position not in failed:
            failed.add(position)
            pool.give_up(position, retry=True)
        elif position % 3 == 0:
            pool.give_up(position, retry=False)
        else:
            pool.complete(position, None, oldest=pool.version)
        while (groups := pool.take(2)) is not None:
            taken += [group.position for group in groups]
            pool.close(group.position for group in groups)
            if len(taken) % 4 == 0:
                pool.set_version(pool.version + 1)
    assert taken == [n for n in range(100) if n % 3][: len(taken)]


def test_servers_with_a_prefix_cache_are_warned_of(tiny_model_path):
    given = {"server_args": {"disable_radix_cache": False}}
    with (
        FakeServer(
            tiny_model_path, enable_deterministic_inference=True, **given
        ) as server,
        AsyncSGLang.connect(server.url) as engine,
        pytest.warns(UserWarning, match="disable_radix_cache=True"),
    ):
        check_deterministic(SGLangWrapper(engine), max_staleness=0, of_agents=False)
