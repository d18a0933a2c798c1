"""``gateway`` in a separate process, with a fake server and with a real one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import get_args

import pytest
import requests
from helpers.forked_starts import processes_below, trainer_python

from torchrl_sglang import Gateway
from torchrl_sglang.cli.gateway import LOGPROBS_MODES
from torchrl_sglang.types import LogProbsMode

BUDGET_SECONDS = 300.0


@contextlib.contextmanager
def gateway(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [trainer_python(), "-m", "torchrl_sglang", "gateway", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(url: str, key: str, content: str) -> requests.Response:
    return requests.post(
        f"{url}/v1/chat/completions",
        json={
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
        },
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )


def make_session(url: str, key: str, **about: str) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(f"{url}/sessions", json=about, headers=headers, timeout=60)


def end(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)
    out, errors = process.communicate(timeout=BUDGET_SECONDS)
    assert process.returncode == 0, errors
    assert out == ""
    assert "Traceback" not in errors


def test_beside_a_running_server(fake, tmp_path):
    template = tmp_path / "template"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}!")
    words = ["--url", fake.url, "--path", str(tmp_path / "s")]
    words += ["--chat-template", str(template), "--max-turns", "1"]
    with gateway(*words, "--json") as process:
        about = json.loads(process.stdout.readline())
        assert about["urls"] == [fake.url]
        assert about["model"] == fake.model_path
        assert about["sessions"] == 0
        made = make_session(about["url"], about["api_key"], name="a").json()
        assert ask(made["url"], made["key"], "hi").status_code == 200
        assert len(fake.payloads()[0]["input_ids"][0]) == len("hi!")
        assert "max_turns=1" in ask(made["url"], made["key"], "hi").text
        end(process, signal.SIGTERM)
        with pytest.raises(requests.ConnectionError):
            ask(made["url"], made["key"], "hi")
    with gateway(*words, TORCHRL_SGLANG_GATEWAY_KEY="own") as process:
        url = process.stdout.readline().strip()
        found = make_session(url, "own", name="a").json()
        assert found["key"] == made["key"]
        # A key that the user has given is not printed: the address is all.
        end(process, signal.SIGINT)


@pytest.mark.slow
def test_beside_servers_that_it_starts(tiny_model_path, engine, tmp_path):
    path = tmp_path / "sessions.sqlite"
    words = ["--device=cpu", "--context-length=256"]
    words += ["--logprobs-mode=behaviour", "--token-column=sampling_support"]
    words += [f"--path={path}"]
    with gateway(tiny_model_path, *words) as process:
        url, key = (process.stdout.readline().strip() for _ in range(2))
        made = make_session(url, key).json()
        answer = ask(made["url"], made["key"], "hi").json()
        assert 0 < answer["usage"]["completion_tokens"] <= 4
        assert processes_below(process.pid)
        end(process, signal.SIGTERM)
        assert not processes_below(process.pid)
    recorded = Gateway(engine, path=path, logprobs_mode="behaviour")
    (turn,) = recorded.sessions[0].turns
    assert {"sampling_support", "sampling_temperature"} <= {*turn.completion.columns}
    assert get_args(LogProbsMode) == LOGPROBS_MODES


def test_a_port_in_use_is_reported(fake):
    port = fake.url.rpartition(":")[2]
    with gateway("--url", fake.url, "--port", port) as process:
        _, errors = process.communicate(timeout=BUDGET_SECONDS)
        assert process.returncode == 2
        assert f"--port={port} is not a free port of '127.0.0.1'" in errors
