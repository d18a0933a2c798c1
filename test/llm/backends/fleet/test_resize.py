"""Servers that join and leave an engine that runs, and what happens to requests."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from random import Random
from urllib.request import Request, urlopen

import pytest
import torch
from aiohttp import web
from helpers.fake_launcher import FakeHandle, FakeLauncher, make_engine
from helpers.fake_server import FakeServer
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.reconcile import (
    Answered,
    Changed,
    Suspected,
    UpdateBegan,
    UpdateEnded,
    reconcile,
)
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.resize_events import (
    Joined,
    LeaveBegan,
    LeaveGivenUp,
    Left,
)
from torchrl_sglang.backends.fleet.step import Event
from torchrl_sglang.backends.fleet.weights_state import ServedWeights
from torchrl_sglang.backends.launch.local import replica_specs
from torchrl_sglang.backends.launch.local_directory import LocalDirectory
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerStartError,
    ServerUnavailableError,
    SGLangError,
    UnsupportedByServerError,
    WeightMismatchError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.types import Completion

SECONDS = 60.0
LONG = {"max_new_tokens": 40}


def states(engine: AsyncSGLang) -> dict[str, str]:
    return {server.url: server.state for server in engine.stats().servers}


def generate(engine: AsyncSGLang, count: int = 12) -> list[str | None]:
    """Returns the version of each response."""
    prompts = [[5 + index, 7] for index in range(count)]
    answers = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 4})
    assert [answer.token_ids for answer in answers] == [p * 2 for p in prompts]
    return [answer.weight_version for answer in answers]


def update(engine: AsyncSGLang, launcher: FakeLauncher, version: str) -> None:
    """Gives the servers that an update fixes a version."""
    with engine.weight_update() as update:
        for handle in launcher.handles:
            if handle.url in engine.control.urls:
                handle.server.weight_version = version
        update.commit(version)


def sent(handle: FakeHandle) -> int:
    return len(handle.server.payloads())


def test_servers_join_and_leave(engine, launcher):
    """At the checkpoint's weights they serve at once; ranks are not used again."""
    epoch = engine.control.membership_epoch
    added = engine.add_servers(2)
    first, second, third, fourth = launcher.handles
    assert added == (third.url, fourth.url)
    assert engine.num_replicas == 4
    assert engine.get_world_size() == 4
    assert engine.control.membership_epoch > epoch
    assert set(states(engine).values()) == {"serving"}
    generate(engine, 12)
    assert [sent(each) for each in launcher.handles] == [3] * 4
    epoch = engine.control.membership_epoch
    assert engine.remove_servers(first.url) == (first.url,)
    assert first.state == "stopped"
    assert launcher.removed == [0]
    assert engine.control.membership_epoch > epoch
    assert engine.server_url == second.url
    assert [server.url for server in engine.servers] == [
        each.url for each in launcher.handles[1:]
    ]
    generate(engine, 12)
    assert [sent(each) for each in launcher.handles] == [3, 7, 7, 7]
    # The newest goes first where a number is given.
    assert engine.remove_servers(1) == (fourth.url,)
    (fifth,) = engine.add_servers()
    assert [each.rank for each in engine.replicas] == [1, 2, 4]
    assert [each.url for each in engine.replicas][-1] == fifth


def test_sessions_stay_where_they_are(engine, launcher):
    """The server that a session's prefix is on keeps it when others come and go."""
    engine.add_servers(1)

    def ask() -> list[int]:
        before = [sent(each) for each in launcher.handles]
        engine.generate(
            input_ids=[[5]], session_ids="one", sampling_params={"max_new_tokens": 2}
        )
        now = [sent(each) for each in launcher.handles]
        return [b - a for a, b in zip(before, now, strict=True)]

    home = ask().index(1)
    other = launcher.handles[(home + 1) % 3]
    engine.remove_servers(other.url)
    engine.add_servers(1)
    assert ask().index(1) == home
    engine.remove_servers(launcher.handles[home].url)
    assert ask().index(1) != home


def test_a_new_server_waits_for_the_current_weights(engine, launcher):
    """No token is made by weights that are not the version of its answer."""
    update(engine, launcher, "1")
    (url,) = engine.add_servers(1)
    new = launcher.handles[-1]
    assert states(engine)[url] == "stale"
    assert "version 'default'" in engine.stats().servers[-1].reason
    assert set(generate(engine)) == {"1"}
    assert sent(new) == 0
    update(engine, launcher, "2")
    assert states(engine)[url] == "serving"
    assert set(generate(engine)) == {"2"}
    assert sent(new) == 4


