"""Servers of another owner: each engine object polls them for what they hold."""

from __future__ import annotations

import gc
import pickle
import time
import weakref
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from helpers.engines import Process, fleet_of, supervisor_of
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.client.capabilities import find_out
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.adapter_calls import AdapterCalls
from torchrl_sglang.backends.fleet.loop import Supervisor, WatchTimes
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.observe import ServerPoller, hangs
from torchrl_sglang.backends.fleet.reconcile import RestartNoticed
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.errors import (
    ServerTimeoutError,
    ServerUnavailableError,
    WeightSyncStateError,
)
from torchrl_sglang.support.event_loop import run_sync, weakly

SHORT = {"max_new_tokens": 4}


@pytest.fixture
def three(start_fakes):
    servers = start_fakes(3, enable_lora=True)
    for server in servers:
        server.weight_version = "5"
    return servers


@pytest.fixture
def engine(three):
    with AsyncSGLang.connect(urls=[server.url for server in three]) as engine:
        yield engine


def watches(engine) -> bool:
    return not supervisor_of(engine)._tasks["watch"].done()


def states(fleet) -> list[str]:
    return [replica.state for replica in fleet.replicas]


def versions(engine, count=12) -> set[str]:
    answers = engine.generate(
        input_ids=[[5 + i] for i in range(count)], sampling_params=SHORT
    )
    assert len(answers) == count
    return {span.version for answer in answers for span in answer.versions}


def test_one_that_was_stale_is_taken_back(three):
    """At the time of connecting; another engine sends it the weights later."""
    three[0].restart()
    with AsyncSGLang.connect(urls=[server.url for server in three]) as engine:
        assert states(engine) == ["stale", "serving", "serving"]
        assert versions(engine) == {"5"}
        assert three[0].payloads() == []
        three[0].weight_version = "5"
        wait_until(lambda: states(engine) == ["serving"] * 3)
        assert versions(engine) == {"5"}
        assert three[0].payloads()


def test_one_that_was_away_when_the_engine_was_made(three):
    three[0].die()
    urls = [server.url for server in three]
    with AsyncSGLang.connect(urls=urls) as engine:
        assert states(engine) == ["down", "serving", "serving"]
        assert versions(engine) == {"5"}
        three[0].restart()
        three[0].weight_version = "5"
        wait_until(lambda: states(engine) == ["serving"] * 3)
    for server in three:
        server.die()
    with pytest.raises(ServerUnavailableError):
        AsyncSGLang.connect(urls=urls)


def test_one_that_was_started_again_costs_no_answer(engine, three):
    """Its answers of older weights are asked for again; it waits for newer ones."""
    assert versions(engine) == {"5"}
    three[0].restart()
    assert versions(engine, 30) == {"5"}
    assert states(engine) == ["stale", "serving", "serving"]
    assert "'default'" in engine.stats().servers[0].reason
    # Another engine object sends newer ones to all.
    for server in three:
        server.weight_version = "6"
    wait_until(lambda: states(engine) == ["serving"] * 3)
    assert versions(engine) == {"6"}
    assert engine.weight_version == "6"


def test_one_that_is_away_comes_back(engine, three):
    three[2].die()
    assert versions(engine) == {"5"}
    wait_until(lambda: states(engine) == ["serving", "serving", "down"])
    # Weights go to those that are there.
    with engine.weight_update() as update:
        assert engine.control.urls == (three[0].url, three[1].url)
        update.commit("6")
    three[0].weight_version = three[1].weight_version = "6"
    three[2].restart()
    wait_until(lambda: states(engine) == ["serving", "serving", "stale"])
    three[2].weight_version = "6"
    wait_until(lambda: states(engine) == ["serving"] * 3)


def test_one_that_comes_back_as_another(engine, three):
    """It does not stand in for the others, and its reason says why."""
    three[0].die()
    assert versions(engine) == {"5"}
    wait_until(lambda: states(engine)[0] == "down")
    three[0].restart()
    three[0].context = 512
    wait_until(lambda: "max_context" in engine.stats().servers[0].reason)
    assert states(engine)[0] == "down"


def test_the_only_one_is_started_again(three):
    server, *_ = three
    with AsyncSGLang.connect(server.url) as engine:
        assert versions(engine) == {"5"}
        server.restart()
        with pytest.raises(WeightSyncStateError, match="send the weights"):
            versions(engine)
        server.weight_version = "6"
        wait_until(lambda: states(engine) == ["serving"])
        assert versions(engine) == {"6"}


