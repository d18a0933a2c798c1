from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from torchrl_sglang import AsyncSGLang, make_sglang_server
from torchrl_sglang.backends import server as server_module
from torchrl_sglang.backends.event_loop import run_sync
from torchrl_sglang.backends.server import PORTS, ServerProcess, find_free_port
from torchrl_sglang.backends.watchdog import descendants, is_alive
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerDiedError,
    ServerError,
    ServerStartError,
)

SECONDS = 15.0
"""For a tree to be gone, on a loaded machine."""


def living(pids: list[int], seconds: float = SECONDS) -> list[int]:
    """Which of these processes are left when all had time to end."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return left


def tree_of(server: ServerProcess) -> list[int]:
    return [server.pid, *descendants(server.pid)]


# --- any command


def run(code: str, **options) -> ServerProcess:
    options = {"url": "http://127.0.0.1:1", "environment": dict(os.environ), **options}
    return ServerProcess([sys.executable, "-S", "-c", code], **options)


FOREVER = "import time; time.sleep(1000)"


def wait_for_log(server: ServerProcess, text: str) -> None:
    deadline = time.monotonic() + SECONDS
    while text not in server.log_tail():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_states():
    server = run("print('begun', flush=True); " + FOREVER)
    try:
        assert server.state == "starting"
        wait_for_log(server, "begun")
        tree = tree_of(server)
        assert len(tree) == 2
        # A Ctrl-C in the terminal is the trainer's to handle.
        assert {os.getsid(pid) for pid in tree} == {server.pid}
        assert f"pid={server.pid}, state='starting'" in repr(server)
    finally:
        server.stop()
    assert server.state == "stopped"
    assert living(tree, 1) == []
    assert not server.log_path.parent.exists()
    assert server.log_tail() == "(the log is gone)"
    server.stop()


def test_ready_when_it_answers(tmp_path):
    port = find_free_port()
    (tmp_path / "health").write_text("ok")
    code = (
        f"import http.server, os; os.chdir({str(tmp_path)!r}); "
        f"http.server.HTTPServer(('127.0.0.1', {port}), "
        f"http.server.SimpleHTTPRequestHandler).serve_forever()"
    )
    server = run(code, url=f"http://127.0.0.1:{port}")
    try:
        server.wait_ready(SECONDS)
        assert server.state == "ready"
        os.kill(descendants(server.pid)[0], signal.SIGKILL)
        assert living([server.pid]) == []
        assert server.state == "dead"
    finally:
        server.stop()


def test_a_start_that_fails_shows_the_end_of_the_log():
    lines = "".join(f"line {i}\\n" for i in range(100))
    code = f"import sys; print('{lines}' 'why', end=''); sys.exit(7)"
    server = run(code, name="test server")
    start = time.monotonic()
    with pytest.raises(
        ServerStartError, match="test server ended with status 7"
    ) as got:
        server.wait_ready(60)
    assert time.monotonic() - start < SECONDS
    tail = str(got.value).partition("its log:\n")[2].splitlines()
    assert tail[-2:] == ["line 99", "why"]
    assert len(tail) == server_module.LOG_TAIL_LINES
    assert server.state == "stopped"


def test_a_start_that_takes_too_long():
    server = run("print('loading', flush=True); " + FOREVER)
    wait_for_log(server, "loading")
    tree = tree_of(server)
    with pytest.raises(ServerStartError, match=r"0.2 s.*start_timeout=.*\n.*loading"):
        server.wait_ready(0.2)
    assert living(tree, 1) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_start_leaves_nothing_behind():
    server = run("print('loading', flush=True); " + FOREVER)
    wait_for_log(server, "loading")
    tree = tree_of(server)
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        server.wait_ready(SECONDS)
    timer.join()
    assert living(tree, 1) == []


def test_the_log_without_progress_bars_and_keys():
    shown = r"print('a\rload 1%| 5.00it/s]\rload 2%| 5.00it/s]\n\nkey=sesame'); "
    server = run(shown + "print('end', flush=True); " + FOREVER, hidden=["sesame"])
    try:
        wait_for_log(server, "end")
        assert server.log_tail() == "a\nkey=***\nend"
        assert server.log_tail(1) == "end"
    finally:
        server.stop()


def test_only_the_end_of_a_log_is_read(monkeypatch):
    monkeypatch.setattr(server_module, "LOG_TAIL_BYTES", 1000)
    code = "print('x' * 10**6); print('end', flush=True); " + FOREVER
    server = run(code)
    try:
        wait_for_log(server, "end")
        assert len(server.log_tail()) <= 1000
    finally:
        server.stop()


def test_a_program_that_does_not_exist():
    with pytest.raises(ServerStartError, match="no program '/no/such/python'.*python="):
        ServerProcess(["/no/such/python"], url="http://127.0.0.1:1", environment={})


def test_it_does_not_pickle():
    server = run(FOREVER)
    try:
        with pytest.raises(TypeError, match="pass its url"):
            pickle.dumps(server)
    finally:
        server.stop()


def test_the_last_reference_ends_it():
    server = run("print('begun', flush=True); " + FOREVER)
    wait_for_log(server, "begun")
    tree = tree_of(server)
    del server
    assert living(tree, 1) == []


def _stop(server: ServerProcess) -> None:
    server.stop()
    assert server.state != "stopped"


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
def test_a_fork_does_not_end_it():
    server = run("print('begun', flush=True); " + FOREVER)
    try:
        wait_for_log(server, "begun")
        child = multiprocessing.get_context("fork").Process(
            target=_stop, args=(server,)
        )
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert server.state == "starting"
        assert server.log_path.exists()
    finally:
        server.stop()


# --- the arguments of a server


def test_ports_are_free_and_not_taken_for_outgoing_connections():
    ports = {find_free_port() for _ in range(20)}
    assert len(ports) > 10
    assert all(port in PORTS for port in ports)
    # Where Linux begins to take ports for outgoing connections.
    assert max(PORTS) < 32_768


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "/no/such/model"}, ["'/no/such/model'", "config.json"]),
        ({"model": "./no-such-model"}, ["'./no-such-model'"]),
        ({"model": "~/no-such-model"}, ["'~/no-such-model'"]),
        ({"device": "tpu"}, ["device='tpu'", "'cuda' or 'cpu'"]),
        ({"model_path": "other"}, ["given twice", "'other'"]),
        (
            {"tp_size": 1, "tensor_parallel_size": 2},
            ["tp_size", "tensor_parallel_size"],
        ),
        ({"tp-size": 1}, ["'tp-size'"]),
        ({"sglang_version": "0.1"}, ["0.1", "0.5.23"]),
        ({"port": 70000}, ["port=70000"]),
        ({"port": "http"}, ["port='http'"]),
        ({"port": 0}, ["port=0"]),
    ],
)
def test_arguments_that_are_wrong(tiny_model_path, arguments, words):
    arguments = {"model": tiny_model_path, "device": "cpu", **arguments}
    with pytest.raises(ConfigurationError) as caught:
        make_sglang_server(**arguments)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Give the model once"),
        ({"model": "a", "model_name": "b"}, "Give the model once"),
        ({"model": "/no/such/model"}, "'/no/such/model'"),
        ({"model": "a", "num_replicas": 2}, "num_replicas=2"),
    ],
)
def test_arguments_of_from_pretrained_that_are_wrong(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        AsyncSGLang.from_pretrained(device="cpu", **arguments)


def test_a_port_that_is_taken(tiny_model_path):
    """Whoever listens there would be taken for the new server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port={port}.*another process"):
            make_sglang_server(tiny_model_path, device="cpu", port=port)


