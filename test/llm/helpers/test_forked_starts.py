"""Servers and trainers that are forked in tests do what truly started ones do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.forked_starts import (
    forked_process,
    processes_below,
    trainer_python,
    true_interpreter,
)

from torchrl_sglang import make_sglang_server
from torchrl_sglang.backends.launch.watchdog import is_alive

SECONDS = 60.0

FACTS = """
import os, signal, sys, threading
print(sys.argv, sys.path, __name__, sys.modules["__main__"].__dict__ is globals())
print(sorted(name for name in globals() if not name.startswith("__")))
print(os.getcwd(), os.environ["FACT"], sys.executable, sys.flags.optimize)
print([signal.getsignal(number) for number in range(1, 32)], threading.active_count())
print(sys.stdin.read(), end="")
sys.stderr.write("to the error stream")
"""

ENDINGS = {
    "a status": "raise SystemExit(7)",
    "an exception": "raise ValueError('its own')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)",
    "an exit handler": "import atexit; atexit.register(print, 'at exit', flush=True)",
}


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + SECONDS
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
    return True


def own_part(stderr: str) -> str:
    """Returns an output without what some releases of Triton print at the exit."""
    return stderr.partition("nanobind: leaked")[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_server_ends_with_its_watchdog(tiny_model_path, number):
    server = make_sglang_server(tiny_model_path, device="cpu")
    tree = processes_below(server.pid)
    assert len(tree) >= 4
    os.kill(server.pid, number)
    assert all(map(is_gone, tree))
    server.stop()


def test_anything_else_is_run_by_the_true_interpreter(forking_python):
    program = "import sys; print(sys.prefix, sys.argv[1:])"
    shown = [
        subprocess.run(
            [python, "-c", program, "a b"], capture_output=True, text=True, check=True
        ).stdout
        for python in (forking_python, true_interpreter(forking_python))
    ]
    assert shown[0] == shown[1]
    assert "['a b']" in shown[0]


def run(python: str, arguments: list[str], folder, **options):
    return subprocess.run(
        [python, *arguments],
        input="a line\nand another\n",
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "FACT": "ä b", "PYTHONPATH": f"{folder}{os.pathsep}.."},
        timeout=SECONDS,
        **options,
    )


@pytest.mark.parametrize("way", ["-c", "-m", "file", "options", "standard input"])
def test_a_forked_program_finds_what_a_started_one_does(tmp_path, way):
    (tmp_path / "facts.py").write_text(FACTS)
    arguments = {
        "-c": ["-c", FACTS, "one", "-two"],
        "-m": ["-m", "facts", "-c", "two"],
        "file": [str(tmp_path / "facts.py"), "-m", "two"],
        "options": ["-O", "-c", FACTS],
        "standard input": ["-", "one"],
    }[way]
    forked, started = (
        run(python, arguments, tmp_path)
        for python in (trainer_python(), sys.executable)
    )
    assert forked.returncode == started.returncode
    assert forked.stdout == started.stdout
    assert own_part(forked.stderr) == own_part(started.stderr)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_forked_program_ends_as_a_started_one_does(tmp_path, ending):
    forked, started = (
        run(python, ["-c", ENDINGS[ending]], tmp_path)
        for python in (trainer_python(), sys.executable)
    )
    assert forked.returncode == started.returncode
    assert forked.stdout == started.stdout
    last = [own_part(each.stderr).splitlines()[-1:] for each in (forked, started)]
    assert last[0] == last[1]


WAITS = """
import signal, sys, time
sys.modules["torchrl_sglang"], sys.modules["torch"]
signal.signal(signal.SIGTERM, lambda number, frame: print("terminated", flush=True))
# Whoever runs the tests may ignore it, as a shell does for what is in its background.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("begun", flush=True)
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    print("interrupted", flush=True)
while True:
    time.sleep(0.01)
"""


def test_signals_reach_a_forked_program():
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([trainer_python(), "-c", WAITS], **pipes) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            program = forked_process(process.pid)
            assert program != process.pid
            assert processes_below(process.pid) == [program]
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "terminated\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert is_alive(program)
        finally:
            process.kill()
    assert is_gone(program)


def test_a_forked_program_that_is_killed():
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([trainer_python(), "-c", WAITS], **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        os.kill(forked_process(process.pid), signal.SIGKILL)
        assert process.wait(SECONDS) == -signal.SIGKILL