def test_a_server_joins_in_the_middle_of_an_update(engine, launcher):
    """The update goes to the servers that it began with; the next forms a new group."""
    with engine.weight_update() as running:
        first = engine.control.urls
        epoch = engine.control.membership_epoch
        (url,) = engine.add_servers(1)
        assert engine.control.urls == first
        # What an update connects to must be what its epoch says.
        assert engine.control.membership_epoch == epoch
        for handle in launcher.handles[:2]:
            handle.server.weight_version = "1"
        running.commit("1")
    assert engine.control.membership_epoch > epoch
    assert states(engine)[url] == "stale"
    assert set(generate(engine)) == {"1"}
    update(engine, launcher, "2")
    assert states(engine)[url] == "serving"


def post(url: str, content: dict[str, str]) -> None:
    body = json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    urlopen(Request(url, body, headers), timeout=SECONDS).close()


@contextmanager
def held(
    server: FakeServer, engine: AsyncSGLang, pool: ThreadPoolExecutor
) -> Iterator[Future[list[Completion]]]:
    """Begins a response of each server; that of this one takes as long as the block."""
    before = len(server.payloads())
    server.silent_while_paused = True
    post(f"{server.url}/pause_generation", {"mode": "in_place"})
    call = pool.submit(
        engine.generate, input_ids=[[5, 7]] * 2, sampling_params=LONG, timeout=SECONDS
    )
    server.wait_for("/generate", before + 1)
    yield call
    if not server.vanished:
        post(f"{server.url}/continue_generation", {})


def test_a_server_that_leaves_finishes_its_requests(engine, launcher):
    first, _ = launcher.handles
    with ThreadPoolExecutor(2) as pool:
        with held(first.server, engine, pool) as call:
            removal = pool.submit(engine.remove_servers, first.url)
            wait_until(lambda: states(engine)[first.url] == "leaving")
            before = sent(first)
            assert set(generate(engine)) == {"default"}
            assert sent(first) == before
            with pytest.raises(ConfigurationError, match="being removed already"):
                engine.remove_servers(first.url)
            assert not removal.done()
            assert first.state == "ready"
        assert removal.result(SECONDS) == (first.url,)
        answers = call.result(SECONDS)
    assert [answer.token_ids for answer in answers] == [[5, 7] * 20] * 2
    assert first.state == "stopped"


def test_requests_that_do_not_finish_go_on_elsewhere(engine, launcher):
    """From its last tokens, which nobody generates twice."""
    first, second = launcher.handles
    first.server.tokens_until_abort = 3
    with ThreadPoolExecutor(2) as pool:
        with held(first.server, engine, pool) as call:
            engine.remove_servers(first.url, drain_timeout=0)
        answers = call.result(SECONDS)
    # A fake answers with its prompt, which ends with the first three tokens then.
    gone_on = [5, 7, 5, *([5, 7, 5, 7, 5] * 8)[:37]]
    assert sorted(answer.token_ids for answer in answers) == [gone_on, [5, 7] * 20]
    rest = [len(p["input_ids"][0]) for p in second.server.payloads()]
    assert sorted(rest) == [2, 5]
    assert states(engine) == {second.url: "serving"}


def test_a_removal_waits_for_the_update_that_the_server_takes_part_in(engine, launcher):
    first, second = launcher.handles
    with ThreadPoolExecutor(1) as pool:
        with engine.weight_update() as running:
            removal = pool.submit(engine.remove_servers, first.url)
            wait_until(lambda: engine.replicas[0].state == "leaving")
            assert engine.control.urls == (first.url, second.url)
            for handle in launcher.handles:
                handle.server.weight_version = "1"
            running.commit("1")
            assert not removal.done()
            assert first.state == "ready"
        assert removal.result(SECONDS) == (first.url,)
    assert states(engine) == {second.url: "serving"}
    assert set(generate(engine)) == {"1"}


def test_a_server_ends_while_it_leaves(engine, launcher):
    """It is not started again, and its requests go to the others."""
    first, second = launcher.handles
    with ThreadPoolExecutor(2) as pool:
        with held(first.server, engine, pool) as call:
            removal = pool.submit(engine.remove_servers, first.url)
            wait_until(lambda: engine.replicas[0].state == "leaving")
            first.vanish()
            assert removal.result(SECONDS) == (first.url,)
        assert len(call.result(SECONDS)) == 2
    assert len(launcher.handles) == 2
    assert states(engine) == {second.url: "serving"}


