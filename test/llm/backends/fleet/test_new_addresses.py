"""Servers that vanish with their machine and come back at another address."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import web
from helpers.engines import fleet_of
from helpers.fake_launcher import FakeLauncher, make_engine
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.fleet.reconcile import Silent
from torchrl_sglang.support.event_loop import run_sync

pytestmark = pytest.mark.filterwarnings(
    # A machine that has vanished closes no connection.
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

SECONDS = 60.0
"""For what takes a second at most; no test waits for a timeout of a request."""

LONG = {"max_new_tokens": 140}
"""A response that is streamed."""


def states(engine: AsyncSGLang) -> list[str]:
    return [replica.state for replica in engine.replicas]


def urls(engine: AsyncSGLang) -> list[str]:
    return [replica.url for replica in engine.replicas]


def prompts(count: int) -> list[list[int]]:
    return [[5 + index % 90, 7] for index in range(count)]


def whole(prompt: list[int]) -> list[int]:
    return (prompt * 70)[:140]


def test_a_server_that_is_started_again_elsewhere(engine, launcher):
    first, second = launcher.handles
    epoch = engine.control.membership_epoch
    engine.generate(
        input_ids=prompts(4), sampling_params=LONG, session_ids=["a", "b", "c", "d"]
    )
    first.vanish()
    wait_until(lambda: len(launcher.handles) == 3 and states(engine) == ["serving"] * 2)
    third = launcher.handles[2]
    assert urls(engine) == [third.url, second.url]
    assert engine.control.membership_epoch > epoch
    assert [server.url for server in engine.servers] == urls(engine)
    assert [place.url for place in engine.placements] == urls(engine)
    assert engine.replicas[0].location.host == third.host
    assert [server.url for server in engine.stats().servers] == urls(engine)
    assert engine.server_url == third.url
    before = len(first.server.requests)
    sessions = ["a", "b", "c", "d"]
    for _ in range(2):
        engine.generate(
            input_ids=prompts(4), sampling_params=LONG, session_ids=sessions
        )
    assert [len(each.server.payloads()) for each in (third, second)] == [4, 4 + 2]
    assert len(first.server.requests) == before
    assert engine.control.urls == (third.url, second.url)


def test_requests_to_a_machine_that_vanished_go_on_with_their_tokens(engine, launcher):
    """Nobody closes their connections: the handle knows."""
    first, second = launcher.handles
    first.server.tokens_until_abort = 10
    batch = prompts(6)
    with ThreadPoolExecutor(1) as pool, first.server.misbehaving("hang_mid_stream"):
        call = pool.submit(engine.generate, input_ids=batch, sampling_params=LONG)
        first.server.wait_for("/generate", 3)
        wait_until(lambda: len(second.server.payloads()) == 3)
        time.sleep(0.2)
        first.vanish()
        answers = call.result(SECONDS)
    assert [answer.token_ids for answer in answers] == [whole(each) for each in batch]
    assert engine.stats().retries == 3
    sent = [p for each in launcher.handles for p in each.server.payloads()]
    resumed = [p for p in sent if len(p["input_ids"][0]) > 2]
    assert sorted(len(p["input_ids"][0]) for p in resumed) == [12] * 3


def test_a_control_call_to_a_machine_that_vanished_fails_at_once(engine, launcher):
    first, _ = launcher.handles
    with ThreadPoolExecutor(1) as pool, first.server.misbehaving("hang", "/model_info"):
        call = pool.submit(run_sync, engine.control.weight_versions(timeout=300))
        first.server.wait_for("/model_info", 2)
        first.vanish()
        with pytest.raises(ConnectionError, match="the server is gone"):
            call.result(SECONDS)


def test_weights_come_before_requests(engine, launcher):
    with engine.weight_update() as update:
        for handle in launcher.handles:
            handle.server.weight_version = "3"
        update.commit("3")
    first, second = launcher.handles
    first.vanish()
    wait_until(lambda: states(engine) == ["stale", "serving"])
    third = launcher.handles[2]
    engine.generate(input_ids=prompts(6), sampling_params=LONG)
    assert third.server.payloads() == []
    # An update sends it the weights, too.
    with engine.weight_update() as update:
        assert engine.control.urls == (third.url, second.url)
        for handle in (second, third):
            handle.server.weight_version = "4"
        update.commit("4")
    engine.generate(input_ids=prompts(6), sampling_params=LONG)
    assert len(third.server.payloads()) == 3


def test_a_machine_that_vanishes_in_an_update(engine, launcher):
    """What comes back elsewhere has not taken part."""
    first, second = launcher.handles
    with engine.weight_update() as update:
        first.vanish()
        wait_until(lambda: len(launcher.handles) == 3 and "down" not in states(engine))
        # The update goes on to fail at the address where the server was.
        assert engine.control.urls == (first.url, second.url)
        assert [each.url for each in engine.placements] == [first.url, second.url]
        second.server.weight_version = "1"
        update.commit("1")
    assert states(engine) == ["stale", "serving"]
    assert engine.control.urls == (launcher.handles[2].url, second.url)


def test_a_copy_that_polls_a_machine_that_vanished_follows(engine, launcher):
    """Nobody closes the poll's connection, and it would wait for 30 s."""
    copy = pickle.loads(pickle.dumps(engine))
    first = launcher.handles[0]
    first.server.vanish()
    before = len(first.server.requests)
    asked = copy.replicas[0]
    fleet_of(copy).apply(Silent(asked=asked, reason="It is gone."))
    wait_until(lambda: len(first.server.requests) > before)
    first.vanish()
    wait_until(lambda: states(copy) == ["serving"] * 2, 25)
    assert urls(copy) == urls(engine)
    copy.shutdown()


