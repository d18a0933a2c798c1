"""Where an engine is started: under launchers, in loops, threads, actors and pipes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers.echo_engine import make_interpreter
from helpers.engines import fleet_of
from helpers.fake_server import FakeServer
from helpers.waiting import wait_until_gone

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.backends.client.http import limit_in_flight
from torchrl_sglang.backends.launch.watchdog import descendants, is_alive

SECONDS = 60.0
"""For a process to be gone, on a loaded machine."""

PROGRAM = Path(__file__).with_name("launcher_program.py")
# New interpreters import PyTorch, which takes a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_rank_0_under_torchrun(tiny_model_path, tmp_path):
    """Torchrun's variables would have the server wait for ever."""
    found = tmp_path / "found.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(PROGRAM), tiny_model_path, str(found)),
        ],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(found.read_text())
    assert said["before"] < 1e-4
    assert said["stale"] > 1e-2
    assert said["after"] < 1e-4
    assert said["version"] == "1"


GENERATE = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose server is there at once and computes nothing."""
    return make_interpreter(tmp_path_factory.mktemp("echo"))


@pytest.fixture
def start(tiny_model_path: str, python: str) -> Callable[[], AsyncSGLang]:
    """Starts an engine that owns such a server."""
    return partial(
        AsyncSGLang.from_pretrained, tiny_model_path, device="cpu", python=python
    )


@pytest.mark.parametrize("used", [False, True])
def test_an_engine_that_is_dropped_ends_its_servers(start, used):
    gc.disable()
    try:
        engine = start()
        if used:
            assert engine.generate(**GENERATE)[0].token_ids == [5, 6, 7, 5]
        pids = [engine.servers[0].pid, *descendants(engine.servers[0].pid)]
        fleet = weakref.ref(fleet_of(engine))
        del engine
        wait_until_gone(pids)
        assert fleet() is None
    finally:
        gc.enable()


def test_a_start_ends_servers_that_only_a_cycle_holds(start):
    """A scheme and its sender hold one another, and the engine."""
    gc.disable()
    try:
        engine = start()
        pid = engine.servers[0].pid
        sender = SGLangWeightSyncScheme(engine).create_sender()
        del engine, sender
        assert is_alive(pid)
        with start():
            wait_until_gone([pid])
    finally:
        gc.enable()


def test_a_notebook_cell_that_runs_twice(start):
    """The cell runs inside the notebook's event loop; its names are kept."""
    cell = "engine = start(); answer = engine.generate(**GENERATE)"
    names = {"start": start, "GENERATE": GENERATE}
    pids = []

    async def run_cell() -> None:
        exec(cell, names)
        pids.append(names["engine"].servers[0].pid)
        answers = await names["engine"].agenerate(**GENERATE)
        assert answers[0].token_ids == names["answer"][0].token_ids == [5, 6, 7, 5]

    async def notebook() -> None:
        await run_cell()
        await run_cell()

    asyncio.run(notebook())
    first, second = pids
    wait_until_gone([first])
    assert is_alive(second)
    names["engine"].shutdown()
    wait_until_gone([second])


def test_a_thread_that_ends_leaves_its_engine_behind(start):
    engines = []
    thread = threading.Thread(target=lambda: engines.append(start()))
    thread.start()
    thread.join()
    with engines.pop() as engine:
        assert engine.generate(**GENERATE)[0].token_ids == [5, 6, 7, 5]
        assert engine.servers[0].state == "ready"
        pid = engine.servers[0].pid
    wait_until_gone([pid])


SCRIPT = """
import json, os, pickle, resource, sys
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.client.http import open_files_limit
from torchrl_sglang.errors import ServerTimeoutError

model, python, *urls = sys.argv[1:]
found = {}
# Its servers have the limit of the machine, and not that of this process.
engine = AsyncSGLang.from_pretrained(model, device="cpu", python=python)
answers = engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4})
found["tokens"], found["pid"] = answers[0].token_ids, engine.servers[0].pid

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
AsyncSGLang.connect(urls=urls)
found["raised_to"] = open_files_limit()

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
prompts = [[5 + i % 90] for i in range(4000)]
two = AsyncSGLang.connect(urls=urls)

def generate(count):
    answers = two.generate(
        input_ids=prompts[:count], sampling_params={"max_new_tokens": 2}
    )
    return [answer.token_ids for answer in answers] == [p * 2 for p in prompts[:count]]

found["all"] = generate(4000)
# Others take all but a few of the files.
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    for _ in range(40):
        os.close(taken.pop())
found["all_with_few_files"] = generate(400)
found["retries"] = two.stats().retries
for file in taken:
    os.close(file)
# It has no connection yet, and no file is left, whatever others close meanwhile.
copy = pickle.loads(pickle.dumps(two))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 1024))
try:
    copy.generate(input_ids=[5], timeout=0.5)
except ServerTimeoutError as error:
    found["error"] = str(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def script_says(tiny_model_path: str, python: str) -> dict:
    """What a script says that is on standard input, with few open files allowed."""
    # The servers' side of 1,024 connections is in this process.
    limit_in_flight(4096)
    with FakeServer(tiny_model_path) as one, FakeServer(tiny_model_path) as two:
        done = subprocess.run(
            [sys.executable, "-", tiny_model_path, python, one.url, two.url],
            input=SCRIPT,
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 0, done.stderr
    # What it has killed may be noticed after it has said what it found.
    lines = done.stdout.splitlines()
    (found,) = (line for line in lines if line.startswith("{"))
    return {**json.loads(found), "log": "\n".join(lines)}


@pytest.mark.slow
def test_a_script_on_standard_input(script_says):
    assert script_says["tokens"] == [5, 6, 7, 5]
    # The script ends without a word about its servers.
    wait_until_gone([script_says["pid"]])


@pytest.mark.slow
def test_a_limit_on_open_files_is_raised(script_says):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert script_says["raised_to"] >= min(most, 2049)


@pytest.mark.slow
def test_4000_prompts_with_1024_open_files(script_says):
    assert script_says["all"]
    assert "1024 files open" in script_says["log"]


@pytest.mark.slow
def test_a_connection_that_finds_no_file_waits(script_says):
    """It is this process's own fault: no server is asked again for it."""
    assert script_says["all_with_few_files"]
    assert script_says["retries"] == 0
    assert "(3 are allowed)" in script_says["error"]
    assert "ulimit -n" in script_says["error"]


class Trainer:
    """An actor that starts an engine, and tells what its server inherited."""

    def __init__(self, model: str, python: str) -> None:
        from torchrl_sglang import AsyncSGLang

        self._engine = AsyncSGLang.from_pretrained(model, device="cpu", python=python)

    def found(self) -> dict:
        (answer,) = self._engine.generate(**GENERATE)
        server = self._engine.servers[0]
        inherited = Path(f"/proc/{server.pid}/environ").read_text()
        return {
            "tokens": answer.token_ids,
            "pid": server.pid,
            "own": sorted(os.environ),
            "server": sorted(line.partition("=")[0] for line in inherited.split("\0")),
        }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_ray_actor_has_an_engine_until_it_is_killed(
    tiny_model_path, python, ray_here
):
    actor = ray_here.remote(Trainer).remote(tiny_model_path, python)
    found = ray_here.get(actor.found.remote(), timeout=250)
    assert found["tokens"] == [5, 6, 7, 5]
    left = {"RAY_JOB_ID", "RAY_RAYLET_PID", "OMP_NUM_THREADS"}
    assert left <= set(found["own"])
    assert not left & set(found["server"])
    assert is_alive(found["pid"])
    ray_here.kill(actor)
    wait_until_gone([found["pid"]])