def test_a_server_that_has_ended_is_removed_at_once(engine, launcher):
    first, second = launcher.handles
    first.vanish()
    wait_until(lambda: engine.replicas[0].state != "serving")
    engine.remove_servers(first.url)
    assert states(engine) == {second.url: "serving"}
    # Nor does one remain that was started again meanwhile.
    assert all(each.state == "stopped" for each in launcher.handles[2:])


def test_a_start_that_fails_adds_none(engine, launcher):
    """The servers that have started with it are stopped."""
    make = launcher.make

    def fail() -> FakeServer:
        if len(launcher.handles) == 3:
            raise ServerStartError("It ended at once.")
        return make()

    launcher.make = fail
    with pytest.raises(ServerStartError, match="ended at once"):
        engine.add_servers(2)
    assert [each.state for each in launcher.handles] == ["ready", "ready", "stopped"]
    assert sorted(launcher.removed) == [2, 3]
    assert engine.num_replicas == 2
    launcher.make = make
    engine.add_servers(1)
    assert engine.num_replicas == 3


def test_the_engine_ends_while_a_server_is_added(engine, launcher):
    begun, closed = threading.Event(), threading.Event()

    def at_start(server: FakeServer) -> None:
        begun.set()
        closed.wait(SECONDS)

    launcher.at_start = at_start
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.add_servers, 1)
        assert begun.wait(SECONDS)
        engine.shutdown()
        closed.set()
        with pytest.raises(ServerUnavailableError, match="was shut down"):
            call.result(SECONDS)
    assert [each.state for each in launcher.handles] == ["stopped"] * 3
    with pytest.raises(ServerUnavailableError, match="was shut down"):
        engine.add_servers(1)


def test_servers_that_joined_stay_where_the_call_is_interrupted(
    engine, launcher, monkeypatch
):
    class Interrupted(BaseException):
        pass

    async def interrupt() -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(engine._resize, "_poll", interrupt)
        with pytest.raises(Interrupted):
            engine.add_servers(1)
    assert [each.state for each in launcher.handles] == ["ready"] * 3
    assert launcher.removed == []
    engine.look_at_servers()
    assert set(states(engine).values()) == {"serving"}


@pytest.mark.usefixtures("interruptible")
def test_a_removal_that_is_interrupted_is_done(engine, launcher):
    """The place of a server is free again when it has ended."""
    handle = launcher.handles[1]
    begun, stop = threading.Event(), handle.stop

    def stop_slowly() -> None:
        begun.set()
        time.sleep(0.5)
        stop()

    def interrupt() -> None:
        begun.wait(SECONDS)
        os.kill(os.getpid(), signal.SIGINT)

    handle.stop = stop_slowly
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.remove_servers(handle.url, drain_timeout=0)
    thread.join()
    wait_until(lambda: launcher.removed == [1])
    assert handle.state == "stopped"


def test_two_add_at_once(engine, launcher):
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(engine.add_servers, 2) for _ in range(2)]
        urls = [url for call in calls for url in call.result(SECONDS)]
    assert len(set(urls)) == 4
    assert len({each.rank for each in engine.replicas}) == 6
    assert set(states(engine)) == {each.url for each in launcher.handles}


def test_a_copy_follows(engine, launcher):
    """It uses new servers, and leaves those alone that leave."""
    copy = pickle.loads(pickle.dumps(engine))

    def follows() -> bool:
        copy.look_at_servers()
        return states(copy) == states(engine)

    (url,) = engine.add_servers(1)
    wait_until(follows)
    first, second, third = launcher.handles
    with ThreadPoolExecutor(2) as pool:
        with held(first.server, engine, pool) as call:
            removal = pool.submit(engine.remove_servers, first.url)
            wait_until(lambda: states(engine)[first.url] == "leaving")
            wait_until(follows)
            before = sent(first)
            generate(copy)
            assert sent(first) == before
        removal.result(SECONDS)
        call.result(SECONDS)
    wait_until(follows)
    assert set(states(copy)) == {second.url, third.url}
    assert {each.rank for each in copy.replicas} == {1, 2}
    again = pickle.loads(pickle.dumps(copy))
    assert {each.rank for each in again.replicas} == {1, 2}
    generate(again)
    for each in (copy.add_servers, copy.remove_servers):
        with pytest.raises(ConfigurationError, match="a copy of one in another"):
            each(url)