def test_the_only_one_is_killed(three, log):
    """It is told once and within seconds, the state is true, and so is its return."""
    server, *_ = three
    with AsyncSGLang.connect(server.url) as engine:
        assert engine.problems == ()
        server.die()
        with pytest.raises(ServerUnavailableError):
            versions(engine)
        wait_until(lambda: engine.problems, seconds=10)
        (problem,) = engine.problems
        assert problem.startswith(f"The server at {server.url} is unreachable. ")
        (told,) = engine.stats().servers
        assert told.state == "unreachable"
        assert told.reason in problem
        with pytest.raises(ServerUnavailableError, match="Check that the server"):
            versions(engine)
        server.restart()
        server.weight_version = "5"
        wait_until(lambda: not engine.problems)
        assert engine.stats().servers[0].state == "serving"
        assert versions(engine) == {"5"}
        wait_until(lambda: not watches(engine))
    assert log.text.count("the only one that serves, does not answer") == 1
    assert log.text.count(f"The server at {server.url} serves again, after") == 1


def test_some_of_them_are_killed(engine, three, log):
    for server in three[:2]:
        server.die()
    assert versions(engine) == {"5"}
    wait_until(lambda: len(engine.problems) == 2, seconds=10)
    for server, problem in zip(three, engine.problems, strict=False):
        assert problem.startswith(f"The server at {server.url} is down. ")
    for server in three[:2]:
        server.restart()
        server.weight_version = "5"
    wait_until(lambda: not engine.problems)
    # The log follows the state.
    wait_until(lambda: log.text.count("serves again, after") == 2)
    assert log.text.count("gets no requests until it answers") == 2


def test_a_hanging_server_is_reported_and_its_requests_go_elsewhere(engine, three, log):
    """Of another owner, who alone can start it again."""
    hanging = three[0]
    supervisor_of(engine).times = WatchTimes(in_flight=0.2, probe=0.2, progress=0.1)
    with (
        hanging.misbehaving("hang"),
        hanging.misbehaving("error_500", "/health_generate"),
        hanging.misbehaving("error_500", "/server_info"),
    ):
        assert versions(engine) == {"5"}
        (problem,) = engine.problems
        assert problem.startswith(f"The server at {hanging.url} is down. ")
        assert "did not generate" in log.text
    wait_until(lambda: not engine.problems)
    assert versions(engine) == {"5"}


def test_a_request_after_a_long_pause_does_not_hang(three):
    server, *_ = three
    with AsyncSGLang.connect(server.url) as engine:
        long_ago = (time.monotonic() - 1000.0, engine.stats().completed)
        supervisor_of(engine)._last_progress = long_ago
        with server.misbehaving("hang"), pytest.raises(ServerTimeoutError):
            engine.generate(input_ids=[5], timeout=0.5)
    assert "/health_generate" not in {path for _, path, _ in server.requests}


def test_servers_that_work_are_not_asked(engine, three):
    before = [len(server.requests) for server in three]
    assert versions(engine) == {"5"}
    for server, count in zip(three, before, strict=True):
        # The second one is for adapters, before the first batch.
        paths = {path for _, path, _ in server.requests[count:]}
        assert paths == {"/generate", "/v1/models"}
    three[0].die()
    versions(engine)
    wait_until(lambda: states(engine)[0] == "down")
    three[0].restart()
    three[0].weight_version = "5"
    wait_until(lambda: states(engine) == ["serving"] * 3)
    wait_until(lambda: not watches(engine))


def test_an_engine_that_watches_can_be_dropped(three):
    three[0].restart()
    engine = AsyncSGLang.connect(urls=[server.url for server in three])
    assert versions(engine) == {"5"}
    assert watches(engine)
    fleet = weakref.ref(fleet_of(engine))
    del engine
    wait_until(lambda: gc.collect() >= 0 and fleet() is None)


def test_an_update_of_another_engine_is_not_disturbed(engine, three):
    """Some have the newer weights already; the others follow."""
    three[0].weight_version = "6"
    engine.look_at_servers()
    wait_until(lambda: states(engine) == ["serving", "stale", "stale"])
    three[1].weight_version = three[2].weight_version = "6"
    wait_until(lambda: states(engine) == ["serving"] * 3)
    assert engine.weight_version == "6"


