"""``serve`` in a separate process, with a real server.

One command starts as a user's does; the others are forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from helpers.echo_engine import make_interpreter
from helpers.forked_starts import forked_process, processes_below, trainer_python
from helpers.ray_cluster import address, processes, ray_cluster
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch.watchdog import (
    descendants,
    is_alive,
    processes_by_parent,
)
from torchrl_sglang.cli import main
from torchrl_sglang.cli.serve import receiver_arguments, wait
from torchrl_sglang.errors import ServerDiedError
from torchrl_sglang.gateway.vllm.broadcasts import LOADERS

BUDGET_SECONDS = 300.0


def start(
    *words: str, python: str | None = None, **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python or trainer_python(), "-m", "torchrl_sglang", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )


@contextlib.contextmanager
def serving(
    *words: str, python: str | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    process = start("serve", *words, python=python, **environment)
    try:
        yield process
    finally:
        # Its servers find that it has ended, whatever a test has left of it.
        process.kill()
        process.communicate()


def answers(url: str) -> bool:
    try:
        AsyncSGLang.connect(url)
    except ConnectionError:
        return False
    return True


def is_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"launch.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def end(process: subprocess.Popen[str], number: int) -> tuple[str, str]:
    """Sends a signal, and returns output and errors once no process is left."""
    tree = processes_below(process.pid)
    process.send_signal(number)
    shown = process.communicate(timeout=300)
    wait_until(lambda: not any(map(is_alive, tree)), 10)
    return shown


@pytest.mark.slow
def test_serving_until_sigint(tiny_model_path, tmp_path):
    key = tmp_path / "key"
    key.write_text("of-the-file\n")
    with serving(
        tiny_model_path,
        "--device=cpu",
        "--json",
        "--max-model-len",
        "256",
        "--api-key-file",
        str(key),
        python=sys.executable,
        TORCHRL_SGLANG_API_KEY="of-the-environment",
    ) as process:
        about = json.loads(process.stdout.readline())
        assert about["pid"] == process.pid
        assert about["urls"] == [about["url"]]
        assert about["router_url"] is None
        assert about["model"] == tiny_model_path
        assert about["weight_version"] == "default"
        for pid in (process.pid, *descendants(process.pid)):
            assert b"of-the-file" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        with AsyncSGLang.connect(about["url"], api_key="of-the-file") as engine:
            assert engine.capabilities.max_context == 256
            assert engine.capabilities.version == about["version"]
            assert engine.generate(input_ids=[[5, 6]])[0].token_ids
        out, errors = end(process, signal.SIGINT)
        assert process.returncode == 0, errors
        assert out == ""
        assert "Traceback" not in errors
        assert not answers(about["url"])


def test_serving_until_sigterm_prints_the_address_alone(tiny_model_path):
    with serving(tiny_model_path, "--device", "cpu") as process:
        url = process.stdout.readline().strip()
        assert answers(url)
        out, errors = end(process, signal.SIGTERM)
        assert process.returncode == 0, errors
        assert out == ""


@pytest.mark.slow
def test_vllm_s_protocol_in_front_of_the_server(tiny_model_path):
    words = ("--device", "cpu", "--api", "vllm", "--json")
    with serving(tiny_model_path, *words) as process:
        about = json.loads(process.stdout.readline())
        assert about["server_url"] in about["urls"]
        sampling = {"max_tokens": 4, "ignore_eos": True}
        body = {"token_ids": [5, 6], "sampling_params": sampling}
        url = f"{about['url']}/inference/v1/generate"
        (choice,) = httpx.post(url, json=body, timeout=60).json()["choices"]
        assert len(choice["token_ids"]) == 4
        # Its servers can join a trainer's process group.
        with AsyncSGLang.connect(about["server_url"]) as engine:
            assert set(LOADERS) <= set(engine.capabilities.weight_loaders)
        out, errors = end(process, signal.SIGTERM)
        assert (process.returncode, out) == (0, ""), errors


@pytest.mark.parametrize(
    ("inherited", "given", "expected"),
    [
        (None, {}, {"NCCL_CUMEM_ENABLE": "-2"}),
        ("0", {}, {}),
        (None, {"environment": {"A": "1"}}, {"NCCL_CUMEM_ENABLE": "-2", "A": "1"}),
        ("1", {"environment": {"NCCL_CUMEM_ENABLE": "0"}}, {"NCCL_CUMEM_ENABLE": "0"}),
    ],
)
def test_servers_for_vllm_s_trainers_have_their_setting_of_nccl(
    monkeypatch, inherited, given, expected
):
    """NCCL's default, which is ``-2``; SGLang would set ``0``."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if inherited is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", inherited)
    assert receiver_arguments(given)["environment"] == expected


