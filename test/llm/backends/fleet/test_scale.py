"""What an engine sends does not grow with its servers more than it has to."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.engines import fleet_of
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.client import model_info
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.client.model_info import ModelReader
from torchrl_sglang.backends.fleet.adapter_calls import MOST_ASKED
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.routing import MOST_COMPARED, Routing
from torchrl_sglang.errors import GenerationAbortedError
from torchrl_sglang.support.event_loop import run_sync, submit

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "fleet_scale.py"


@pytest.fixture
def servers(request, start_fakes):
    return start_fakes(request.param, enable_lora=True)


@pytest.fixture
def engine(servers):
    with AsyncSGLang.connect(urls=[server.url for server in servers]) as engine:
        yield engine


def count(servers, path: str) -> list[int]:
    return [sum(p == path for _, p, _ in server.requests) for server in servers]


@pytest.mark.parametrize("servers", [3], indirect=True)
def test_a_request_is_aborted_where_it_is(engine, servers):
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.misbehaving("hang"))
        call = pool.submit(engine.generate, input_ids=[5], request_ids=["mine"])
        wait_until(lambda: sum(count(servers, "/generate")) == 1)
        assert engine.abort(["mine"]) == 1
        assert isinstance(call.exception(20), GenerationAbortedError)
    there = count(servers, "/generate")
    aborts = count(servers, "/abort_request")
    assert [number > 0 for number in aborts] == [number > 0 for number in there]


@pytest.mark.parametrize("servers", [6], indirect=True)
def test_the_others_are_polled_once_for_all_that_come_back(engine, servers):
    away, others = servers[:3], servers[3:]
    for server in away:
        server.die()
    engine.look_at_servers()
    assert [r.state for r in engine.replicas] == [*["down"] * 3, *["serving"] * 3]
    before = count(others, "/model_info")
    for server in away:
        server.restart()
    wait_until(lambda: sum(r.state == "serving" for r in engine.replicas) == 6)
    # Not once for each. Those that answer later may need a second look, or a third.
    looks = [
        now - then
        for now, then in zip(count(others, "/model_info"), before, strict=True)
    ]
    assert max(looks) <= 3


@pytest.mark.parametrize("servers", [2], indirect=True)
def test_sessions_of_an_update_are_closed_side_by_side(engine, servers):
    """Servers that do not answer cost one timeout together."""
    control, urls = engine.control, [server.url for server in servers]
    run_sync(control.begin_weight_update())
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.misbehaving("hang", "/end_weight_update"))
        call = submit(control.end_weight_update_on_each(urls, timeout=30))
        for server in servers:
            server.wait_for("/end_weight_update")
        assert not call.done()
        for server in servers:
            server.die()
            server.recover()
        assert set(call.result(20)) == set(urls)


@pytest.mark.parametrize("servers", [MOST_ASKED + 2], indirect=True)
def test_a_few_servers_are_asked_for_new_adapters(engine, servers):
    adapters, fleet = engine._adapters._calls, fleet_of(engine)
    run_sync(adapters.discover_changes(fleet))
    before = Counter(dict(enumerate(count(servers, "/v1/models"))))
    assert min(before.values()) >= 2
    run_sync(adapters.discover_changes(fleet))
    asked = Counter(dict(enumerate(count(servers, "/v1/models")))) - before
    assert len(asked) == MOST_ASKED
    with AsyncSGLang.connect(urls=[server.url for server in servers]) as other:
        other.load_adapter("new", path="/nowhere")
    run_sync(adapters.discover_changes(fleet))
    assert "new" in engine.adapters


@pytest.mark.parametrize("servers", [3], indirect=True)
def test_a_message_counts_servers(engine, servers):
    assert "status='3 serving'" in repr(engine)


def test_a_model_is_read_once_for_servers_asked_together(tiny_model_path):
    reads = []

    async def work() -> None:
        reader = ModelReader()
        place = (None, tiny_model_path, "", False, None)
        first, *others = await asyncio.gather(*(reader.read(*place) for _ in range(9)))
        assert others == [first] * 8
        reads.append(len(reader._reading))
        assert model_info.read_model(*place) == first

    asyncio.run(work())
    assert reads == [1]


def test_a_choice_among_many_servers_is_even():
    count = 4 * MOST_COMPARED
    replicas = [Replica(url=f"http://s{n}", rank=n) for n in range(count)]
    replicas[7] = replace(replicas[7], state="down")
    routing = Routing()
    for session in range(3 * len(replicas)):
        routing.choose(replicas, f"s{session}", ())
    counts = Counter(routing.sessions.values())
    assert set(counts) == {*range(len(replicas))} - {7}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_many_servers_with_passwords():
    logins = {f"http://h{n}:80/base": f"Basic {n}" for n in range(3)}
    http = HttpClient(None, logins)
    assert http.login_of("http://h1:80/base/generate")["Authorization"] == "Basic 1"
    assert http.login_of("http://h1:80/other/generate") == {}
    assert http.login_of("http://h1:80/base") == {"Authorization": "Basic 1"}


@pytest.mark.slow
def test_the_benchmark_runs():
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--servers", "3", "--requests", "64"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "weight update" in done.stdout