# --- adapters


def adapter():
    config = {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (1, 64), "B": (64, 1)}
    return {
        "tensors": {name.format(k): torch.ones(s) for k, s in shapes.items()},
        "config": {**config, "peft_type": "LORA"},
    }


def names(server) -> list[str]:
    return [name.partition("#")[0] for name in server.adapters]


@pytest.mark.parametrize("count", [1, 3])
def test_an_adapter_of_a_copy_survives_a_restart(three, count):
    """Only the copy has it; the servers have another owner."""
    with ExitStack() as stack:
        urls = [server.url for server in three[:count]]
        engine = stack.enter_context(AsyncSGLang.connect(urls=urls))
        copy = pickle.loads(pickle.dumps(engine))
        stack.callback(copy.shutdown)
        copy.load_adapter("style", **adapter())
        copy.load_adapter("policy", version="6", default=True, **adapter())
        (answer,) = engine.generate(input_ids=[[5]])
        assert answer.adapter_version == "6"
        three[0].restart()
        three[0].weight_version = "5"
        # Without them it would compute requests with the base model.
        wait_until(lambda: sorted(names(three[0])) == ["policy@6", "style~"])
        for each in (engine, copy):
            wait_until(lambda each=each: states(each) == ["serving"] * count)
            answers = each.generate(input_ids=[[5]] * 6, sampling_params=SHORT)
            assert {answer.adapter_version for answer in answers} == {"6"}
            answers = each.generate(input_ids=[[5]] * 6, adapter="style")
            assert {answer.adapter for answer in answers} == {"style"}


def test_an_adapter_that_was_loaded_while_a_server_was_cut_off(engine, three):
    """It is the same start, and lacks what the others have."""
    cut_off = three[2]
    engine.look_at_servers()
    cut_off.dead = True
    engine.look_at_servers()
    assert states(engine) == ["serving", "serving", "down"]
    engine.load_adapter("style", **adapter())
    assert names(cut_off) == []
    before = len(cut_off.payloads())
    cut_off.dead = False
    wait_until(lambda: states(engine) == ["serving"] * 3)
    assert names(cut_off) == ["style~"]
    answers = engine.generate(input_ids=[[5]] * 6, adapter="style")
    assert {answer.adapter for answer in answers} == {"style"}
    assert len(cut_off.payloads()) > before


def test_newer_weights_do_not_stand_in_for_an_adapter(engine, three):
    """A server that was started again has older weights, and no adapter."""
    engine.load_adapter("style", **adapter())
    three[0].restart()
    engine.look_at_servers()
    assert states(engine) == ["stale", "serving", "serving"]
    # Another engine object sends newer weights to all.
    for server in three:
        server.weight_version = "6"
    wait_until(lambda: states(engine) == ["serving"] * 3)
    assert names(three[0]) == ["style~"]


def test_an_owner_that_does_not_know_of_an_adapter_asks_the_other_servers(three):
    """Before one that it has started again gets requests."""
    with ExitStack() as stack:
        urls = [server.url for server in three]
        owner = stack.enter_context(AsyncSGLang.connect(urls=urls))
        with AsyncSGLang.connect(urls=urls) as trainer:
            trainer.load_adapter("policy", version="6", default=True, **adapter())
        again = three[0]
        again.restart()
        again.weight_version = "5"
        fleet_of(owner).apply(RestartNoticed(rank=0, start_id="another start"))
        answers = owner.generate(input_ids=[[5]] * 6, sampling_params=SHORT)
        assert {answer.adapter_version for answer in answers} == {"6"}
        wait_until(lambda: "policy@6" in owner.replicas[0].reason)
        assert again.payloads() == []


def test_requests_do_not_fall_back_to_the_base_model(three):
    """An adapter that is lost is missed, and one that was dropped is not."""
    server, *_ = three
    with AsyncSGLang.connect(server.url) as engine:
        with AsyncSGLang.connect(server.url) as trainer:
            trainer.load_adapter("policy", version="6", default=True, **adapter())
            (answer,) = engine.generate(input_ids=[[5]])
            assert answer.adapter_version == "6"
        server.restart()
        server.weight_version = "5"
        with pytest.raises(ServerUnavailableError, match="policy@6"):
            engine.generate(input_ids=[[5]])
        # A newer one takes its place.
        with AsyncSGLang.connect(server.url) as trainer:
            trainer.load_adapter("policy", version="7", default=True, **adapter())
            wait_until(lambda: states(engine) == ["serving"])
            (answer,) = engine.generate(input_ids=[[5]])
            assert answer.adapter_version == "7"
            trainer.unload_adapter("policy")
        (answer,) = engine.generate(input_ids=[[5]])
        assert answer.adapter is None


