"""Sleep and wake-up, on a real server whose memory saver stands in for the GPU's.

There is none for a CPU. The stand-in is as strict as the real one: what pauses or
resumes a kind of memory twice ends. Memory is not given back, but every weight is lost.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.engines import Process, fleet_of
from helpers.fake_server import FakeServer
from helpers.memory_saver import write_saver_python
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.backends.client.capabilities import sleep_obstacles
from torchrl_sglang.backends.fleet.actions import Stop
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.reconcile import (
    Answered,
    Ended,
    FellAsleep,
    Started,
    WokeUp,
)
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.sleep import check_can_sleep
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    UnsupportedByServerError,
    WeightSyncStateError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.types import ServerArgs

TOLERANCE = 1e-4
PROMPT = [5, 6, 7, 8, 9]
SHORT = {"max_new_tokens": 8, "ignore_eos": True}
LONG = {"max_new_tokens": 1500, "ignore_eos": True}
BOTH = frozenset({"weights", "kv_cache"})


@pytest.fixture(scope="module")
def saver_python(tmp_path_factory) -> Path:
    return write_saver_python(tmp_path_factory.mktemp("saver"))


def start(tiny_model_path, python, **arguments) -> AsyncSGLang:
    return AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        python=python,
        enable_memory_saver=True,
        **arguments,
    )


@pytest.fixture(scope="module")
def module_engine(tiny_model_path, saver_python):
    with start(tiny_model_path, saver_python) as engine:
        yield engine


@pytest.fixture
def sender(module_engine):
    sender = SGLangWeightSyncScheme(module_engine).create_sender()
    yield sender
    sender.shutdown()


@pytest.fixture
def sleepy(module_engine, sender, hf_model):
    """An engine that can sleep; it is awake and has the model's weights."""
    original = copy.deepcopy(hf_model)
    yield module_engine
    module_engine.wake_up()
    sender.update_weights(original)


@pytest.fixture
def other_user(module_engine):
    with AsyncSGLang.connect(module_engine.server_url) as engine:
        yield engine


def changed(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1.0 + 0.1 * (index % 3))
    return model


def error_of(answer, score) -> float:
    """Greatest difference of a response's log-probs from the model's."""
    reference = score([*PROMPT, *answer.token_ids])[len(PROMPT) :]
    return float((torch.tensor(answer.log_probs) - reference).abs().max())


def ask(engine, params=SHORT, **kwargs):
    (answer,) = engine.generate(
        input_ids=PROMPT, sampling_params=params, return_logprobs=True, **kwargs
    )
    return answer


def running(engine) -> int:
    return run_sync(engine.control.running_requests())


@pytest.mark.slow
def test_a_step_of_a_trainer_on_the_same_gpu(sleepy, sender, hf_model, score):
    assert error_of(ask(sleepy), score) < TOLERANCE
    sleepy.sleep()
    assert sleepy.asleep == BOTH
    assert "status='asleep: weights, kv_cache'" in repr(sleepy)
    assert sleepy.stats().servers[0].state == "asleep: weights, kv_cache"
    assert sleepy.health()
    for refused in (
        lambda: ask(sleepy),
        lambda: next(sleepy.generate_iter(input_ids=PROMPT)),
        lambda: sleepy.completion({"prompt": "Hi"}),
    ):
        with pytest.raises(WeightSyncStateError, match=r"weights, kv_cache.*wake_up"):
            refused()
    sleepy.wake_up("weights")
    with pytest.raises(WeightSyncStateError, match=r"\(kv_cache\).*wake_up"):
        ask(sleepy)
    # ``score`` sees the change, too: it is the same model.
    sender.update_weights(changed(hf_model))
    assert sleepy.asleep == {"kv_cache"}
    with pytest.raises(WeightSyncStateError, match=r"\(kv_cache\).*wake_up"):
        ask(sleepy)
    sleepy.wake_up("kv_cache")
    assert error_of(ask(sleepy), score) < TOLERANCE
    assert "status='serving'" in repr(sleepy)


def test_lost_weights_are_never_generated_with(sleepy, sender, hf_model, score):
    sleepy.sleep()
    sleepy.wake_up()
    assert not sleepy.asleep
    with pytest.raises(WeightSyncStateError, match="holds? nothing.*send the weights"):
        ask(sleepy)
    assert "status='weights inconsistent'" in repr(sleepy)
    sender.update_weights(changed(hf_model))
    assert error_of(ask(sleepy), score) < TOLERANCE


def test_a_cache_that_slept_is_empty_and_used_at_once(sleepy, score):
    before = ask(sleepy, {**SHORT, "temperature": 0.0})
    sleepy.sleep("kv_cache")
    assert sleepy.asleep == {"kv_cache"}
    sleepy.wake_up()
    after = ask(sleepy, {**SHORT, "temperature": 0.0})
    assert after.token_ids == before.token_ids
    assert after.cached_tokens == 0
    assert error_of(after, score) < TOLERANCE


