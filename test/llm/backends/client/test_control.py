from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from aiohttp import web
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.client.control import ControlPlane, _load
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerUnavailableError,
)
from torchrl_sglang.support.event_loop import run_sync


@dataclasses.dataclass
class Fixed:
    """Servers of which none joins or leaves."""

    urls: Sequence[str]
    membership_epoch: int = 0
    asleep: frozenset[str] = frozenset()
    paused: bool = False


@pytest.fixture
def two(tiny_model_path):
    http = HttpClient()
    with FakeServer(tiny_model_path) as one, FakeServer(tiny_model_path) as other:
        with AsyncSGLang.connect(one.url) as engine:
            urls = [one.url, other.url]
            yield ControlPlane(http, Fixed(urls), engine.capabilities), one, other
        run_sync(http.close())


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ({"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 2}]}, (3, 2)),
        ({"loads": [{"num_running_reqs": 1}, {"num_running_reqs": 2}]}, (3, 0)),
        ([{"num_reqs": 5, "num_waiting_reqs": 2}], (3, 2)),
        ([{"num_reqs": 0, "num_waiting_reqs": 1}], (0, 1)),
        ({"loads": []}, (0, 0)),
    ],
)
def test_running_requests_of_both_routes(answer, count):
    assert _load(answer) == count


def test_a_call_goes_to_every_server(two):
    control, one, other = two
    run_sync(control.pause("retract"))
    run_sync(control.resume())
    run_sync(control.begin_weight_update())
    run_sync(control.end_weight_update())
    for server in (one, other):
        assert server.payloads("/pause_generation") == [{"mode": "retract"}]
        assert len(server.payloads("/continue_generation")) == 1
        assert len(server.payloads("/begin_weight_update")) == 1
    assert run_sync(control.weight_versions()) == ["default", "default"]
    assert run_sync(control.running_requests()) == 0
    assert run_sync(control.healthy())
    assert run_sync(control.flush_cache())


@pytest.mark.parametrize("broken", [0, 1])
def test_a_refusal_hides_no_worse_failure(two, broken):
    """Whoever refuses has done nothing; what the other one has done is not known."""
    control, *servers = two
    # No session is open, so a call to end one is refused.
    with servers[broken].misbehaving("hang_up", "/end_weight_update"):
        with pytest.raises(ServerUnavailableError) as caught:
            run_sync(control.end_weight_update())
    assert not caught.value.partly
    with pytest.raises(RequestRefusedError) as refused:
        run_sync(control.end_weight_update())
    assert not refused.value.partly
    run_sync(control.begin_weight_update())
    requests.post(f"{servers[broken].url}/end_weight_update", json={}, timeout=10)
    with pytest.raises(RequestRefusedError) as refused:
        run_sync(control.end_weight_update())
    assert refused.value.partly


def test_one_server_that_fails_is_enough(two):
    control, _, other = two
    with other.misbehaving("error_500", "/pause_generation"):
        with pytest.raises(ServerUnavailableError, match=other.url):
            run_sync(control.pause("abort"))
    with other.misbehaving("hang_up", "/health"):
        assert not run_sync(control.healthy())


def test_older_servers_have_no_sessions(two):
    control, one, other = two
    older = dataclasses.replace(control.capabilities, needs_update_session=False)
    control = ControlPlane(HttpClient(), Fixed(control.urls), older)
    run_sync(control.begin_weight_update())
    run_sync(control.end_weight_update())
    for server in (one, other):
        assert server.payloads("/begin_weight_update") == []


def test_success_false_with_status_200_is_a_failure(two):
    control, one, _ = two
    body = b'{"success": false, "message": "not now"}'
    one.routes["/continue_generation"] = lambda _: web.Response(body=body)
    with pytest.raises(RequestRefusedError, match=f"{one.url}.*not now"):
        run_sync(control.resume())
    one.routes["/flush_cache"] = lambda _: web.Response(body=b"busy", status=400)
    assert not run_sync(control.flush_cache())


def test_ranks_follow_the_order_of_the_servers(two):
    control, one, other = two
    call = control.init_weights_update_group(
        master_address="127.0.0.1",
        master_port=1,
        world_size=3,
        group_name="g",
        backend="gloo",
        timeout=10,
    )
    with pytest.raises(RequestRefusedError, match="joins no group"):
        run_sync(call)
    for server in (one, other):
        server.wait_for("/init_weights_update_group")
    sent = [server.payloads("/init_weights_update_group") for server in (one, other)]
    assert [payload["rank_offset"] for (payload,) in sent] == [1, 2]
    assert all(payload["world_size"] == 3 for (payload,) in sent)


def test_the_verbs_of_a_real_server(engine, tokenizer):
    control = engine.control
    assert run_sync(control.healthy())
    assert run_sync(control.weight_versions()) == [engine.weight_version]
    assert run_sync(control.running_requests()) == 0
    with pytest.raises(RequestRefusedError, match="'in_place'"):
        run_sync(control.pause("stop"))
    run_sync(control.begin_weight_update())
    with pytest.raises(RequestRefusedError, match="already open"):
        run_sync(control.begin_weight_update())
    run_sync(control.end_weight_update())
    with pytest.raises(RequestRefusedError, match="no weight-update session is open"):
        run_sync(control.end_weight_update())
    ids = tokenizer.encode("generation goes on")
    (answer,) = engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
    assert answer.token_ids


def test_pausing_a_real_server_with_abort_cuts_responses_off(engine):
    with ThreadPoolExecutor() as pool:
        call = pool.submit(
            engine.generate,
            input_ids=[[5, 6], [7]],
            sampling_params={"max_new_tokens": 1500, "ignore_eos": True},
            return_exceptions=True,
        )
        while run_sync(engine.control.running_requests()) < 2 and not call.done():
            pass
        try:
            run_sync(engine.control.pause("abort"))
        finally:
            run_sync(engine.control.resume())
        outcomes = call.result(60)
    assert [type(outcome) for outcome in outcomes] == [GenerationAbortedError] * 2
    assert [outcome.index for outcome in outcomes] == [0, 1]


def test_a_server_may_take_a_moment_to_be_idle(two):
    """It answers a request before it has ended it."""
    control, one, _ = two
    answers = iter([400, 400, 200])
    one.routes["/flush_cache"] = lambda _: web.Response(status=next(answers))
    assert run_sync(control.flush_when_idle())
    one.routes["/flush_cache"] = lambda _: web.Response(status=400)
    assert not run_sync(control.flush_when_idle(grace=0.1))
