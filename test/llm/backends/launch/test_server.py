from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.forked_starts import processes_below, trainer_python, true_interpreter
from helpers.waiting import wait_until, wait_until_gone

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme, make_sglang_server
from torchrl_sglang.backends.fleet.replica import stop_all
from torchrl_sglang.backends.launch import cpu, watchdog
from torchrl_sglang.backends.launch.launcher import start_servers
from torchrl_sglang.backends.launch.local import LocalLauncher, starts_at_once
from torchrl_sglang.backends.launch.ports import find_free_port, lease_port
from torchrl_sglang.backends.launch.process import (
    LOG_TAIL_LINES,
    Command,
    ServerProcess,
)
from torchrl_sglang.backends.launch.server_command import make_server_command
from torchrl_sglang.backends.launch.watchdog import descendants, is_alive
from torchrl_sglang.errors import ConfigurationError, ServerDiedError, ServerStartError
from torchrl_sglang.support.event_loop import run_sync

SECONDS = 60.0
"""For a tree to be gone, on a loaded machine."""


def below_this_process() -> set[int]:
    """All descendants but the processes that servers on CPU are forked from."""
    return {pid for pid in descendants(os.getpid()) if not is_preloaded(pid)}


def is_preloaded(pid: int) -> bool:
    try:
        return b"preloaded.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def tree_of(server: ServerProcess) -> list[int]:
    return [server.pid, *processes_below(server.pid)]


# --- any command


def run(
    code: str, *, hidden=(), config=None, leases=(), when_ready=None, **options
) -> ServerProcess:
    command = Command(
        line=(sys.executable, "-S", "-c", code),
        url=options.pop("url", "http://127.0.0.1:1"),
        environment=dict(os.environ),
        hidden=tuple(hidden),
        config=config or {},
        leases=tuple(leases),
        when_ready=when_ready,
    )
    return ServerProcess(command, **options)


FOREVER = "import time; time.sleep(1000)"


def wait_for_log(server: ServerProcess, text: str) -> None:
    wait_until(lambda: text in server.log_tail())


def test_states():
    with run("print('begun', flush=True); " + FOREVER) as server:
        assert server.state == "starting"
        wait_for_log(server, "begun")
        tree = tree_of(server)
        assert len(tree) == 2
        # A Ctrl-C in the terminal is the trainer's to handle.
        assert {os.getsid(pid) for pid in tree} == {server.pid}
        assert f"pid={server.pid}, state='starting'" in repr(server)
    assert server.state == "stopped"
    wait_until_gone(tree)
    assert not server.log_path.parent.exists()
    assert server.log_tail() == "(the log is gone)"
    server.stop()


def answering(folder: Path, port: int) -> str:
    (folder / "health").write_text("ok")
    return (
        f"import http.server, os; os.chdir({str(folder)!r}); "
        f"http.server.HTTPServer(('127.0.0.1', {port}), "
        f"http.server.SimpleHTTPRequestHandler).serve_forever()"
    )


def test_ready_when_it_answers(tmp_path):
    port = find_free_port()
    with run(answering(tmp_path, port), url=f"http://127.0.0.1:{port}") as server:
        server.wait_ready()
        assert server.state == "ready"
        os.kill(descendants(server.pid)[0], signal.SIGKILL)
        wait_until_gone([server.pid])
        assert server.state == "dead"


def test_not_ready_while_its_predecessor_answers(tmp_path):
    port = find_free_port()
    url, code = f"http://127.0.0.1:{port}", answering(tmp_path, port)
    begin = tmp_path / "begin"
    late = (
        f"import os, time\nwhile not os.path.exists({str(begin)!r}):\n time.sleep(0.1)"
    )
    with run(code, url=url) as first:
        first.wait_ready()
        with run(f"{late}\n{code}", url=url) as second:
            assert not second.check_ready()
            first.stop()
            assert not second.check_ready()
            begin.touch()
            second.wait_ready()
            assert second.state == "ready"


