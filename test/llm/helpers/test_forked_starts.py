"""Servers that are forked in tests do what truly started ones do."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from helpers.forked_starts import processes_below, true_interpreter

from torchrl_sglang import make_sglang_server
from torchrl_sglang.backends.launch.watchdog import is_alive

SECONDS = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_server_ends_with_its_watchdog(tiny_model_path, number):
    server = make_sglang_server(tiny_model_path, device="cpu")
    tree = processes_below(server.pid)
    assert len(tree) >= 4
    os.kill(server.pid, number)
    deadline = time.monotonic() + SECONDS
    while any(map(is_alive, tree)):
        assert time.monotonic() < deadline
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