def test_sleeping_weights_are_not_updated(sleepy, sender, hf_model):
    version = sleepy.weight_version
    sleepy.sleep("weights")
    with pytest.raises(WeightSyncStateError, match=r"wake_up\('weights'\) first"):
        sender.update_weights(hf_model)
    assert run_sync(sleepy.control.weight_versions()) == [version]
    assert "asleep: weights" in repr(sleepy)


def test_each_kind_of_memory_sleeps_by_itself(sleepy, sender, hf_model):
    """A server that is told twice ends."""
    sleepy.wake_up()
    sleepy.wake_up("kv_cache")
    sleepy.sleep("kv_cache")
    sleepy.sleep(["kv_cache"])
    sleepy.wake_up("weights")
    sleepy.sleep()
    sleepy.sleep(("weights", "kv_cache", "cuda_graph"))
    assert sleepy.asleep == BOTH | {"cuda_graph"}
    sleepy.wake_up(["weights", "kv_cache"])
    assert sleepy.asleep == {"cuda_graph"}
    sleepy.wake_up(("kv_cache", "cuda_graph"))
    sleepy.wake_up()
    sender.update_weights(hf_model)
    assert len(ask(sleepy).token_ids) == 8
    assert sleepy.stats().restarts == 0


def test_sleep_waits_for_running_requests(sleepy):
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, sleepy, {**LONG, "max_new_tokens": 100})
        wait_until(lambda: running(sleepy))
        asleep = pool.submit(sleepy.sleep, "kv_cache")
        wait_until(lambda: fleet_of(sleepy).state.draining or sleepy.asleep)
        with pytest.raises(WeightSyncStateError, match=r"wake_up\(\)"):
            ask(sleepy)
        asleep.result(60)
        assert len(answer.result(60).token_ids) == 100


@pytest.mark.slow
def test_a_sleep_that_times_out_leaves_requests_running(sleepy, other_user):
    for user, who in ((sleepy, "1 request.s. of this"), (other_user, "have 1 of all")):
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, user, {**LONG, "max_new_tokens": 1500})
            wait_until(lambda: running(sleepy))
            with pytest.raises(ServerTimeoutError, match=f"{who}.*abort_first=True"):
                sleepy.sleep(drain_timeout=0)
            assert not sleepy.asleep
            assert len(ask(sleepy).token_ids) == 8
            assert len(answer.result(100).token_ids) == 1500


def test_abort_first(sleepy, other_user):
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, user, LONG) for user in (sleepy, other_user)]
        wait_until(lambda: running(sleepy) == 2)
        sleepy.sleep("kv_cache", abort_first=True)
        for answer in answers:
            assert isinstance(answer.exception(60), GenerationAbortedError)
    sleepy.wake_up()
    assert len(ask(sleepy).token_ids) == 8


def test_other_users_wait_in_the_server(sleepy, sender, other_user, hf_model, score):
    """Their requests meet neither memory that is not there nor weights that are not."""
    sleepy.sleep()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, other_user)
        wait_until(lambda: other_user.stats().in_flight)
        sleepy.wake_up("weights")
        sender.update_weights(changed(hf_model))
        assert not answer.done()
        sleepy.wake_up()
        assert error_of(answer.result(60), score) < TOLERANCE


def test_one_at_a_time(sleepy, sender, hf_model):
    with (
        sleepy.weight_update(),
        pytest.raises(WeightSyncStateError, match="in progress"),
    ):
        sleepy.sleep()
    with (
        sleepy.weight_update(),
        pytest.raises(WeightSyncStateError, match="in progress"),
    ):
        sleepy.wake_up()
    assert not sleepy.asleep


def test_a_copy_knows_what_slept_when_it_was_made(sleepy):
    sleepy.sleep("kv_cache")
    with pickle.loads(pickle.dumps(sleepy)) as other:
        assert other.asleep == {"kv_cache"}
        assert "asleep: kv_cache" in repr(other)
        with pytest.raises(WeightSyncStateError, match="wake_up"):
            ask(other)


@pytest.mark.parametrize("tags", ["cache", ["weights", "kv"], (), ""])
def test_unknown_tags(sleepy, tags):
    for call in (sleepy.sleep, sleepy.wake_up):
        with pytest.raises(ConfigurationError, match="'weights', 'kv_cache', 'cuda_gr"):
            call(tags)
    assert not sleepy.asleep


@pytest.mark.parametrize("budget", [-1, math.inf, math.nan])
def test_no_budget(sleepy, budget):
    with pytest.raises(ConfigurationError, match="drain_timeout"):
        sleepy.sleep(drain_timeout=budget)


