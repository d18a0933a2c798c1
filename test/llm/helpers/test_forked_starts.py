"""Servers that are forked in tests do what truly started ones do."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from helpers.forked_starts import processes_below, true_interpreter

from torchrl_sglang import AsyncSGLang, make_sglang_server
from torchrl_sglang.backends.launch.watchdog import descendants, is_alive

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12]]
GREEDY = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
SECONDS = 60.0


def forks(engine: AsyncSGLang) -> set[int]:
    pid = engine.servers[0].pid
    return set(processes_below(pid)) - set(descendants(pid))


def test_a_forked_server_answers_as_a_truly_started_one(engine, engine_with_grammar):
    """To the bit, which two computations of one program are."""
    true = engine_with_grammar
    assert len(forks(engine)) >= 3, "A launcher, a scheduler and a detokenizer."
    assert not forks(true)
    answers = [
        one.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprobs=True)
        for one in (engine, true)
    ]
    forked, expected = (
        [(answer.token_ids, answer.log_probs) for answer in each] for each in answers
    )
    assert forked == expected
    own = {"port", "random_seed", "nccl_port", "startup_time", "grammar_backend"}
    asked = [
        {k: v for k, v in one.capabilities.server_args.items() if k not in own}
        for one in (engine, true)
    ]
    assert asked[0] == asked[1]


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