def test_a_copy_follows_its_engine(engine, launcher):
    copy = pickle.loads(pickle.dumps(engine))
    first, second = launcher.handles
    first.server.tokens_until_abort = 10
    batch = prompts(6)
    with ThreadPoolExecutor(1) as pool, first.server.misbehaving("hang_mid_stream"):
        call = pool.submit(copy.generate, input_ids=batch, sampling_params=LONG)
        first.server.wait_for("/generate", 3)
        time.sleep(0.2)
        first.vanish()
        # Only its engine knows that the machine is gone.
        answers = call.result(SECONDS)
    assert [answer.token_ids for answer in answers] == [whole(each) for each in batch]
    wait_until(lambda: states(engine) == ["serving"] * 2)
    wait_until(lambda: urls(copy) == urls(engine) and states(copy) == ["serving"] * 2)
    third = launcher.handles[2]
    before = len(third.server.payloads())
    copy.generate(input_ids=batch, sampling_params=LONG)
    assert len(third.server.payloads()) == before + 3
    assert copy.servers == ()
    copy.shutdown()
    assert [handle.state for handle in (second, third)] == ["ready", "ready"]


def test_a_copy_gives_a_moved_server_no_requests_before_it_has_the_weights(
    engine, launcher
):
    with engine.weight_update() as update:
        for handle in launcher.handles:
            handle.server.weight_version = "3"
        update.commit("3")
    copy = pickle.loads(pickle.dumps(engine))
    copy.generate(input_ids=prompts(2), sampling_params=LONG)
    launcher.handles[0].vanish()
    wait_until(lambda: states(engine) == ["stale", "serving"])
    wait_until(lambda: urls(copy) == urls(engine))
    copy.generate(input_ids=prompts(6), sampling_params=LONG)
    third = launcher.handles[2].server
    assert third.payloads() == []
    third.weight_version = "3"
    wait_until(lambda: states(copy) == ["serving"] * 2)
    copy.generate(input_ids=prompts(6), sampling_params=LONG)
    assert third.payloads()


def test_a_copy_whose_directory_has_ended_goes_on(engine, launcher):
    copy = pickle.loads(pickle.dumps(engine))
    launcher.directory.end()
    answers = copy.generate(input_ids=prompts(6), sampling_params=LONG)
    assert [answer.token_ids for answer in answers] == list(map(whole, prompts(6)))
    copy.shutdown()


@pytest.fixture
def routed(launcher: FakeLauncher) -> Iterator[AsyncSGLang]:
    with make_engine(launcher, router_policy="round_robin") as engine:
        yield engine


def test_requests_behind_a_router_whose_server_vanished(routed, launcher):
    """The router waits for the machine; nobody else does."""
    first, second = launcher.handles
    batch = prompts(6)
    second.server.tokens_until_abort = 2
    with ThreadPoolExecutor(1) as pool, second.server.misbehaving("hang"):
        first.server.vanish()
        call = pool.submit(routed.generate, input_ids=batch, sampling_params=LONG)
        first.server.wait_for("/generate", 3)
        second.server.wait_for("/generate", 3)
        # For these alone: what is sent again must not hang, too.
        second.server.faults.clear()
        first.vanish()
        # What the other server had begun is taken back, too, and goes on there.
        wait_until(lambda: len(second.server.payloads("/abort_request")) >= 3)
        answers = call.result(SECONDS)
    assert [answer.token_ids for answer in answers] == [whole(each) for each in batch]
    wait_until(lambda: states(routed) == ["serving"] * 2)
    third = launcher.handles[2]
    healthy = {second.url: True, third.url: True}
    router = fleet_of(routed).router
    wait_until(lambda: dict(run_sync(router.workers())) == healthy)
    routed.generate(input_ids=batch, sampling_params=LONG)
    assert third.server.payloads()


def test_a_chat_behind_a_router_whose_server_vanished(routed, launcher):
    first, second = launcher.handles
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for each in (first, second):
        each.server.routes["/v1/chat/completions"] = lambda content: web.json_response(
            {"choices": [{"finish_reason": "stop"}]}
        )
    first.server.vanish()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(routed.chat_completion, chat) for _ in range(2)]
        first.server.wait_for("/v1/chat/completions", 1)
        first.vanish()
        assert all(call.result(SECONDS) for call in calls)
