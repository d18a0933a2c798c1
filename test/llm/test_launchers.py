"""Where an engine is started: under launchers, in loops, threads, actors and pipes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.watchdog import descendants, is_alive

SECONDS = 15.0
"""For a process to be gone, on a loaded machine."""

PROGRAM = Path(__file__).with_name("launcher_program.py")
ECHO = Path(__file__).with_name("echo_engine.py")


@pytest.mark.timeout(300)
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
    file = tmp_path_factory.mktemp("echo") / "python"
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{ECHO}" "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def start(tiny_model_path: str, python: str) -> Callable[[], AsyncSGLang]:
    """Starts an engine that owns such a server."""
    return partial(
        AsyncSGLang.from_pretrained, tiny_model_path, device="cpu", python=python
    )


def ended(pid: int) -> bool:
    deadline = time.monotonic() + SECONDS
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.mark.parametrize("used", [False, True])
def test_an_engine_that_is_dropped_ends_its_servers(start, used):
    gc.disable()
    try:
        engine = start()
        if used:
            assert engine.generate(**GENERATE)[0].token_ids == [5, 6, 7, 5]
        pids = [engine.servers[0].pid, *descendants(engine.servers[0].pid)]
        fleet = weakref.ref(engine._fleet)
        del engine
        assert all(map(ended, pids))
        assert fleet() is None
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
    assert ended(first)
    assert is_alive(second)
    names["engine"].shutdown()
    assert ended(second)


def test_a_thread_that_ends_leaves_its_engine_behind(start):
    engines = []
    thread = threading.Thread(target=lambda: engines.append(start()))
    thread.start()
    thread.join()
    with engines.pop() as engine:
        assert engine.generate(**GENERATE)[0].token_ids == [5, 6, 7, 5]
        assert engine.servers[0].state == "ready"
        pid = engine.servers[0].pid
    assert ended(pid)


SCRIPT = """
from torchrl_sglang import AsyncSGLang
engine = AsyncSGLang.from_pretrained({model!r}, device="cpu", python={python!r})
answers = engine.generate(input_ids=[5, 6, 7], sampling_params={{"max_new_tokens": 4}})
print(answers[0].token_ids, engine.servers[0].pid)
"""


def test_a_script_on_standard_input(tiny_model_path, python):
    done = subprocess.run(
        [sys.executable, "-"],
        input=SCRIPT.format(model=tiny_model_path, python=python),
        capture_output=True,
        text=True,
        timeout=100,
    )
    said, _, pid = done.stdout.strip().rpartition(" ")
    assert said == "[5, 6, 7, 5]", done.stderr
    # The script ends without a word about its servers.
    assert ended(int(pid))