def test_a_directory_on_this_machine():
    """Its file is there from the first change on, and goes with the engine."""
    directory = LocalDirectory()
    copy = pickle.loads(pickle.dumps(directory))
    directory.publish(["http://a", "http://b"])
    directory.publish(["", "http://b"])
    assert run_sync(copy.urls()) == ()
    for urls in (["http://a", "http://b", "http://c"], ["removed", "http://b", ""]):
        directory.publish(urls)
        assert run_sync(copy.urls()) == tuple(urls)
    assert oct(directory._path.stat().st_mode)[-3:] == "600"
    directory.end()
    assert run_sync(copy.urls()) == ()


@pytest.fixture
def connected(tiny_model_path: str) -> Iterator[tuple[AsyncSGLang, FakeServer]]:
    with FakeServer(tiny_model_path) as server, AsyncSGLang.connect(server.url) as it:
        yield it, server


def test_servers_that_run_elsewhere(connected, tiny_model_path):
    engine, server = connected
    with FakeServer(tiny_model_path) as other:
        assert engine.add_servers(f"{other.url}/") == (other.url,)
        assert states(engine) == {server.url: "serving", other.url: "serving"}
        generate(engine)
        assert len(other.payloads()) == 6
        with pytest.raises(ConfigurationError, match="already"):
            engine.add_servers([other.url])
        # It is not this engine's, and goes on.
        engine.remove_servers(server.url)
        generate(engine)
        assert len(other.payloads()) == 18
        assert engine.health()


def test_a_version_of_another_trainer_is_not_this_ones(connected, tiny_model_path):
    """Equal numbers mean nothing before an update has been to both."""
    engine, server = connected
    server.weight_version = "7"
    engine.look_at_servers()
    assert set(generate(engine)) == {"7"}
    with FakeServer(tiny_model_path) as other:
        other.weight_version = "7"
        engine.add_servers(other.url)
        assert states(engine)[other.url] == "stale"
        assert "this engine has not sent there" in engine.stats().servers[1].reason
        for each in (server, other):
            each.weight_version = "8"
        engine.look_at_servers()
        wait_until(lambda: states(engine)[other.url] == "serving")
        assert set(generate(engine)) == {"8"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"without": "/begin_weight_update"}, "differ in needs_update_session"),
        ({"server_args": {"tp_size": 2}}, "differ in tp_size"),
        ({"context": 64}, "differ in"),
    ],
)
def test_a_server_that_is_not_like_the_others(
    connected, tiny_model_path, change, words
):
    engine, _ = connected
    route = change.pop("without", None)
    with FakeServer(tiny_model_path, **change) as other:
        other.routes.pop(route, None)
        with pytest.raises(SGLangError, match=words):
            engine.add_servers(other.url)
    assert engine.num_replicas == 1


@pytest.mark.parametrize(
    ("servers", "error", "words"),
    [
        ("http://127.0.0.1:9", ServerUnavailableError, "127.0.0.1:9"),
        (["http://a", "a"], ConfigurationError, "twice"),
        ("http://me:secret@a", ConfigurationError, "http://a without user"),
        (0, ConfigurationError, "servers must be"),
        (True, ConfigurationError, "neither a number"),
        ([], ConfigurationError, "neither a number"),
        ([3], ConfigurationError, "not an address"),
        (1, ConfigurationError, "it has started none"),
    ],
)
def test_servers_that_cannot_be_added_are_refused(connected, servers, error, words):
    engine, _ = connected
    with pytest.raises(error, match=words) as raised:
        engine.add_servers(servers)
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigurationError):
        engine.add_servers(engine)
    assert engine.num_replicas == 1