def test_a_start_that_fails_shows_the_end_of_the_log():
    lines = "".join(f"line {i}\\n" for i in range(100))
    code = f"import sys; print('{lines}' 'why', end=''); sys.exit(7)"
    server = run(code, name="test server")
    start = time.monotonic()
    with pytest.raises(
        ServerStartError, match="test server ended with status 7"
    ) as got:
        server.wait_ready()
    assert time.monotonic() - start < SECONDS
    tail = str(got.value).partition("its log:\n")[2].splitlines()
    assert tail[-2:] == ["line 99", "why"]
    assert len(tail) == LOG_TAIL_LINES
    assert server.state == "stopped"
    # All of it is left to be read, and nothing else is.
    assert str(server.log_path) in str(got.value)
    assert os.listdir(server.log_path.parent) == ["server.log"]
    assert server.log_path.read_text().startswith("line 0\n")


def test_the_log_of_a_server_that_died_is_kept_without_keys():
    code = "print('key=sesame\\nwhy', flush=True); import os; os.abort()"
    server = run(code, hidden=["sesame"])
    wait_until_gone([server.pid])
    assert server.state == "dead"
    server.stop()
    assert server.log_path.read_text().startswith("key=***\nwhy\n")
    assert "why" in server.log_tail()


def test_a_file_for_what_others_must_not_see():
    code = (
        "import sys, os, stat; "
        "print(stat.filemode(os.stat(sys.argv[-1]).st_mode), "
        "open(sys.argv[-1]).read(), sys.argv[-2], flush=True); "
    )
    with run(code + FOREVER, config={"api_key": "sesame"}) as server:
        shown = '-rw------- {"api-key": "sesame"} --config'
        wait_for_log(server, shown)
        assert "sesame" not in " ".join(server.command.line)
        assert server.log_path.parent.stat().st_mode & 0o077 == 0
    assert not server.log_path.parent.exists()


def test_a_server_may_have_as_many_files_open_as_the_machine_allows():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(limits[1], watchdog.OPEN_FILES)
    code = (
        "import resource; "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True); "
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, limits[1]))
    try:
        server = run(code + FOREVER)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    wait_for_log(server, str(most))
    server.stop()


def test_its_ports_are_held_until_its_end():
    lease = lease_port()
    server = run(FOREVER, leases=[lease])
    with pytest.raises(ConfigurationError):
        lease_port(port=lease.port)
    server.stop()
    lease_port(port=lease.port).release()


def test_several_end_at_once():
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    servers = [
        run(stubborn + "print('begun', flush=True); " + FOREVER) for _ in range(12)
    ]
    for server in servers:
        wait_for_log(server, "begun")
    start = time.monotonic()
    stop_all(servers)
    # The grace of a tree that ignores what it is told, once and not twelve times.
    assert time.monotonic() - start < len(servers) * watchdog.TERM_GRACE_SECONDS
    assert {server.state for server in servers} == {"stopped"}
    stop_all(servers)


def test_the_last_reference_can_go_on_the_background_loop():
    """A process that ignores what it is told ends later, and the loop does not wait."""
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    servers = [run(stubborn + "print('begun', flush=True); " + FOREVER)]
    wait_for_log(servers[0], "begun")
    tree = tree_of(servers[0])

    async def drop() -> bool:
        servers.clear()
        return is_alive(tree[1])

    assert run_sync(drop())
    wait_until_gone(tree)


def test_a_start_that_takes_too_long():
    server = run("print('loading', flush=True); " + FOREVER, start_timeout=2)
    wait_for_log(server, "loading")
    tree = tree_of(server)
    with pytest.raises(ServerStartError, match=r"2 s.*start_timeout=.*\n.*loading"):
        server.wait_ready()
    wait_until_gone(tree)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_start_leaves_nothing_behind():
    server = run("print('loading', flush=True); " + FOREVER)
    wait_for_log(server, "loading")
    tree = tree_of(server)
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        server.wait_ready()
    timer.join()
    wait_until_gone(tree)


