"""The example of a launcher over ssh, with a program of this machine in its place."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.forked_starts import processes_below
from helpers.waiting import wait_until

import torchrl_sglang
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch.ports import find_free_port
from torchrl_sglang.backends.launch.watchdog import is_alive
from torchrl_sglang.errors import ConfigurationError, ServerStartError
from torchrl_sglang.testing.launcher_contract import LauncherContract

ROOT = Path(torchrl_sglang.__file__).parents[1]
PATIENCE = 120.0


@pytest.fixture
def ssh(monkeypatch, tmp_path):
    """Runs what is to run on another host on this one, with a Python named python3."""
    programs = {
        "ssh": '#!/bin/sh\nshift 2\nexec sh -c "$*"\n',
        "python3": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(ROOT / "examples" / "ssh_launcher")
    import ssh_launcher

    return ssh_launcher


@pytest.mark.slow
def test_servers_over_ssh(ssh, tiny_model_path, score):
    hosts = ["127.0.0.21", "127.0.0.22"]
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        num_replicas=2,
        device="cpu",
        router_policy=None,
        launcher=ssh.SSH(hosts, port=find_free_port()),
    ) as engine:
        assert [server.host for server in engine.servers] == hosts
        prompts = [[5, 6, 7], [8, 9]]
        params = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0.0}
        before = engine.generate(
            input_ids=prompts, sampling_params=params, return_logprobs=True
        )
        for prompt, answer in zip(prompts, before, strict=True):
            expected = score([*prompt, *answer.token_ids])[-6:]
            assert answer.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
        first = engine.servers[0]
        os.kill(first.pid, signal.SIGKILL)
        wait_until(
            lambda: (now := engine.servers[0]) is not first and now.state == "ready"
        )
        after = engine.generate(input_ids=prompts, sampling_params=params)
        assert [a.token_ids for a in after] == [b.token_ids for b in before]
        trees = [process for s in engine.servers for process in processes_below(s.pid)]
        assert len(trees) > 6
    wait_until(lambda: not any(map(is_alive, trees)))


@pytest.mark.slow
def test_a_start_that_fails(ssh, tmp_path):
    with pytest.raises(ServerStartError, match=r"config\.json|not a model|hub"):
        AsyncSGLang.from_pretrained(
            tmp_path / "none",
            device="cpu",
            launcher=ssh.SSH(["127.0.0.21"], port=find_free_port()),
        )


def test_invalid_arguments_are_refused(ssh, tiny_model_path):
    with pytest.raises(ConfigurationError, match="2 servers need as many hosts"):
        AsyncSGLang.from_pretrained(
            tiny_model_path, num_replicas=2, launcher=ssh.SSH(["127.0.0.21"])
        )


@pytest.mark.parametrize("launcher", ["kubernetes", None, 3, object(), "bind"])
def test_incomplete_placements_are_refused(tiny_model_path, launcher):
    if launcher == "bind":
        # A class in place of an object, and an object whose bind() returns nothing.
        launcher = type("Half", (), {"bind": lambda self, *args, **options: None})()
    with pytest.raises(ConfigurationError, match="is neither 'local', 'ray' nor"):
        AsyncSGLang.from_pretrained(tiny_model_path, launcher=launcher)


@pytest.mark.slow
class TestContract(LauncherContract):
    """The suite for launchers, over the example."""

    @pytest.fixture(autouse=True)
    def example(self, ssh, tiny_model_path):
        self.place = ssh.SSH(["127.0.0.21", "127.0.0.22"], port=find_free_port())
        self.model = tiny_model_path

    def make(self, num_servers):
        spec = {"model": self.model, "device": "cpu"}
        options = {"start_timeout": 120.0, "parallel": None, "cuda_devices": None}
        return self.place.bind(num_servers, spec, **options)

    def end(self, server):
        os.kill(server.pid, signal.SIGKILL)