def test_adapters_replaced_by_whole_weights_are_not_loaded_again(three):
    server, *_ = three
    with AsyncSGLang.connect(server.url) as publisher:
        publisher.load_adapter("policy", default=True, **adapter())
        with AsyncSGLang.connect(server.url) as trainer:
            assert len(trainer.published_adapters(timeout=10)) == 1
            trainer.withdraw_adapters(timeout=10)
            server.weight_version = "6"
        assert server.adapters == []
        (answer,) = publisher.generate(input_ids=[[5]])
        assert (answer.adapter, publisher.default_adapter) == (None, None)
        server.restart()
        server.weight_version = "6"
        (answer,) = publisher.generate(input_ids=[[5]])
        assert answer.adapter is None


def test_an_adapter_of_another_object_is_followed_by_one_that_loads_its_own(three):
    server, *_ = three
    with (
        AsyncSGLang.connect(server.url) as engine,
        AsyncSGLang.connect(server.url) as trainer,
    ):
        engine.load_adapter("style", **adapter())
        trainer.load_adapter("policy", version="6", default=True, **adapter())

        def carried():
            (answer,) = engine.generate(input_ids=[[5]])
            return answer.adapter_version

        wait_until(lambda: carried() == "6")


# --- whether a server hangs


@pytest.mark.parametrize("tells", [True, False], ids=["says so", "does not say"])
def test_a_server_that_is_paused_does_not_hang(three, tells):
    server, *_ = three
    if not tells:
        del server.routes["/ready"]
    with ExitStack() as stack:
        engine = stack.enter_context(AsyncSGLang.connect(server.url))
        http = HttpClient()
        ask = lambda: run_sync(  # noqa: E731
            hangs(http, engine.capabilities, server.url, timeout=0.2)
        )
        assert engine.capabilities.tells_paused == tells
        assert not ask()
        stack.enter_context(server.misbehaving("hang", "/health_generate"))
        assert ask()
        # Another engine pauses it: requests wait in the server.
        server.paused = True
        stack.enter_context(server.misbehaving("hang", "/generate"))
        assert not ask()
        # It answers nothing at all.
        server.die()
        assert ask()


def test_an_owner_does_not_restart_a_server_that_another_engine_paused(three):
    """However long that takes; one that hangs it ends."""
    server, *_ = three
    with AsyncSGLang.connect(server.url) as engine:
        http, capabilities = HttpClient(), engine.capabilities
        process = Process()
        fleet = Fleet(
            replicas=[Replica(url=server.url, handle=process)], weight_version="5"
        )
        adapters = AdapterCalls(http, capabilities)
        server.paused = True
        with server.misbehaving("error_500", "/health_generate"):
            supervisor = Supervisor(
                fleet,
                http,
                capabilities,
                # One request is in flight, and none completes.
                progress=lambda: (1, 0),
                recall=weakly(engine._dispatcher.in_flight.recall),
                poller=ServerPoller(
                    http, capabilities, adapters, partial(find_out, http)
                ),
                max_restarts=0,
                times=WatchTimes(progress=0.1),
            )
            server.wait_for("/ready", 3)
            assert (process.state, states(fleet)) == ("ready", ["serving"])
            server.paused = False
            wait_until(lambda: process.state == "stopped")
        supervisor.stop()


def test_a_real_server_that_is_paused_does_not_hang(session_engine):
    engine, http = session_engine, HttpClient()

    def hanging() -> bool:
        return run_sync(hangs(http, engine.capabilities, engine.server_url))

    assert engine.capabilities.tells_paused
    assert not hanging()
    with AsyncSGLang.connect(engine.server_url) as other:
        for mode in ("retract", "in_place", "abort"):
            run_sync(other.control.pause(mode))
            assert not hanging()
            run_sync(other.control.resume())
    params = {**SHORT, "ignore_eos": True}
    (answer,) = engine.generate(input_ids=[5, 6], sampling_params=params)
    assert len(answer.token_ids) == 4