HANDLER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path, self.headers.get("Authorization"), flush=True)
        self.send_response(200 if self.path == "/health" else 500)
        self.end_headers()
    log_message = lambda *args: None

http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


def test_a_path_that_is_asked_for_once():
    """Its answer does not matter."""
    port = find_free_port()
    with run(
        HANDLER.replace("PORT", str(port)),
        url=f"http://127.0.0.1:{port}",
        config={"api_key": "sesame"},
        when_ready="/freeze_gc",
    ) as server:
        server.wait_ready()
        server.check_ready()
        lines = server.log_tail().splitlines()
        assert lines == ["/health None", "/freeze_gc Bearer sesame"]


@pytest.mark.parametrize(("device", "path"), [("cpu", "/freeze_gc"), ("cuda", None)])
def test_servers_on_a_cpu_freeze_their_heap(tiny_model_path, device, path):
    engine = str(cpu.engine_python())
    command = make_server_command(tiny_model_path, device=device, python=engine)
    assert command.when_ready == path
    command.release()


def test_the_log_without_usage():
    options = "[parser.add_argument(f'--option-{n}', type=int) for n in range(300)]; "
    code = (
        "import argparse; parser = argparse.ArgumentParser('sglang serve'); "
        f"{options} print('imported', flush=True); "
        "parser.parse_args(['--option-7', 'a'])"
    )
    server = run(code)
    with pytest.raises(ServerStartError) as caught:
        server.wait_ready()
    assert str(caught.value).endswith(
        "imported\nsglang serve: error: argument --option-7: invalid int value: 'a'"
    )
    shutil.rmtree(server.log_path.parent)


def test_the_log_without_progress_bars_and_keys():
    shown = r"print('a\rload 1%| 5.00it/s]\rload 2%| 5.00it/s]\n\nkey=sesame'); "
    with run(
        shown + "print('end', flush=True); " + FOREVER, hidden=["sesame"]
    ) as server:
        wait_for_log(server, "end")
        assert server.log_tail() == "a\nkey=***\nend"
        assert server.log_tail(1) == "end"


def test_only_the_end_of_a_log_is_read():
    code = "print('x\\n' * 10**6); print('end', flush=True); " + FOREVER
    with run(code) as server:
        wait_for_log(server, "end")
        assert len(server.log_tail(lines=10**7)) <= 100_000


def test_it_does_not_pickle():
    with run(FOREVER) as server:
        with pytest.raises(TypeError, match="pass its url"):
            pickle.dumps(server)


def test_the_last_reference_ends_it():
    server = run("print('begun', flush=True); " + FOREVER)
    wait_for_log(server, "begun")
    tree = tree_of(server)
    del server
    wait_until_gone(tree)


def _stop(server: ServerProcess) -> None:
    server.stop()
    assert server.state != "stopped"


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
def test_a_fork_does_not_end_it():
    with run("print('begun', flush=True); " + FOREVER) as server:
        wait_for_log(server, "begun")
        child = multiprocessing.get_context("fork").Process(
            target=_stop, args=(server,)
        )
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert server.state == "starting"
        assert server.log_path.exists()