def test_an_interpreter_that_does_not_exist(tiny_model_path):
    with pytest.raises(ServerStartError, match="'/no/such/python'"):
        make_sglang_server(tiny_model_path, device="cpu", python="/no/such/python")


def test_an_interpreter_without_sglang(tiny_model_path):
    with pytest.raises(ServerStartError, match="No module named"):
        make_sglang_server(tiny_model_path, device="cpu", python=sys.executable)


# --- SGLang


def test_starts_that_fail(tiny_model_path, tmp_path):
    """A flag that SGLang does not have, and a model folder without a configuration."""
    empty = tmp_path / "model"
    shutil.copytree(tiny_model_path, empty)
    (empty / "config.json").unlink()
    starts = {
        "--no-such-flag": (tiny_model_path, {"no_such_flag": 3}),
        "config": (str(empty), {}),
    }
    errors: dict[str, BaseException] = {}

    def start(word: str) -> None:
        model, arguments = starts[word]
        try:
            make_sglang_server(model, device="cpu", **arguments)
        except ServerError as error:
            errors[word] = error

    threads = [threading.Thread(target=start, args=(word,)) for word in starts]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 90
    for word in starts:
        assert isinstance(errors[word], ServerStartError)
        message, _, tail = str(errors[word]).partition("The end of its log:\n")
        assert "ended with status" in message
        assert word in tail


