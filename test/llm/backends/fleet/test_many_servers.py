"""Several servers: which one gets a request, and what happens when one misbehaves."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
from helpers.engines import fleet_of
from helpers.fake_server import FakeServer
from helpers.forked_starts import trainer_python

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
)
from torchrl_sglang.types import Completion

SHORT = {"max_new_tokens": 4}
REFUSED = {"max_new_tokens": 4, "stop": [f"stop {i}" for i in range(33)]}


@pytest.fixture
def three(start_fakes):
    return start_fakes(3)


@pytest.fixture
def engine(three):
    with AsyncSGLang.connect(urls=[fake.url for fake in three]) as engine:
        yield engine


def prompts(count):
    return [[5 + index % 90] for index in range(count)]


def answered(three) -> Counter:
    """First token of a prompt -> how often it was sent."""
    sent = (p["input_ids"] for fake in three for p in fake.payloads())
    return Counter(row[0] for rows in sent for row in rows)


def test_one_request_for_each_prompt_shared_out_evenly(engine, three):
    answers = engine.generate(input_ids=prompts(30), sampling_params=SHORT)
    assert [answer.token_ids[0] for answer in answers] == [p[0] for p in prompts(30)]
    assert [len(fake.payloads()) for fake in three] == [10, 10, 10]
    assert all(len(p["input_ids"]) == 1 for p in three[0].payloads())


def test_sessions(engine, three):
    sessions = [f"episode {index % 5}" for index in range(30)]
    for _ in range(2):
        engine.generate(
            input_ids=prompts(30), sampling_params=SHORT, session_ids=sessions
        )
    homes = {}
    for fake in three:
        for payload in fake.payloads():
            session = sessions[payload["input_ids"][0][0] - 5]
            homes.setdefault(session, set()).add(fake.url)
    assert all(len(urls) == 1 for urls in homes.values())


@pytest.mark.parametrize("fault", ["hang_up", "hang_up_mid_body", "error_500"])
def test_requests_that_one_server_drops_are_answered_by_others(engine, three, fault):
    with three[0].misbehaving(fault):
        answers = engine.generate(input_ids=prompts(30), sampling_params=SHORT)
    assert [answer.token_ids[0] for answer in answers] == [p[0] for p in prompts(30)]
    stats = engine.stats()
    assert stats.completed == 30
    # What it had been sent before anybody knew came back once, and went elsewhere.
    assert stats.retries == len(three[0].payloads())
    assert sum(answered(three).values()) == 30 + stats.retries


@pytest.mark.parametrize("fault", ["malformed_json", "short_tokens", "abort_400"])
def test_refused_requests_are_not_sent_again(engine, three, fault):
    with ExitStack() as stack:
        for fake in three:
            stack.enter_context(fake.misbehaving(fault))
        with pytest.raises((ServerUnavailableError, RequestRefusedError)):
            engine.generate(input_ids=[5], sampling_params=SHORT)
    assert sum(answered(three).values()) == 1


def test_all_of_them_gone(engine, three):
    for fake in three:
        fake.close()
    start = time.monotonic()
    with pytest.raises(
        ServerUnavailableError, match="Check that the server is running"
    ):
        engine.generate(input_ids=prompts(5), sampling_params=SHORT)
    assert time.monotonic() - start < 60


def test_a_slow_item_is_an_error_in_its_own_place(engine, three):
    with three[0].misbehaving("hang"):
        outcomes = engine.generate(
            input_ids=prompts(6),
            sampling_params=SHORT,
            request_timeout=0.5,
            return_exceptions=True,
        )
    kinds = Counter(type(outcome).__name__ for outcome in outcomes)
    assert kinds["Completion"] == 4
    late = [outcome for outcome in outcomes if not isinstance(outcome, Completion)]
    assert all(isinstance(outcome, ServerTimeoutError) for outcome in late)
    assert "0.5 s" in str(late[0])


def test_a_cap_on_requests_in_flight(three):
    with AsyncSGLang.connect(
        urls=[fake.url for fake in three], max_in_flight=4
    ) as engine:
        engine.generate(input_ids=prompts(60), sampling_params=SHORT)
        # Each was also asked what it is, over up to two connections.
        assert sum(fake.most_connections for fake in three) <= 4 + 2 * 3
    with pytest.raises(ConfigurationError, match="max_in_flight must be .* got 0"):
        AsyncSGLang.connect(three[0].url, max_in_flight=0)


def test_answers_come_as_they_finish(engine, three):
    """What hangs holds nothing else up; leaving the loop ends it."""
    seen = []
    with three[0].misbehaving("hang"):
        for index, answer in engine.generate_iter(
            input_ids=prompts(9), sampling_params=SHORT
        ):
            seen.append(index)
            assert answer.token_ids[0] == prompts(9)[index][0]
            if len(seen) == 6:
                break
        assert len(set(seen)) == 6
        three[0].wait_for("/abort_request")
    assert engine.stats().in_flight == 0


def test_answers_come_as_they_finish_on_any_loop(engine):
    async def collect():
        stream = engine.agenerate_iter(
            input_ids=[*prompts(5), []], sampling_params=SHORT, return_exceptions=True
        )
        return {index: answer async for index, answer in stream}

    found = asyncio.run(collect())
    assert sorted(found) == list(range(6))
    assert isinstance(found[5], ConfigurationError)


@pytest.mark.parametrize("names", [["late"], None])
def test_abort(three, names):
    """What waits here is not sent; what was sent is ended on its server."""
    engine = AsyncSGLang.connect(urls=[fake.url for fake in three], max_in_flight=3)
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        for fake in three:
            stack.enter_context(fake.misbehaving("hang"))
        call = pool.submit(
            engine.generate,
            input_ids=prompts(9),
            sampling_params=SHORT,
            request_ids=["first"] * 3 + ["late"] * 6,
            return_exceptions=True,
        )
        for fake in three:
            fake.wait_for("/generate")
        assert engine.stats().queued == 6
        assert engine.abort("unknown") == 0
        assert engine.abort(names) == (9 if names is None else 6)
        if names is not None:
            assert engine.stats().in_flight == 3
            assert engine.abort("first") == 3
        outcomes = call.result(60)
    assert [type(o) for o in outcomes] == [GenerationAbortedError] * 9
    assert [outcome.index for outcome in outcomes] == list(range(9))
    assert answered(three).total() == 3
    engine.shutdown()


def test_servers_that_are_not_alike(three, tiny_model_path):
    with FakeServer(tiny_model_path, context=512) as other:
        with pytest.raises(ConfigurationError, match="differ in max_context"):
            AsyncSGLang.connect(urls=[three[0].url, other.url])
    with pytest.raises(ConfigurationError, match="each server once"):
        AsyncSGLang.connect(urls=[three[0].url, three[0].url + "/"])
    with pytest.raises(ConfigurationError, match="one server or of several"):
        AsyncSGLang.connect()


def test_servers_of_different_weights(three):
    """Only those with the newest weights generate, until the next update."""
    three[1].weight_version = "4"
    with AsyncSGLang.connect(urls=[fake.url for fake in three]) as engine:
        engine.generate(input_ids=prompts(6), sampling_params=SHORT)
        assert [len(fake.payloads()) for fake in three] == [0, 6, 0]
        states = [server.state for server in engine.stats().servers]
        assert states == ["stale", "serving", "stale"]
        with engine.weight_update() as update:
            update.commit("5")
        for fake in three:
            fake.weight_version = "5"
        engine.generate(input_ids=prompts(6), sampling_params=SHORT)
        assert [len(fake.payloads()) for fake in three] == [2, 8, 2]


def test_stats(engine, three):
    three[0].cached_tokens = 1
    engine.generate(input_ids=[[5, 6]] * 6, sampling_params=SHORT)
    stats = engine.stats()
    assert (stats.completed, stats.response_tokens, stats.prompt_tokens) == (6, 24, 12)
    assert stats.cache_hit_rate == pytest.approx(2 / 12)
    assert stats.tokens_per_second == pytest.approx(2.4)
    assert (stats.in_flight, stats.queued, stats.retries, stats.restarts) == (0,) * 4
    assert [server.url for server in stats.servers] == [fake.url for fake in three]
    assert [server.running for server in stats.servers] == [0, 0, 0]
    three[2].close()
    assert engine.stats().servers[2].running is None


@pytest.mark.parametrize("prompt", [[5], [5] * 40], ids=["waiting", "primed"])
def test_a_part_of_a_batch_is_aborted(three, prompt):
    """On one server a batch is one request; here, before it is sent."""
    fake, *_ = three
    engine = AsyncSGLang.connect(fake.url, max_in_flight=1)
    primed = len(prompt) > 1

    def call(batch, names):
        return engine.generate(
            input_ids=batch,
            sampling_params=SHORT,
            request_ids=names,
            return_exceptions=True,
        )

    with ThreadPoolExecutor(2) as pool, fake.misbehaving("hang"):
        if not primed:
            pool.submit(call, [[8]], ["first"])
            fake.wait_for("/generate")
        batch = [prompt, prompt, [6], [7]]
        waiting = pool.submit(call, batch, ["a", "a", "b", "b"])
        while engine.stats().queued < 4:
            assert not waiting.done()
        if primed:
            fake.wait_for("/generate")
        assert engine.abort("a") == 2
        fake.recover()
        outcomes = waiting.result(60)
    kinds = [type(outcome).__name__ for outcome in outcomes]
    assert kinds == ["GenerationAbortedError"] * 2 + ["Completion"] * 2
    assert [outcome.index for outcome in outcomes[:2]] == [0, 1]
    engine.shutdown()


def test_cancelling_what_is_iterated(engine, three):
    """It is a cancellation for the caller, and an abort for the servers."""

    async def give_up():
        async for _ in engine.agenerate_iter(input_ids=prompts(3)):
            pass

    async def main():
        with three[0].misbehaving("hang"):
            task = asyncio.ensure_future(give_up())
            await asyncio.to_thread(three[0].wait_for, "/generate")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(three[0].wait_for, "/abort_request")

    asyncio.run(main())


def test_cancelling_a_chat(engine, three):
    path = "/v1/chat/completions"

    async def main():
        task = asyncio.ensure_future(engine.achat_completion({"messages": []}))
        # One of them has it, and which one is the fleet's to say.
        while not any(fake.payloads(path) for fake in three):
            assert not task.done()
            await asyncio.sleep(0.01)
        assert sum(len(fake.payloads(path)) for fake in three) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with ExitStack() as stack:
        for fake in three:
            stack.enter_context(fake.misbehaving("hang", path))
        start = time.monotonic()
        asyncio.run(main())
    assert time.monotonic() - start < 60
    assert engine.stats().in_flight == 0


def test_leaving_an_iterator_open_does_not_hold_the_interpreter_up(three):
    program = f"""