def test_a_server_without_a_memory_saver(engine):
    with pytest.raises(UnsupportedByServerError, match="enable_memory_saver=True"):
        engine.sleep()
    engine.wake_up()
    assert not engine.asleep


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_memory_saver", False),
        ("weight_cache_mode", "daemon"),
        ("enable_hierarchical_cache", True),
        ("disaggregation_mode", "decode"),
    ],
)
def test_arguments_that_keep_a_server_awake(capabilities, name, value):
    given = {"enable_memory_saver": True, "disaggregation_mode": "null", name: value}
    ((found, what, _),) = sleep_obstacles(ServerArgs.read(given))
    assert (found, what) == (name, value)
    server = dataclasses.replace(capabilities, can_sleep=False, server_args=given)
    with pytest.raises(UnsupportedByServerError, match=f"{name}={value!r}.*start it"):
        check_can_sleep(server, "http://a")
    assert not any(sleep_obstacles(ServerArgs(enable_memory_saver=True)))


@pytest.mark.slow
def test_a_server_that_dies_asleep(tiny_model_path, saver_python, hf_model, score):
    """A trainer uses its memory until the wake-up: it is started again then."""
    with start(tiny_model_path, saver_python) as engine:
        engine.sleep()
        os.kill(engine.servers[0].pid, signal.SIGKILL)
        # The watch that sees it is the one that starts servers.
        wait_until(lambda: engine.stats().servers[0].state == "down")
        assert engine.stats().restarts == 0
        engine.wake_up()
        # It runs, and waits for the weights that were lost with its memory.
        wait_until(lambda: engine.stats().servers[0].state == "stale")
        assert engine.stats().restarts == 1
        with pytest.raises(WeightSyncStateError, match="send the weights"):
            ask(engine)
        sender = SGLangWeightSyncScheme(engine).create_sender()
        sender.update_weights(hf_model)
        assert error_of(ask(engine), score) < TOLERANCE
        engine.sleep()
        engine.wake_up("weights")
        sender.update_weights(hf_model)
        engine.wake_up()
        assert error_of(ask(engine), score) < TOLERANCE
        sender.shutdown()


@pytest.mark.slow
def test_a_server_that_ends_at_its_sleep_says_why(tiny_model_path, saver_python):
    with start(tiny_model_path, saver_python, max_restarts=0) as engine:
        run_sync(engine.control.pause("retract"))
        release = engine.control.memory_occupation(
            "release", {"kv_cache"}, url=engine.servers[0].url, timeout=60
        )
        run_sync(release)
        with pytest.raises(ServerUnavailableError, match="The end of its log") as told:
            engine.sleep("kv_cache")
        assert "crashed with exit code 1" in str(told.value)


def test_a_server_whose_start_ends_while_others_sleep():
    replicas = [Replica(url=f"http://{name}", handle=Process()) for name in "ab"]
    fleet = Fleet(replicas=replicas, weight_version="default")
    fleet.apply(Ended(replica=fleet.replicas[0], reason="It ended."))
    fleet.apply(FellAsleep(tags=frozenset({"weights"})))
    late = Process()
    started = Started(rank=0, handle=late, url=late.url)
    assert fleet.apply(started) == (Stop(handle=late),)
    assert fleet.replicas[0].state == "down"
    fleet.apply(WokeUp(tags=frozenset({"weights"})))
    fleet.apply(started)
    assert fleet.replicas[0].state == "stale"
    asked = fleet.replicas[0]
    fleet.apply(Answered(asked=asked, version="default", confirmed=True))
    assert fleet.replicas[0].state == "serving"


@pytest.fixture
def two(start_fakes):
    return start_fakes(2, enable_memory_saver=True)


@pytest.fixture
def pair(two):
    with AsyncSGLang.connect(urls=[fake.url for fake in two]) as engine:
        yield engine


def sent(fakes, path) -> list[int]:
    return [len(fake.payloads(path)) for fake in fakes]


RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
GO_ON = "/continue_generation"


@pytest.mark.parametrize("path", ["/pause_generation", RELEASE])
def test_one_server_does_not_fall_asleep(two, pair, path):
    with (
        two[1].misbehaving("error_500", path),
        pytest.raises(ServerUnavailableError, match=f"{two[1].url}.*again to complete"),
    ):
        pair.sleep("kv_cache")
    assert pair.asleep == {"kv_cache"}
    with pytest.raises(WeightSyncStateError, match="asleep"):
        pair.generate(input_ids=PROMPT)
    states = [server.state for server in pair.stats().servers]
    assert states == ["asleep: kv_cache" if path == RELEASE else "serving", "serving"]
    pair.sleep("kv_cache")
    assert {s.state for s in pair.stats().servers} == {"asleep: kv_cache"}
    assert sent(two, GO_ON) == [0, 0]
    pair.wake_up()
    assert sent(two, GO_ON) == [1, 1]
    assert len(pair.generate(input_ids=[PROMPT] * 4)) == 4


