"""What copies of an engine in other processes know of its servers."""

from __future__ import annotations

import json
import pickle
from contextlib import ExitStack
from functools import partial

import pytest
from aiohttp import web
from helpers.engines import fleet_of
from helpers.fake_launcher import FakeDirectory, FakeLauncher, make_engine
from helpers.fake_server import FakeServer
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.backends.fleet.weights_state import ServedWeights
from torchrl_sglang.errors import WeightSyncStateError, WeightTransferError

ASKED = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 2},
    "timeout": 10,
}


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def launched(stack, tiny_model_path):
    def start(count: int = 1):
        directory = FakeDirectory()
        launcher = FakeLauncher(tiny_model_path, count, directory=directory)
        stack.callback(launcher.close)
        return launcher, stack.enter_context(make_engine(launcher))

    return start


@pytest.fixture
def copied(stack):
    return lambda engine: stack.enter_context(pickle.loads(pickle.dumps(engine)))


@pytest.fixture
def send(stack, hf_model):
    def send(engine, **options):
        scheme = SGLangWeightSyncScheme(
            engine, hf_model, transport="cuda_ipc", **options
        )
        stack.callback(scheme.shutdown)
        return scheme.create_sender().update_weights

    return send


def test_a_foreign_server_is_used_when_it_has_been_updated(
    launched, copied, send, stack, tiny_model_path
):
    """Its version is the number of another trainer, and means other weights."""
    _, engine = launched()
    copy, update = copied(engine), send(engine)
    update()
    foreign = stack.enter_context(FakeServer(tiny_model_path))
    foreign.weight_version = "1"
    engine.add_servers(foreign.url)
    copy.look_at_servers()
    for _ in range(4):
        copy.generate(**ASKED)
    assert foreign.payloads() == []
    assert foreign.url not in [each.url for each in copy.stats().servers]
    update()
    wait_until(lambda: foreign.url in [each.url for each in copy.stats().servers])
    wait_until(lambda: copy.generate(**ASKED) and foreign.payloads() != [])


@pytest.mark.parametrize("reason", ["before the first update", "of one that failed"])
def test_weights_that_are_mended_after_the_copy(launched, copied, send, reason):
    launcher, engine = launched()
    update = send(engine)
    if reason == "of one that failed":
        with (
            launcher.handles[0].server.misbehaving(
                "error_500", "/update_weights_from_tensor"
            ),
            pytest.raises(WeightTransferError),
        ):
            update()
    else:
        # As of servers that start with dummy weights.
        mark = partial(ServedWeights.mark_inconsistent, reason="There are none.")
        fleet_of(engine).change_weights(mark)
    copy = copied(engine)
    for _ in range(2):
        with pytest.raises(WeightSyncStateError, match="inconsistent"):
            copy.generate(**ASKED)
    version = update().version
    assert copy.generate(**ASKED)[0].weight_version == version


def test_a_server_that_leaves_during_a_copy_s_update(launched, copied):
    """Process groups of the servers before are of no use any more."""
    launcher, engine = launched(2)
    copy = copied(engine)
    copy.look_at_servers()
    before = copy.control.membership_epoch
    with copy.weight_update() as update:
        engine.remove_servers(launcher.handles[1].url, drain_timeout=0)
        copy.look_at_servers()
        update.commit("1")
    assert copy.get_world_size() == 1
    assert copy.control.membership_epoch > before


def test_chats_of_a_copy_have_the_key_of_the_weights(
    stack, copied, send, tiny_model_path
):
    server = stack.enter_context(FakeServer(tiny_model_path))
    engine = stack.enter_context(AsyncSGLang.connect(server.url))
    keys: list[str] = []

    def chat(content):
        keys.append(content["extra_key"])
        body = {
            "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
            "metadata": {"weight_version": server.weight_version},
        }
        return web.Response(body=json.dumps(body), content_type="application/json")

    server.routes["/v1/chat/completions"] = chat
    copy = copied(engine)
    update = send(engine, pause_mode="abort", flush_cache=False)
    update()
    for _ in range(2):
        copy.chat_completion({"messages": [{"role": "user", "content": "Hi"}]})
    assert keys == ["default", "1"]