def test_servers_that_cannot_be_removed_are_refused(engine, launcher):
    first, second = launcher.handles
    for servers, words in [
        ("http://127.0.0.1:9", "no server of this engine"),
        (2, "no server left"),
        (3, r"has 2 server"),
        ([first.url, second.url], "no server left"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            engine.remove_servers(servers)
    update(engine, launcher, "1")
    engine.add_servers(1)
    with pytest.raises(
        ConfigurationError, match=r"no server of the engine serves.*stale"
    ):
        engine.remove_servers([first.url, second.url])
    with pytest.raises(ConfigurationError, match="drain_timeout"):
        engine.remove_servers(1, drain_timeout=-1)
    assert set(generate(engine)) == {"1"}


def test_an_engine_that_sleeps_takes_no_server(tiny_model_path):
    launcher = FakeLauncher(tiny_model_path, enable_memory_saver=True)
    with make_engine(launcher) as engine:
        engine.sleep()
        with pytest.raises(WeightSyncStateError, match="asleep"):
            engine.add_servers(1)
        assert len(launcher.handles) == 2
        engine.remove_servers(launcher.handles[0].url)
        engine.wake_up()
    launcher.close()


def test_a_launcher_that_cannot_start_more(tiny_model_path, monkeypatch):
    class Fixed(FakeLauncher):
        add = FakeLauncher.__mro__[1].add

    launcher = Fixed(tiny_model_path)
    with make_engine(launcher) as engine:
        with pytest.raises(UnsupportedByServerError, match="Fixed cannot add servers"):
            engine.add_servers(1)
        assert engine.num_replicas == 2
    launcher.close()


def test_arguments_of_servers_that_are_added():
    """Seeds and ports count on, and GPUs are those that are free."""
    spec = {"model": "m", "device": "cuda", "random_seed": 5, "tp_size": 2}
    options = {"first": 3, "running": 2}
    specs = replica_specs(2, spec, **options, available="2345")
    assert [each["random_seed"] for each in specs] == [8, 9]
    assert [each["cuda_devices"] for each in specs] == [("2", "3"), ("4", "5")]
    with pytest.raises(ConfigurationError, match="need 4 GPUs, and 3 are"):
        replica_specs(2, spec, **options, available="234")
    with pytest.raises(ConfigurationError, match="base_gpu_id"):
        replica_specs(1, {**spec, "base_gpu_id": 1}, **options, available="23")
    with pytest.raises(ConfigurationError, match="device='cuda'"):
        replica_specs(1, {**spec, "device": "cpu"}, **options, cuda_devices=[0])


def test_random_histories():
    """What holds whatever happens in which order, without any server."""
    for seed in range(200):
        history(Random(seed))


def history(random: Random) -> None:  # noqa: C901 - One branch for each event.
    urls = [f"http://{index}" for index in range(3)]
    state = Fleet([Replica(url=url, version="default") for url in urls]).state
    groups: dict[int, tuple[str, ...]] = {}
    ranks, version, count = {0, 1, 2}, 0, 3

    def apply(event: Event) -> None:
        nonlocal state
        before = state
        with suppress(ConfigurationError):
            state, _ = reconcile(state, event, 0.0)
        assert len(state.replicas) >= 1
        assert [r.rank for r in state.replicas] == sorted(
            {r.rank for r in state.replicas}
        )
        new = {r.rank for r in state.replicas} - {r.rank for r in before.replicas}
        assert ranks.isdisjoint(new)
        ranks.update(new)
        if before.updating is not None and state.updating is not None:
            # An update talks to the servers that it began with, and they are there.
            assert state.urls == before.urls
            assert {*state.urls} <= {r.url for r in state.replicas}
            assert state.weights.membership_epoch == before.weights.membership_epoch
        if state.updating is None:
            current = state.weights.version
            served = (r for r in state.replicas if r.state == "serving")
            assert all(r.version == current for r in served)

    for _ in range(60):
        some = random.choice(state.replicas)
        what = random.randrange(8)
        if what == 0:
            apply(Joined(replicas=(Replica(url=f"http://{count}"),)))
            count += 1
        elif what == 1:
            apply(LeaveBegan(urls=(some.url,)))
        elif what == 2:
            leaving = {r.rank for r in state.replicas if r.state == "leaving"}
            apply(Left(ranks=frozenset(leaving)))
        elif what == 3:
            apply(LeaveGivenUp(ranks=frozenset({some.rank})))
        elif what == 4 and state.updating is None:
            apply(UpdateBegan())
            # A process group is used again while the epoch is the same.
            epoch = state.weights.membership_epoch
            assert groups.setdefault(epoch, state.urls) == state.urls
        elif what == 5 and state.updating is not None:
            version += 1
            done = ServedWeights.reported(str(version))
            weights = replace(done, membership_epoch=state.weights.membership_epoch)
            apply(Changed(change=lambda now, new=weights: replace(now, weights=new)))
            apply(UpdateEnded(version=str(version)))
        elif what == 6:
            held = random.choice([some.version or "default", "default"])
            apply(Answered(asked=some, version=held, confirmed=True))
        elif what == 7 and some.state != "leaving":
            apply(Suspected(url=some.url))


@pytest.fixture
def filling(launcher, tmp_path, tokenizer):
    """An engine whose weights were updated, and its sender."""
    with make_engine(launcher) as engine:
        for handle in launcher.handles:
            tell(handle.server, [[0.5, 0.25]])
        model = make_tiny_model(tokenizer)
        scheme = SGLangWeightSyncScheme(
            engine, model, transport="disk", directory=str(tmp_path)
        )
        sender = scheme.create_sender()
        sender.update_weights()
        yield engine, sender, model
        sender.shutdown()


def tell(server: FakeServer, rows: list[list[float]]) -> None:
    server.routes["/get_weights_by_name"] = lambda content: web.json_response(rows)


def calls(handle: FakeHandle) -> list[str]:
    return [path for method, path, _ in handle.server.requests if method == "POST"]


def test_new_servers_are_filled_alone(filling, launcher, tmp_path):
    """Nobody else is paused, flushed or sent anything."""
    engine, sender, _ = filling
    version = engine.weight_version
    launcher.at_start = lambda server: tell(server, [[0.5, 0.25]])
    (url,) = engine.add_servers(1)
    assert states(engine)[url] == "stale"
    before = [calls(each) for each in launcher.handles[:2]]
    report = sender.update_new_servers()
    assert report is not None
    assert report.num_tensors > 0
    assert report.version == version
    assert sender.stats().updates == {"disk": 2}
    assert [path.name for path in tmp_path.iterdir()] == [f"v{version}"]
    assert states(engine)[url] == "serving"
    assert engine.weight_version == version
    assert set(generate(engine)) == {version}
    for handle, earlier in zip(launcher.handles, before, strict=False):
        new = set(calls(handle)[len(earlier) :])
        assert new <= {"/get_weights_by_name", "/generate"}
    assert sender.update_new_servers() is None


@pytest.mark.parametrize(
    ("rows", "fault", "error"),
    [
        ([[0.5, 0.125]], None, WeightMismatchError),
        ([[0.5, 0.25]], "hang_up", WeightTransferError),
        ([[0.5, 0.25]], "error_500", WeightTransferError),
    ],
)
def test_a_new_server_with_other_weights_gets_no_requests(
    filling, launcher, rows, fault, error, tmp_path
):
    engine, sender, _ = filling
    version = engine.weight_version
    launcher.at_start = lambda server: tell(server, rows)
    (url,) = engine.add_servers(1)
    new = launcher.handles[-1].server
    with ExitStack() as stack:
        if fault is not None:
            path = "/update_weights_from_disk"
            stack.enter_context(new.misbehaving(fault, path))
        with pytest.raises(error):
            sender.update_new_servers()
    assert [path.name for path in tmp_path.iterdir()] == [f"v{version}"]
    assert not new.paused
    engine.look_at_servers()
    assert states(engine)[url] == "stale"
    assert set(generate(engine)) == {version}
    assert sent(launcher.handles[-1]) == 0
    sender.update_weights()
    assert set(states(engine).values()) == {"serving"}
    assert set(generate(engine)) == {engine.weight_version}


def test_a_model_that_was_trained_since_fills_nothing(filling, launcher):
    engine, sender, model = filling
    engine.add_servers(1)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(WeightSyncStateError, match="trained since"):
        sender.update_new_servers()
    assert "/update_weights_from_disk" not in calls(launcher.handles[-1])
    other = SGLangWeightSyncScheme(engine, model).create_sender()
    with pytest.raises(WeightSyncStateError, match="not from this sender"):
        other.update_new_servers()


def test_a_new_server_that_computes_something_else(filling, launcher):
    """Also where servers tell no values."""
    engine, sender, _ = filling
    for handle in launcher.handles:
        handle.server.routes.pop("/get_weights_by_name")
    added = engine.add_servers(2)
    odd = launcher.handles[-1].server
    reply = odd.reply

    def other(item):
        found = reply(item)
        for entry in found["meta_info"].get("input_token_logprobs", [])[1:]:
            entry[0] -= 1.0
        return found

    odd.reply = other
    with pytest.raises(WeightMismatchError, match=r"differ by 1 on average"):
        sender.update_new_servers()
    assert {states(engine)[url] for url in added} == {"stale"}
    odd.reply = reply
    assert sender.update_new_servers() is not None
    assert {states(engine)[url] for url in added} == {"serving"}