# --- the arguments of a server


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "/no/such/model"}, ["'/no/such/model'", "config.json"]),
        ({"model": "./no-such-model"}, ["'./no-such-model'"]),
        ({"model": "~/no-such-model"}, ["'~/no-such-model'"]),
        ({"device": "tpu"}, ["device='tpu'", "'cuda' or 'cpu'"]),
        ({"model_path": "other"}, ["'model' and 'model_path' both set"]),
        (
            {"tp_size": 1, "tensor_parallel_size": 2},
            ["tp_size", "tensor_parallel_size"],
        ),
        ({"tp-size": 1}, ["'tp-size'"]),
        ({"sglang_version": "0.1"}, ["0.1", "0.5.23"]),
        ({"port": 70000}, ["port must be", "got 70000"]),
        ({"port": "http"}, ["port must be", "got 'http'"]),
        ({"port": 0}, ["port must be", "got 0"]),
        ({"nccl_port": 0}, ["nccl_port must be", "got 0"]),
        ({"mem_frac": 0.1}, ["'mem_frac'", "'mem_fraction_static'"]),
        ({"no_such_flag": 3}, ["'no_such_flag'"]),
        ({"gpu_memory_utilisation": 0.1}, ["'gpu_memory_utilization'"]),
        ({"host": "0.0.0.0"}, ["host='0.0.0.0'", "api_key"]),
        ({"host": "node-3"}, ["host='node-3'", "api_key"]),
        ({"api_key": "-x"}, ["api_key is not a key"]),
        ({"api_key": "two words"}, ["api_key is not a key"]),
        ({"admin_api_key": ""}, ["admin_api_key is not a key"]),
        ({"cuda_devices": [0]}, ["device='cuda'"]),
        ({"nnodes": 2}, ["dist_init_addr"]),
        ({"nnodes": 2, "node_rank": 2}, ["node_rank=2", "nnodes=2"]),
        ({"data_parallel_size": 2}, ["num_replicas=N"]),
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
        ({}, "Give the model: a folder"),
        ({"model": "a", "model_name": "b"}, "Give model once"),
        ({"model": "/no/such/model"}, "'/no/such/model'"),
        ({"model": "a", "num_replicas": 0}, "num_replicas must be .* got 0"),
        ({"model": "a", "max_attempts": 0}, "max_attempts must be .* got 0"),
        ({"model": "a", "router_args": {"nope": 1}}, "num_replicas is 1"),
        (
            {"model": "a", "num_replicas": 2, "router_policy": "cache_awear"},
            "cache_aware",
        ),
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


# --- plans


@pytest.fixture
def plan(tiny_model_path):
    with ExitStack() as stack:

        def make(**arguments) -> Command:
            made = make_server_command(
                tiny_model_path, **{"device": "cpu", **arguments}
            )
            stack.callback(made.release)
            return made

        yield make


def value_of(plan: Command, flag: str) -> str:
    return plan.line[plan.line.index(flag) + 1]


def test_plans_of_the_same_time_share_no_port(plan):
    plans = [plan() for _ in range(4)]
    ports = [value_of(one, flag) for one in plans for flag in ("--port", "--nccl-port")]
    assert len(set(ports)) == 8
    assert [one.url for one in plans] == [
        f"http://127.0.0.1:{value_of(one, '--port')}" for one in plans
    ]
    for name in ("port", "nccl_port"):
        with pytest.raises(ConfigurationError, match=f"{name}='{ports[0]}' is not"):
            plan(**{name: ports[0]})
    # What is refused gives back what it held.
    plan(port=find_free_port())


def test_a_plan_that_is_refused_holds_nothing(plan):
    port = find_free_port()
    with pytest.raises(ConfigurationError, match="no form"):
        plan(port=port, dtype=object())
    plan(port=port)


def test_a_plan_with_secrets(plan):
    made = plan(api_key="sesame", admin_api_key="open", host="0.0.0.0")
    assert made.config == {"api_key": "sesame", "admin_api_key": "open"}
    assert "sesame" not in repr(made) + " ".join(made.line)
    assert made.url.startswith("http://127.0.0.1:")
    assert plan(api_key="sesame", host="::").url.startswith("http://[::1]:")