@pytest.mark.parametrize("path", ["/pause_generation", RELEASE])
def test_a_sleep_that_failed_is_undone(two, pair, path):
    """Weights that nobody released are not lost."""
    with (
        two[0].misbehaving("error_500", path),
        two[1].misbehaving("error_500", path),
        pytest.raises(ServerUnavailableError, match=r"0 of 2 servers.*wake_up\(\)"),
    ):
        pair.sleep()
    pair.wake_up()
    assert sent(two, RESUME) == [0, 0]
    assert len(pair.generate(input_ids=[PROMPT] * 4)) == 4


def test_one_server_does_not_wake_up(two, pair):
    pair.sleep("kv_cache")
    with (
        two[0].misbehaving("error_500", RESUME),
        pytest.raises(ServerUnavailableError, match=f"{two[0].url}.*1 of 2.*again"),
    ):
        pair.wake_up()
    states = [server.state for server in pair.stats().servers]
    assert states == ["asleep: kv_cache", "serving"]
    with pytest.raises(WeightSyncStateError, match="asleep"):
        pair.generate(input_ids=PROMPT)
    assert sent(two, GO_ON) == [0, 0]
    pair.wake_up()
    assert len(pair.generate(input_ids=[PROMPT] * 4)) == 4


def test_generation_does_not_go_on(two, pair):
    pair.sleep("kv_cache")
    with (
        two[0].misbehaving("error_500", GO_ON),
        pytest.raises(ServerUnavailableError, match=f"{two[0].url}.*wake_up.. again"),
    ):
        pair.wake_up()
    with pytest.raises(WeightSyncStateError, match="wake_up"):
        pair.generate(input_ids=PROMPT)
    pair.wake_up()
    assert sent(two, RESUME) == [1, 1]
    assert len(pair.generate(input_ids=[PROMPT] * 4)) == 4


def test_one_server_wants_no_update_of_the_other_half(two, pair):
    """Weights that one server lost are lost for the engine."""
    with (
        two[1].misbehaving("error_500", RELEASE),
        pytest.raises(ServerUnavailableError, match="1 of 2"),
    ):
        pair.sleep("weights")
    with pytest.raises(WeightSyncStateError, match="wake_up"), pair.weight_update():
        pass
    pair.wake_up()
    with pytest.raises(WeightSyncStateError, match="send the weights"):
        pair.generate(input_ids=PROMPT)


def test_servers_of_which_one_cannot_sleep(tiny_model_path, two):
    with (
        FakeServer(tiny_model_path) as plain,
        pytest.raises(ConfigurationError, match="differ in can_sleep"),
    ):
        AsyncSGLang.connect(urls=[two[0].url, plain.url])


def test_a_server_that_its_owner_starts_again_meanwhile(two, pair):
    """It has released nothing: SGLang ends when it is told to take that back."""
    pair.sleep("kv_cache")
    two[1].die()
    two[1].restart()
    pair.wake_up()
    assert sent(two, RESUME) == [1, 0]
    assert not pair.asleep
    assert len(pair.generate(input_ids=[PROMPT] * 4)) == 4


def test_ctrl_c_while_requests_are_waited_for(two, interruptible):
    fake = two[0]
    with (
        AsyncSGLang.connect(fake.url) as engine,
        ThreadPoolExecutor() as pool,
        fake.misbehaving("hang"),
    ):
        answer = pool.submit(ask, engine)
        fake.wait_for("/generate")

        def interrupt() -> None:
            wait_until(lambda: len(fake.payloads("/v1/loads")) > 1)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.sleep()
        thread.join()
        wait_until(lambda: not fleet_of(engine).state.draining)
        assert not engine.asleep
        assert sent(two, "/pause_generation") == [0, 0]
        engine.abort()
        fake.recover()
        assert isinstance(answer.exception(60), GenerationAbortedError)
        assert len(ask(engine).token_ids) == 8
        engine.sleep()
        assert fake.payloads(RELEASE) == [{"tags": ["kv_cache", "weights"]}]


def test_a_refused_sleep_is_an_error(two):
    """As of a version that has other kinds of memory."""
    from aiohttp import web

    two[0].routes[RELEASE] = lambda _: web.Response(body=b'"no"', status=400)
    with AsyncSGLang.connect(two[0].url) as engine:
        with pytest.raises(RequestRefusedError, match="0 of 1 servers"):
            engine.sleep("cuda_graph")
        engine.wake_up()
        assert len(ask(engine).token_ids) == 8