SCRIPT = """
import json, sys
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.watchdog import descendants

ending, model = sys.argv[1:]
engine = AsyncSGLang.from_pretrained(model, device="cpu")
(answer,) = engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 2})
assert answer.token_ids
pid = engine._server.pid
print(json.dumps([pid, *descendants(pid)]), flush=True)
input()
if ending == "exception":
    try:
        with engine:
            raise ValueError("the caller's own")
    except ValueError:
        # The interpreter goes on.
        print("caught", flush=True)
        input()
"""

ENDINGS = ("exception", "exit", "kill")


@pytest.fixture(scope="module")
def trainers(
    tiny_model_path,
) -> Iterator[dict[str, tuple[subprocess.Popen, list[int]]]]:
    """Three trainers with a server each, started at once, and the servers' trees."""
    found = {}
    with ExitStack() as stack:
        processes = {
            ending: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", SCRIPT, ending, tiny_model_path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for ending in ENDINGS
        }
        try:
            for ending, process in processes.items():
                found[ending] = (process, json.loads(process.stdout.readline()))
            yield found
        finally:
            for process in processes.values():
                process.kill()


def alive(tree: list[int]) -> bool:
    """A watchdog, a launcher, a scheduler and a detokenizer, at the least."""
    return len(tree) >= 4 and all(is_alive(pid) for pid in tree)


def test_gone_after_an_exception_in_the_caller(trainers):
    process, tree = trainers["exception"]
    assert alive(tree)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "caught\n"
    assert living(tree, 1) == []
    assert process.poll() is None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(SECONDS) == 0


def test_gone_after_the_interpreter_exits(trainers):
    process, tree = trainers["exit"]
    assert alive(tree)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(2 * SECONDS) == 0
    assert living(tree, 1) == []


def test_gone_after_the_trainer_is_killed(trainers):
    process, tree = trainers["kill"]
    assert alive(tree)
    process.kill()
    assert living(tree, 5) == []


def test_a_server_with_a_key_that_is_killed_while_it_generates(tiny_model_path):
    key = "sesame-7731"
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", api_key=key
    ) as engine:
        for wrong in (None, "wrong"):
            with pytest.raises(ConfigurationError, match="asks for a key.*api_key"):
                AsyncSGLang.connect(engine.server_url, api_key=wrong)
        with AsyncSGLang.connect(engine.server_url, api_key=key) as other:
            assert other.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})
        assert engine.health()
        tree = tree_of(engine._server)
        # SGLang does write it.
        assert key in engine._server.log_path.read_text()
        shown = [repr(engine), repr(engine._server), engine._server.log_tail(10**6)]
        shown += [str(vars(engine)), str(dict(engine.capabilities.server_args))]

        errors = []

        def generate() -> None:
            try:
                engine.generate(
                    input_ids=[[5]] * 8,
                    sampling_params={"max_new_tokens": 2000, "ignore_eos": True},
                )
            except ServerError as error:
                errors.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        while not run_sync(engine.control.running_requests()):
            assert thread.is_alive()
        launcher = descendants(engine._server.pid)[0]
        start = time.monotonic()
        os.kill(launcher, signal.SIGKILL)
        thread.join(30)
        assert time.monotonic() - start < 10
        (error,) = errors
        assert isinstance(error, ServerDiedError)
        assert "The end of its log:\n" in str(error)
        assert "/v1/loads" in str(error), "What the server did last."
        assert "status='dead'" in repr(engine)
        assert living(tree) == []
        with pytest.raises(ServerDiedError):
            engine.generate(input_ids=[5])
        assert not engine.health()
        shown.append(str(error))
    assert not any(key in text for text in shown)