def test_an_address_for_vllm_s_protocol_is_refused_before_a_start(
    tiny_model_path, capsys
):
    command = ["serve", tiny_model_path, "--api", "vllm"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, words in (
            (["--port", port], f"--port={port} is not a free port"),
            (["--host", "0.0.0.0"], "can be reached from other machines"),
        ):
            assert main([*command, *options]) == 2
            errors = capsys.readouterr().err
            assert words in errors
            assert "Starting" not in errors


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_start_that_is_interrupted_leaves_nothing(tiny_model_path, number):
    with serving(tiny_model_path, "--device", "cpu") as process:
        wait_until(lambda: any(map(is_server, processes_below(process.pid))))
        out, errors = end(process, number)
        assert process.returncode == 128 + number
        assert out == ""
    # It may have been about to ask the server something.
    assert "interrupted.\n" in errors
    assert "Traceback" not in errors


def test_an_interrupt_before_anything_was_started(tiny_model_path):
    with serving(tiny_model_path, "--device", "cpu") as process:
        # The command runs, and has not come to the server yet.
        assert "Starting" in process.stderr.readline()
        _, errors = end(process, signal.SIGINT)
        assert process.returncode == 128 + signal.SIGINT, errors
        assert "Traceback" not in errors


def test_a_start_that_fails_is_reported_in_words(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    # Its log is kept, where the test's other files are.
    process = start("serve", str(tmp_path), "--device", "cpu", TMPDIR=str(tmp_path))
    out, errors = process.communicate(timeout=BUDGET_SECONDS)
    assert process.returncode == 1
    assert out == ""
    assert "ended with status" in errors
    assert "The end of its log" in errors
    # The server's own traceback is the end of its log; there is none of ours.
    assert "torchrl_sglang/cli" not in errors


@pytest.mark.slow
def test_several_servers_behind_a_router(tiny_model_path, capsys):
    with serving(tiny_model_path, "--device=cpu", "--num-replicas=2") as process:
        router, *urls = [process.stdout.readline().strip() for _ in range(3)]
        assert len({router, *urls}) == 3
        with AsyncSGLang.connect(router_url=router) as engine:
            assert set(engine.control.urls) == set(urls)
            assert engine.generate(input_ids=[[5, 6]])[0].token_ids
        words = ["--prompts=6", "--prompt-tokens=8", "--new-tokens=4", "--repeats=1"]
        bench = ["bench", "throughput", *words, "--json"]
        for where in (["--router-url", router], [f"--url={url}" for url in urls]):
            assert main([*bench, *where]) == 0
            (report,) = json.loads(capsys.readouterr().out)["reports"]
            assert report["servers"] == 2
            assert report["throughput"]["ratio"] > 0
        end(process, signal.SIGINT)
        assert process.returncode == 0


@pytest.mark.slow
def test_a_server_that_is_lost_ends_the_command(tiny_model_path, tmp_path):
    words = ("--device=cpu", "--max-restarts=0")
    with serving(tiny_model_path, *words, TMPDIR=str(tmp_path)) as process:
        assert process.stdout.readline()
        children = processes_by_parent()
        (watchdog,) = dict(children[forked_process(process.pid)])
        (server,) = filter(is_server, dict(children[watchdog]))
        os.kill(server, signal.SIGKILL)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "No server runs any more" in errors


def test_a_server_whose_restart_failed_ends_the_command():
    """What had ended was stopped before it was started again."""
    reason = "It was started again once and has ended again; it is given up."
    lost = SimpleNamespace(state="lost", reason=reason)
    engine = SimpleNamespace(
        servers=[SimpleNamespace(state="stopped")],
        stats=lambda: SimpleNamespace(servers=[lost]),
    )
    with pytest.raises(ServerDiedError, match="it is given up"):
        wait(engine)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_serving_on_a_ray_cluster(tiny_model_path, tmp_path, number):
    """Its servers are on both nodes, and none is left of them."""
    pytest.importorskip("ray")
    python = make_interpreter(tmp_path)
    options = ["--launcher=ray", "--ray-strategy=SPREAD", "--num-replicas=2"]
    where = [f"--python={python}", "--device=cpu", "--json"]
    node = {"num_cpus": 1}
    with (
        ray_cluster(node, node) as cluster,
        serving(
            tiny_model_path, *options, *where, RAY_ADDRESS=cluster.address
        ) as process,
    ):
        about = json.loads(process.stdout.readline())
        hosts = {url.rpartition(":")[0] for url in about["urls"]}
        assert hosts == {f"http://{address(index)}" for index in range(2)}
        # Everything is on loopback.
        assert "api_key" not in about
        with AsyncSGLang.connect(router_url=about["router_url"]) as engine:
            assert engine.generate(input_ids=[[5, 6]])[0].token_ids
        assert processes(python)
        process.send_signal(number)
        process.wait(60)
        wait_until(lambda: not processes(python), 60)


@pytest.mark.slow
def test_a_measurement_that_is_interrupted_leaves_nothing(tmp_path):
    words = ("throughput", "tiny", "--device=cpu", "--prompts=999", "--new-tokens=999")
    process = start("bench", *words, TMPDIR=str(tmp_path))
    try:
        while "Measuring" not in process.stderr.readline():
            assert process.poll() is None
        _, errors = end(process, signal.SIGINT)
        assert process.returncode == 128 + signal.SIGINT
        assert "Traceback" not in errors
        assert list(tmp_path.glob("torchrl_sglang*")) == []
    finally:
        process.kill()
        process.communicate()
