"""The real router, before real servers, or before recorders where those cannot tell."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from helpers.fake_server import FakeServer
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang, make_sglang_server
from torchrl_sglang.backends.client.http import HttpClient, HttpResponse
from torchrl_sglang.backends.generation.dispatch import ROUTING_KEY_HEADER
from torchrl_sglang.backends.launch import router as router_module
from torchrl_sglang.backends.launch.process import ServerProcess
from torchrl_sglang.backends.launch.router import (
    ROUTER_ARGUMENTS,
    UNUSABLE_ARGUMENTS,
    RouterProcess,
    make_sglang_router,
    usable_policies,
)
from torchrl_sglang.backends.launch.watchdog import descendants, is_alive
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerStartError,
    ServerTimeoutError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.requests.plan import plan_request
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.sampling import SAMPLING_PARAMETERS
from torchrl_sglang.support.event_loop import run_sync

SECONDS = 60.0
"""For something to happen, on a loaded machine."""

NOWHERE = "http://127.0.0.1:9"
"""Where nothing listens: the port is reserved for the protocol "discard"."""


def is_stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(") ")[2][0] == "T" for task in tasks)


async def send(
    url: str,
    payload: dict[str, Any],
    *,
    key: str | None = None,
    api_key: str | None = None,
) -> HttpResponse:
    http = HttpClient(api_key)
    headers = None if key is None else {ROUTING_KEY_HEADER: key}
    try:
        return await http.request(
            "POST", f"{url}/generate", payload, timeout=120, headers=headers
        )
    finally:
        await http.close()


def send_all(
    url: str, payloads: Sequence[dict[str, Any]], **options
) -> list[HttpResponse]:
    async def gather() -> list[HttpResponse]:
        return await asyncio.gather(*(send(url, p, **options) for p in payloads))

    return run_sync(gather())


def healthy(router: RouterProcess) -> list[str]:
    return sorted(url for url, is_healthy in run_sync(router.workers()) if is_healthy)


# --- a worker that tells what it was sent


class Recorder(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, api_key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.api_key = api_key
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.healthy = True
        self.go = threading.Event()
        self.go.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def log_message(self, *arguments) -> None:
        pass

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200 if self.server.healthy else 503, {})
        elif "info" in self.path:
            self.answer(200, {"model_path": "/no/model", "tp_size": 1, "dp_size": 1})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((dict(self.headers), body))
        given = self.headers.get("Authorization")
        if self.server.api_key not in (None, (given or "").removeprefix("Bearer ")):
            self.answer(401, {"error": "Unauthorized"})
            return
        self.server.go.wait(SECONDS)
        self.answer(200, {"text": "", "by": self.server.url})


@contextmanager
def recorders(number: int, api_key: str | None = None) -> Iterator[list[Recorder]]:
    with ExitStack() as stack:
        found = []
        for _ in range(number):
            recorder = stack.enter_context(Recorder(api_key))
            threading.Thread(target=recorder.serve_forever, daemon=True).start()
            stack.callback(recorder.shutdown)
            stack.callback(recorder.go.set)
            found.append(recorder)
        yield found


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Recorder]]:
    with recorders(2) as found:
        yield found


def urls(servers: Sequence[Any]) -> list[str]:
    return [server.url for server in servers]


# --- arguments


@pytest.fixture(scope="module")
def described():
    return router_module._describe(router_module._find_python(None))


def test_policies_are_those_of_the_installed_router(described):
    assert usable_policies(described) == [
        "cache_aware",
        "consistent_hashing",
        "manual",
        "power_of_two",
        "random",
        "round_robin",
    ]


def test_every_default_is_an_argument_of_the_installed_router(described):
    assert described["version"] == "0.3.2"
    assert set(ROUTER_ARGUMENTS) | set(UNUSABLE_ARGUMENTS) <= set(
        described["arguments"]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "best"}, ["'best'", "0.3.2", "cache_aware", "round_robin"]),
        ({"policy": "prefix_hash"}, ["'prefix_hash'", "503", "manual"]),
        ({"policy": "bucket"}, ["prefill"]),
        ({"policy": None}, ["policy=None"]),
        ({"cache_treshold": 1}, ["'cache_treshold'", "mean 'cache_threshold'"]),
        ({"zzz": 1}, ["'zzz'", "RouterArgs"]),
        ({"mini_lb": True}, ["'mini_lb'", "worker list"]),
        ({"worker_urls": ["ftp://a"]}, ["'ftp://a'"]),
        ({"host": "0.0.0.0"}, ["host='0.0.0.0'", "api_key"]),
        ({"port": 70000}, ["port must be", "got 70000"]),
        ({"prometheus_port": 70000}, ["prometheus_port must be", "got 70000"]),
        ({"python": sys.executable}, [sys.executable, "sglang_router", "python="]),
        ({"python": "/no/such/python"}, ["/no/such/python", "python="]),
    ],
)
def test_arguments_that_are_wrong(arguments, words):
    arguments = {"worker_urls": [], **arguments}
    with pytest.raises(ConfigurationError) as caught:
        RouterProcess(**arguments)
    assert all(word in str(caught.value) for word in words)


def test_a_value_that_the_router_refuses():
    with pytest.raises(ServerStartError, match="cache_threshold"):
        make_sglang_router([], cache_threshold="much")


# --- the process


def test_states():
    router = RouterProcess([], policy="round_robin")
    with router:
        assert router.state == "starting"
        assert not router.usable
        router.wait_ready()
        assert router.state == "ready"
        assert router.usable
        assert repr(router) == (
            f"RouterProcess({router.url!r}, pid={router.pid}, state='ready')"
        )
        assert router.url.startswith("http://127.0.0.1:")
        tree = [router.pid, *descendants(router.pid)]
        assert len(tree) == 2
        assert run_sync(router.workers()) == []
        (answer,) = send_all(router.url, [{"input_ids": [1]}])
        assert answer.status == 503
        with pytest.raises(TypeError, match="pass its url"):
            pickle.dumps(router)
    assert router.state == "stopped"
    assert not router.usable
    assert not any(is_alive(pid) for pid in tree)
    assert not router.log_path.exists()
    router.stop()
    for call in (router.workers(), router.add_worker("a"), router.remove_worker("a")):
        with pytest.raises(ServerUnavailableError):
            run_sync(call)


def test_one_that_hangs():
    with make_sglang_router([]) as router:
        (process,) = descendants(router.pid)
        os.kill(process, signal.SIGSTOP)
        try:
            # Its threads stop one after the other.
            wait_until(lambda: is_stopped(process))
            with pytest.raises(ServerTimeoutError, match=f"{router.url}/workers"):
                run_sync(router.workers(timeout=0.2))
        finally:
            os.kill(process, signal.SIGCONT)
        assert run_sync(router.workers()) == []


def test_several_at_once():
    """Each has a port for its metrics too."""
    with ExitStack() as stack:
        routers = [stack.enter_context(RouterProcess([])) for _ in range(3)]
        for router in routers:
            router.wait_ready()
        assert len(set(urls(routers))) == 3


def test_a_worker_that_does_not_run_when_it_starts():
    with pytest.raises(ServerStartError) as caught:
        make_sglang_router([NOWHERE], start_timeout=2)
    message = str(caught.value)
    assert f"It waits for {NOWHERE}" in message
    assert "start_timeout=" in message
    assert "health checks failed" in message
    assert "\x1b" not in message


# --- the worker list


def test_workers_come_and_go(pair):
    first, second = urls(pair)
    with make_sglang_router([first], policy="round_robin") as router:
        assert run_sync(router.workers()) == [(first, True)]
        for _ in range(2):
            run_sync(router.add_worker(f"{second}/"))
            assert healthy(router) == sorted(urls(pair))
        for _ in range(2):
            run_sync(router.remove_worker(first))
            assert run_sync(router.workers()) == [(second, True)]
        run_sync(router.add_worker(first))
        assert healthy(router) == sorted(urls(pair))
        answers = send_all(router.url, [{"input_ids": [i]} for i in range(4)])
        assert sorted(a.json()["by"] for a in answers) == sorted(urls(pair) * 2)


def test_a_worker_that_cannot_be_added(pair):
    with make_sglang_router(urls(pair), worker_startup_timeout_secs=1) as router:
        with pytest.raises(ServerUnavailableError, match=f"not add {NOWHERE}.*health"):
            run_sync(router.add_worker(NOWHERE))
        with pytest.raises(ServerTimeoutError, match="adding http://127.0.0.1:1 in ti"):
            run_sync(router.add_worker("127.0.0.1:1", timeout=0.4))
        assert healthy(router) == sorted(urls(pair))


def test_a_sick_worker_leaves_the_rotation_and_comes_back(pair):
    first, second = pair
    with make_sglang_router(urls(pair), policy="round_robin") as router:
        first.healthy = False
        try:
            took = wait_until(lambda: (first.url, False) in run_sync(router.workers()))
            assert took < 60
            answers = send_all(router.url, [{"input_ids": [i]} for i in range(4)])
            assert {a.json()["by"] for a in answers} == {second.url}
        finally:
            first.healthy = True
        # One that is known is waited for.
        run_sync(router.add_worker(first.url))
        assert healthy(router) == sorted(urls(pair))


@pytest.mark.slow
def test_refused_requests_take_nobody_out_of_rotation(servers):
    with make_sglang_router(urls(servers), policy="round_robin") as router:
        bad = {"input_ids": [5] * 100_000, "sampling_params": {}}
        for answer in send_all(router.url, [bad] * 30):
            assert answer.status == 400
        assert healthy(router) == sorted(urls(servers))
        (answer,) = send_all(router.url, [GREEDY])
        assert answer.ok


# --- what reaches the servers


def test_keys():
    key = "sesame-7731"
    with (
        recorders(2, key) as both,
        make_sglang_router(
            [both[0].url], api_key=key, policy="round_robin", log_level="debug"
        ) as router,
    ):
        assert key not in " ".join(router.command.line)
        run_sync(router.add_worker(both[1].url))
        for wrong in (None, "wrong"):
            (answer,) = send_all(router.url, [{"input_ids": [1]}], api_key=wrong)
            assert answer.status == 401
        assert not both[0].requests
        answers = send_all(router.url, [{"input_ids": [1]}] * 4, api_key=key)
        assert {a.json()["by"] for a in answers} == set(urls(both))
        assert key not in router.log_tail(10**6)
        assert key not in str(vars(router)["command"]) + repr(router)


def test_sampling_parameters_that_are_lost(pair, capabilities):
    """If this fails, the router has learnt one: change its row in the table."""
    values: dict[tuple[type, ...], Any] = {
        (str,): "x",
        (int, float): 0.5,
        (bool,): False,
        (dict,): {"5": 1.0},
        (int,): 3,
        (str, list, tuple): ["x"],
        (list, tuple, set, frozenset): [3],
    }
    given = {name: values[row.types] for name, row in SAMPLING_PARAMETERS.items()}
    given |= {"custom_params": {"a": 1}, "stream_interval": 2}
    for recorder in pair:
        recorder.requests.clear()
    with make_sglang_router(urls(pair)) as router:
        (answer,) = send_all(
            router.url, [{"input_ids": [1, 2], "sampling_params": given}]
        )
    assert answer.ok
    ((_, got),) = pair[0].requests + pair[1].requests
    assert got["input_ids"] == [1, 2]
    kept = got["sampling_params"]
    dropped = {n for n, row in SAMPLING_PARAMETERS.items() if row.dropped_by_router}
    assert set(given) - set(kept) == {"custom_params", "stream_interval", *dropped}
    assert kept == {name: given[name] for name in kept}
    for params, direct in (({}, False), ({"stop_regex": ["a"]}, True)):
        request = GenerateRequest(input_ids=[1], sampling_params=params)
        assert plan_request(request, capabilities).direct is direct


def test_fields_that_the_engine_sends(pair):
    payload = {
        "input_ids": [5, 6, 7],
        "priority": -3,
        "sampling_params": {"temperature": 0.7},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": -1,
        "extra_key": "7",
        "rid": "one",
        "stream": False,
    }
    for recorder in pair:
        recorder.requests.clear()
    with make_sglang_router(urls(pair)) as router:
        (answer,) = send_all(router.url, [payload], key="session")
        lists = {**payload, "sampling_params": [payload["sampling_params"]]}
        (refused,) = send_all(router.url, [lists])
    assert answer.ok
    ((headers, got),) = pair[0].requests + pair[1].requests
    assert {name: got.get(name) for name in payload} == payload
    assert {k.lower(): v for k, v in headers.items()}[
        ROUTING_KEY_HEADER.lower()
    ] == "session"
    # A request is one prompt; only its prompts may be a list.
    assert refused.status == 422


# --- who gets which request


def spread(
    pair: list[Recorder], prompts: Sequence[list[int]], keys: Sequence[str], **options
) -> list[str]:
    """Sends requests that are all in flight at the end; returns the server of each."""
    for recorder in pair:
        recorder.requests.clear()
        recorder.go.clear()

    async def gather(url: str) -> list[HttpResponse]:
        tasks: list[asyncio.Task[HttpResponse]] = []
        for prompt, key in zip(prompts, keys, strict=True):
            tasks.append(asyncio.create_task(send(url, {"input_ids": prompt}, key=key)))
            # The router decides about several at once without looking at each other.
            while sum(len(recorder.requests) for recorder in pair) < len(tasks):
                assert not any(task.done() for task in tasks)
                await asyncio.sleep(0.001)
        for recorder in pair:
            recorder.go.set()
        return await asyncio.gather(*tasks)

    try:
        with make_sglang_router(urls(pair), **options) as router:
            return [answer.json()["by"] for answer in run_sync(gather(router.url))]
    finally:
        for recorder in pair:
            recorder.go.set()


def groups(number: int, size: int, system: int) -> list[list[int]]:
    """Prompts of 100 tokens, in groups of the same one, all with one beginning."""
    chance = random.Random(0)
    prompts = [
        [chance.randrange(10_000, 90_000) for _ in range(100)] for _ in "x" * number
    ]
    begin = list(range(10_000, 10_000 + system))
    return [begin + prompt for prompt in prompts for _ in range(size)]


@pytest.mark.parametrize("system", [0, 100])
def test_cache_aware_keeps_groups_of_token_ids_together_and_the_load_even(pair, system):
    prompts = groups(8, 8, system)
    by = spread(pair, prompts, [str(i) for i in range(64)], policy="cache_aware")
    split = sum(len(set(by[i : i + 8])) > 1 for i in range(0, 64, 8))
    assert split == 0
    assert by.count(pair[0].url) == 32


@pytest.mark.parametrize("policy", ["manual", "consistent_hashing"])
def test_a_routing_key_keeps_requests_together(pair, policy):
    prompts = groups(64, 1, 0)
    keys = [str(i % 16) for i in range(64)]
    by = spread(pair, prompts, keys, policy=policy)
    assert all(len({by[i] for i in range(key, 64, 16)}) == 1 for key in range(16))
    assert len(set(by)) == 2
    if policy == "manual":
        assert by.count(pair[0].url) == 32


# --- SGLang

GREEDY = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    "return_logprob": True,
}


@pytest.fixture(scope="module")
def servers(tiny_model_path) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        found = []
        for name in ("first", "second"):
            server = make_sglang_server(
                tiny_model_path,
                device="cpu",
                weight_version=name,
                # Two servers on the same cores wait for each other otherwise.
                environment={"OMP_NUM_THREADS": "1"},
            )
            stack.callback(server.stop)
            found.append(server)
        yield found


def version(answer: HttpResponse) -> str:
    return answer.raise_for_status().json()["meta_info"]["weight_version"]


def running(server: ServerProcess) -> int:
    async def ask() -> Any:
        http = HttpClient()
        url = f"{server.url}/v1/loads?include=core"
        try:
            return (await http.request("GET", url, timeout=SECONDS)).json()
        finally:
            await http.close()

    loads = run_sync(ask())["loads"]
    return sum(load["num_running_reqs"] for load in loads)


def long(tokens: int) -> list[dict[str, Any]]:
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    return [{"input_ids": [5, i], "sampling_params": params} for i in range(3, 11)]


@pytest.mark.slow
def test_removing_a_server_cuts_nothing_off(servers):
    first, second = servers
    with (
        make_sglang_router(urls(servers), policy="round_robin") as router,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(send_all, router.url, long(400))
        wait_until(lambda: running(first) == running(second) == 4)
        run_sync(router.remove_worker(first.url))
        assert {version(a) for a in send_all(router.url, [GREEDY] * 4)} == {"second"}
        answers = call.result(SECONDS)
        assert [a.json()["meta_info"]["completion_tokens"] for a in answers] == [
            400
        ] * 8
        assert sorted(map(version, answers)) == ["first"] * 4 + ["second"] * 4
        run_sync(router.add_worker(first.url))
        assert {version(a) for a in send_all(router.url, [GREEDY] * 4)} == {
            "first",
            "second",
        }


@pytest.mark.slow
def test_servers_that_die_while_they_generate(servers):
    """Last in this file: nobody is left afterwards."""
    first, second = servers
    with (
        make_sglang_router(urls(servers), policy="round_robin") as router,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(send_all, router.url, long(1500))
        wait_until(lambda: running(first) == running(second) == 4)
        os.kill(descendants(first.pid)[0], signal.SIGKILL)
        took = wait_until(lambda: (first.url, False) in run_sync(router.workers()))
        assert took < 60
        assert {version(a) for a in send_all(router.url, [GREEDY] * 4)} == {"second"}
        answers = call.result(2 * SECONDS)
        # The error names the server; nothing was sent again behind our back.
        failed = [answer for answer in answers if not answer.ok]
        assert len(failed) == 4
        for answer in failed:
            assert answer.status == 500
            assert first.url in answer.error_text()
        assert {version(a) for a in answers if a.ok} == {"second"}
        second.stop()
        wait_until(lambda: healthy(router) == [])
        (nobody,) = send_all(router.url, [GREEDY])
        assert nobody.status == 503
        assert "No available workers" in nobody.error_text()
        # A dead one is removed like any other.
        run_sync(router.remove_worker(first.url))
        assert run_sync(router.workers()) == [(second.url, False)]


# --- what it drops

BEYOND_OPENAI = {
    "cache_salt": "mine",
    "priority": 3,
    "return_meta_info": True,
    "return_routed_experts": True,
    "return_sampling_mask": True,
    "stop_regex": ["a"],
}


@pytest.fixture
def served(start_fakes) -> Iterator[tuple[AsyncSGLang, list[FakeServer]]]:
    """An engine of two servers behind a true router, which answer chats."""

    def chat(content: Any) -> web.Response:
        meta = {"routed_experts": "AAAA", "output_token_sampling_mask": [[1, 2]]}
        choice = {"index": 0, "finish_reason": "stop", "meta_info": meta}
        if "stop_regex" not in content:
            choice["meta_info"] = {}
        return web.json_response({"object": "chat.completion", "choices": [choice]})

    with ExitStack() as stack:
        servers = start_fakes(2)
        for server in servers:
            server.routes["/v1/chat/completions"] = chat
            server.routes["/v1/completions"] = chat
        router = stack.enter_context(make_sglang_router(urls(servers)))
        engine = AsyncSGLang.connect(urls=urls(servers), router_url=router.url)
        yield stack.enter_context(engine), servers


def test_a_chat_reaches_a_server_whole(served):
    engine, servers = served
    path = "/v1/chat/completions"
    chat = [{"role": "user", "content": "a"}]
    engine.chat_completion({"messages": chat, **BEYOND_OPENAI})
    (sent,) = [content for server in servers for content in server.payloads(path)]
    assert sent.items() >= BEYOND_OPENAI.items()
    # An abort names it, and other weights have other prefixes.
    assert sent["rid"]
    assert sent["extra_key"] == engine.weight_version


def test_a_plain_completion_goes_through_the_router(served):
    engine, servers = served
    beyond = {
        name: BEYOND_OPENAI[name] for name in ("cache_salt", "priority", "stop_regex")
    }
    engine.completion({"prompt": "a", **beyond})
    (sent,) = [
        content for each in servers for content in each.payloads("/v1/completions")
    ]
    assert sent.items() >= beyond.items()
    assert sent["rid"]
    assert sent["extra_key"] == engine.weight_version


@pytest.mark.parametrize("name", ["return_routed_experts", "return_sampling_mask"])
def test_an_answer_without_what_was_asked_for_is_an_error(served, name):
    engine, _ = served
    with pytest.raises(UnsupportedByServerError, match=f"{name}=True asks for"):
        engine.chat_completion({"messages": [], name: True})