def test_a_plan_for_gpus(plan, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    made = plan(device="cuda", tp_size=2, cuda_devices=["GPU-a", "3"])
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,3"
    assert made.environment["NCCL_CUMEM_ENABLE"] == "0"
    assert made.line[:3] == (sys.executable, "-m", "sglang.launch_server")
    assert plan(device="cuda").environment["CUDA_VISIBLE_DEVICES"] == ""
    for arguments in ({"cuda_devices": [0]}, {"cuda_devices": ["1"], "tp_size": 2}):
        with pytest.raises(ConfigurationError, match="cuda"):
            plan(device="cuda", **arguments)
    with pytest.raises(ConfigurationError, match="base_gpu_id"):
        plan(device="cuda", cuda_devices=["1"], base_gpu_id=1)


def test_a_plan_of_one_node_of_several(plan):
    made = plan(tp_size=2, nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:5000")
    assert value_of(made, "--dist-init-addr") == "10.0.0.1:5000"
    assert value_of(made, "--node-rank") == "1"
    # All nodes meet at that address instead.
    assert "--nccl-port" not in made.line


@pytest.mark.parametrize(
    ("parallel", "count", "cores", "on_cpu", "at_once"),
    [
        (None, 4, 2, True, 1),
        (None, 4, 8, True, 4),
        (None, 4, 2, False, 4),
        (True, 4, 2, True, 4),
        (False, 4, 64, False, 1),
        ("staggered", 8, 8, False, 4),
        ("staggered", 8, 1, False, 1),
        (True, 0, 1, False, 1),
    ],
)
def test_starts_at_once(parallel, count, cores, on_cpu, at_once):
    assert starts_at_once(parallel, count=count, cores=cores, on_cpu=on_cpu) == at_once


# --- SGLang


def test_no_servers():
    assert start_servers(LocalLauncher([])) == []


def test_a_group_with_a_wrong_argument_is_not_started(tiny_model_path):
    spec = {"model": tiny_model_path, "device": "cpu"}
    with pytest.raises(ConfigurationError, match="'tp_sizes'") as caught:
        LocalLauncher([spec, {**spec, "tp_sizes": 1}])
    assert caught.value.__notes__ == ["It is server 2 of 2."]
    with pytest.raises(ConfigurationError, match="parallel='yes'"):
        LocalLauncher([spec], parallel="yes")


@pytest.mark.parametrize("parallel", [True, False])
def test_a_group_is_interrupted(tiny_model_path, parallel):
    spec = {"model": tiny_model_path, "device": "cpu"}
    before = below_this_process()
    trees = []

    def progress(line: str) -> None:
        if not parallel or "2 of 2" in line:
            trees.extend(below_this_process() - before)
            raise KeyboardInterrupt

    launcher = LocalLauncher([spec] * 2, parallel=parallel)
    with pytest.raises(KeyboardInterrupt):
        start_servers(launcher, progress=progress)
    assert trees
    wait_until_gone(trees)


def test_a_group_starts_whole_or_not_at_all(tiny_model_path, tmp_path):
    """The second fails while the first one loads."""
    broken = tmp_path / "model"
    shutil.copytree(tiny_model_path, broken)
    (broken / "config.json").unlink()
    spec = {"model": tiny_model_path, "device": "cpu"}
    before = below_this_process()
    trees = set()

    def progress(line: str) -> None:
        trees.update(below_this_process() - before)

    with pytest.raises(ServerStartError, match=r"server 2 of 2 ended.*kept") as caught:
        start_servers(
            LocalLauncher([spec, {**spec, "model": broken}], parallel=True),
            progress=progress,
        )
    message = str(caught.value)
    assert "config" in message.partition("The end of its log:\n")[2]
    assert len(trees) >= 2
    wait_until_gone(trees, 1)


@pytest.mark.slow
def test_a_group_of_two_versions(tiny_model_path):
    """Both with a key, starting at once: one node each, and no port in common."""
    specs = [
        {
            "model": tiny_model_path,
            "device": "cpu",
            "sglang_version": version,
            "api_key": f"sesame-{version}",
        }
        for version in cpu.VERSIONS
    ]
    told = []
    servers = start_servers(LocalLauncher(specs, parallel=True), progress=told.append)
    try:
        assert [server.state for server in servers] == ["ready", "ready"]
        assert [line for line in told if "is starting at" in line] == told[:2]
        assert sum("is ready after" in line for line in told) == 2
        for server, spec in zip(servers, specs, strict=True):
            with AsyncSGLang.connect(server.url, api_key=spec["api_key"]) as engine:
                assert engine.capabilities.version == spec["sglang_version"]
            assert not server.log_path.with_name("config.yaml").exists()
        trees = [pid for server in servers for pid in tree_of(server)]
        start = time.monotonic()
    finally:
        stop_all(servers)
    assert time.monotonic() - start < 60
    wait_until_gone(trees)


def test_a_start_with_a_value_that_sglang_refuses(tiny_model_path):
    with pytest.raises(ServerStartError, match="ended with status") as caught:
        make_sglang_server(tiny_model_path, device="cpu", dtype="float99")
    assert "'float99'" in str(caught.value).partition("The end of its log:\n")[2]


@pytest.mark.slow
def test_a_server_on_two_nodes(tiny_model_path):
    """Both on this machine; that of rank 1 has no API, but is waited for and ends."""
    spec = {
        "model": tiny_model_path,
        "device": "cpu",
        "tp_size": 2,
        "nnodes": 2,
        "dist_init_addr": f"127.0.0.1:{find_free_port()}",
    }
    specs = [
        {
            **spec,
            "node_rank": rank,
            "environment": {"SGLANG_CPU_OMP_THREADS_BIND": rank},
        }
        for rank in ("0", "1")
    ]
    servers = start_servers(LocalLauncher(specs, parallel=True))
    try:
        with AsyncSGLang.connect(servers[0].url) as engine:
            (answer,) = engine.generate(
                input_ids=[5], sampling_params={"max_new_tokens": 2, "ignore_eos": True}
            )
        assert len(answer.token_ids) == 2
        assert servers[1].check_ready()
        trees = [pid for server in servers for pid in tree_of(server)]
    finally:
        stop_all(servers)
    wait_until_gone(trees)


SCRIPT = """
import json, sys
from torchrl_sglang import AsyncSGLang
from helpers.forked_starts import processes_below

ending, model, key = sys.argv[1:]
engine = AsyncSGLang.from_pretrained(model, device="cpu", api_key=key)
(answer,) = engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 2})
assert answer.token_ids
pid = engine.servers[0].pid
tree = [pid, *processes_below(pid)]
print(json.dumps([tree]), flush=True)
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
KEY = "sesame-7731"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    process: subprocess.Popen
    tree: list[int]
    """The processes of its server."""


@pytest.fixture(scope="module")
def trainers(tiny_model_path, forking_python) -> Iterator[dict[str, Trainer]]:
    found = {}
    with ExitStack() as stack:
        processes = {
            ending: stack.enter_context(
                subprocess.Popen(
                    [trainer_python(), "-c", SCRIPT, ending, tiny_model_path, KEY],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={
                        **os.environ,
                        cpu.PYTHON_VARIABLE: str(forking_python),
                        "PYTHONPATH": os.pathsep.join(sys.path),
                    },
                    text=True,
                )
            )
            for ending in ENDINGS
        }
        try:
            for ending, process in processes.items():
                # TorchRL's logger writes to the standard output, too.
                lines = iter(process.stdout.readline, "")
                (tree,) = json.loads(next(filter(is_json, lines)))
                found[ending] = Trainer(process=process, tree=tree)
            yield found
        finally:
            for process in processes.values():
                process.kill()


def is_json(line: str) -> bool:
    return line.startswith("[[")


def alive(tree: list[int]) -> bool:
    """A watchdog, a launcher, a scheduler and a detokenizer, at the least."""
    return len(tree) >= 4 and all(is_alive(pid) for pid in tree)


def test_no_process_shows_the_key(trainers):
    for pid in trainers["kill"].tree:
        for name in ("cmdline", "environ"):
            assert KEY.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


@pytest.mark.slow
def test_a_forked_server_answers_as_a_truly_started_one(
    engine, tiny_model_path, forking_python
):
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        api_key=KEY,
        python=true_interpreter(forking_python),
    ) as true:
        pid = engine.servers[0].pid
        forks = set(processes_below(pid)) - set(descendants(pid))
        assert len(forks) >= 3, "A launcher, a scheduler and a detokenizer."
        assert not forks & {true.servers[0].pid, *processes_below(true.servers[0].pid)}
        forked, expected = (
            one.generate(
                input_ids=[5, 6, 7, 8],
                sampling_params={"max_new_tokens": 12, "temperature": 0.0},
                return_logprobs=True,
            )[0]
            for one in (engine, true)
        )
        assert forked.token_ids == expected.token_ids
        assert forked.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        own = {"port", "random_seed", "nccl_port", "startup_time", "api_key"}
        arguments = [
            {k: v for k, v in one.capabilities.server_args.items() if k not in own}
            for one in (engine, true)
        ]
        assert arguments[0] == arguments[1]


def test_gone_after_an_exception_in_the_caller(trainers):
    process, tree = trainers["exception"].process, trainers["exception"].tree
    assert alive(tree)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "caught\n"
    wait_until_gone(tree)
    assert process.poll() is None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(SECONDS) == 0


def test_gone_after_the_interpreter_exits(trainers):
    process, tree = trainers["exit"].process, trainers["exit"].tree
    assert alive(tree)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(2 * SECONDS) == 0
    wait_until_gone(tree)


def test_gone_after_the_trainer_is_killed(trainers):
    process, tree = trainers["kill"].process, trainers["kill"].tree
    assert alive(tree)
    variables = Path(f"/proc/{tree[0]}/environ").read_bytes().split(b"\0")
    named = dict(line.partition(b"=")[::2] for line in variables)
    folder = Path(os.fsdecode(named[watchdog.FOLDER_VARIABLE.encode()]))
    assert (folder / "server.log").exists()
    process.kill()
    wait_until_gone(tree)
    assert not folder.exists()


def test_a_server_with_a_key_that_is_killed_while_it_generates(
    tiny_model_path, hf_model
):
    key, admin = KEY, f"admin-{KEY}"
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", api_key=key, admin_api_key=admin
    ) as engine:
        for wrong in (None, "wrong"):
            with pytest.raises(ConfigurationError, match="asks for a key.*api_key"):
                AsyncSGLang.connect(engine.server_url, api_key=wrong)
        with AsyncSGLang.connect(engine.server_url, api_key=key) as other:
            assert other.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})
            for call in (other.abort, other.flush_cache):
                with pytest.raises(ConfigurationError, match="give .*admin_api_key"):
                    call()
        sender = SGLangWeightSyncScheme(engine, hf_model).create_sender()
        assert sender.update_weights().version == engine.weight_version == "1"
        assert engine.flush_cache()
        assert engine.abort() == 0
        assert engine.health()
        tree = tree_of(engine.servers[0])
        for pid in tree:
            for name in ("cmdline", "environ"):
                assert key.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        folder = engine.servers[0].log_path.parent
        assert not list(folder.glob("*.yaml")), "It has been read."
        # SGLang does write it.
        assert key in engine.servers[0].log_path.read_text()
        shown = [
            repr(engine),
            repr(engine.servers[0]),
            engine.servers[0].log_tail(10**6),
        ]
        shown += [str(vars(engine)), str(dict(engine.capabilities.server_args))]

        with ThreadPoolExecutor() as pool:
            call = pool.submit(
                engine.generate,
                input_ids=[[5]] * 8,
                sampling_params={"max_new_tokens": 2000, "ignore_eos": True},
            )
            while not run_sync(engine.control.running_requests()):
                assert not call.done()
            launcher = descendants(engine.servers[0].pid)[0]
            os.kill(launcher, signal.SIGKILL)
            error = call.exception(60)
        assert isinstance(error, ServerDiedError)
        assert "The end of its log:\n" in str(error)
        assert " batch, #" in str(error), "What the server did last."
        wait_until_gone(tree)
        shown.append(str(error))
    # The log of a server that died is kept, and the key in it is not.
    shown.append((folder / "server.log").read_text())
    assert os.listdir(folder) == ["server.log"]
    assert [text for text in shown if key in text] == []