from torchrl_sglang import AsyncSGLang
engine = AsyncSGLang.connect(urls={[fake.url for fake in three]!r})
answers = engine.generate_iter(input_ids=[[5], [6], [7]])
next(answers)
"""
    done = subprocess.run(
        [trainer_python(), "-c", program], timeout=300, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nobody_is_healthy_where_nobody_runs(engine, three):
    replicas = engine.replicas
    lost = tuple(replace(each, state="lost") for each in replicas)
    fleet_of(engine).change(lambda state: replace(state, replicas=lost))
    assert not engine.health()
    with pytest.raises(ServerUnavailableError, match="No server of the engine runs"):
        engine.flush_cache()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_uses_the_same_servers(engine, three):
    """Its parent's loop, connections and in-flight requests are not its own."""
    with three[0].misbehaving("hang"), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            engine.generate, input_ids=prompts(3), sampling_params=SHORT
        )
        three[0].wait_for("/generate")
        child = multiprocessing.get_context("fork").Process(
            target=generate_elsewhere, args=(engine,)
        )
        # Only what hangs is the parent's.
        faults, three[0].faults = three[0].faults, {}
        child.start()
        child.join(60)
        three[0].faults = faults
        assert child.exitcode == 0
        engine.abort()
        with pytest.raises(GenerationAbortedError):
            waiting.result(60)


def generate_elsewhere(engine) -> None:
    answers = engine.generate(input_ids=prompts(6), sampling_params=SHORT)
    assert [answer.token_ids[0] for answer in answers] == [p[0] for p in prompts(6)]
    assert engine.stats().in_flight == 0
