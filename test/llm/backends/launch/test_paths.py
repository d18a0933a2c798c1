"""Relative paths belong to the folder that the engine was made in."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.echo_engine import make_interpreter
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch.launcher import start_servers
from torchrl_sglang.backends.launch.local import LocalLauncher
from torchrl_sglang.backends.launch.paths import absolute_paths
from torchrl_sglang.backends.launch.ports import find_free_port
from torchrl_sglang.backends.launch.process import Command, ServerProcess, short_folder
from torchrl_sglang.errors import ConfigurationError, ServerStartError
from torchrl_sglang.testing.tiny_model import save_tiny_model


@pytest.fixture
def folders(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """The folder that the test is in, with a model, and one with another model."""
    for name, width in (("here", 64), ("elsewhere", 128)):
        save_tiny_model(tmp_path / name / "model", hidden_size=width)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here", tmp_path / "elsewhere"


def test_existing_paths_become_absolute(folders):
    here, _ = folders
    (here / "template.jinja").touch()
    model, template = str(here / "model"), str(here / "template.jinja")
    given = {
        "model": Path("model"),
        "tokenizer_path": "./model",
        "speculative_draft_model_path": "model",
        "chat_template": "template.jinja",
        "lora_paths": ["a=model", "model", "owner/adapter"],
        "download_dir": "not/yet",
        "python": "bin/python",
        "served_model_name": "model",
        "context_length": 64,
        "revision": "model",
    }
    assert absolute_paths(given) == {
        **given,
        "model": model,
        "tokenizer_path": model,
        "speculative_draft_model_path": model,
        "chat_template": template,
        "lora_paths": [f"a={model}", model, "owner/adapter"],
        "download_dir": str(here / "not/yet"),
        "python": str(here / "bin/python"),
    }


def test_paths_that_do_not_exist_stay(folders):
    given = {
        "model": "Qwen/Qwen2.5-0.5B",
        "tokenizer_path": None,
        "chat_template": "chatml",
        "lora_paths": {"a": "owner/adapter"},
        "python": "python",
    }
    assert absolute_paths(given) == given


def test_a_server_that_is_started_again_elsewhere_has_the_same_model(
    folders, tmp_path, monkeypatch
):
    here, elsewhere = folders
    spec = {"model": "model", "device": "cpu", "python": make_interpreter(tmp_path)}
    launcher = LocalLauncher([spec])
    (server,) = start_servers(launcher)
    server.stop()
    monkeypatch.chdir(elsewhere)
    again = launcher.restart(0)
    again.wait_ready()
    for each in (server, again):
        line = each.command.line
        assert line[line.index("--model-path") + 1] == str(here / "model")
    launcher.stop([again])


def test_a_copy_of_an_engine_reads_the_same_model(folders, monkeypatch):
    """Where the server's own path cannot be read, and the user names a folder."""
    here, elsewhere = folders
    with FakeServer(here / "model") as server:
        server.model_path = "/not/here"
        engine = AsyncSGLang.connect(server.url, model="model")
        monkeypatch.chdir(elsewhere)
        copy = pickle.loads(pickle.dumps(engine))
        assert copy.model_path == str(here / "model")
        for each in (engine, copy):
            shape = each.get_model_metadata()["model.norm.weight"][1]
            assert tuple(shape) == (64,)
            each.shutdown()


def test_a_server_with_a_relative_path(folders, monkeypatch):
    """Its folder is not known, and what has the name here can be another model."""
    here, elsewhere = folders
    monkeypatch.chdir(elsewhere)
    with FakeServer(here / "model") as server:
        server.model_path = "model"
        with pytest.raises(ConfigurationError) as caught:
            AsyncSGLang.connect(server.url)
        told = str(caught.value)
        assert f"pass model={str(elsewhere / 'model')!r}" in told
        assert "can hold another model" in told
        with AsyncSGLang.connect(server.url, model=str(here / "model")) as engine:
            assert engine.model_path == str(here / "model")


SOCKETS = """
import http.server, os, socket, sys, tempfile
with socket.socket(socket.AF_UNIX) as made:
    made.bind(os.path.join(tempfile.gettempdir(), "scheduler_input_ipc"))
class Answer(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


@pytest.mark.parametrize("length", [10, 60, 95, 200])
def test_servers_can_make_sockets_wherever_temporary_files_are(
    tmp_path, monkeypatch, length
):
    """A socket's path has at most 107 characters."""
    usual = tmp_path / ("x" * length)
    usual.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    port = find_free_port()
    command = Command(
        line=(sys.executable, "-c", SOCKETS, str(port)),
        environment=dict(os.environ),
        url=f"http://127.0.0.1:{port}",
    )
    with ServerProcess(command) as server:
        server.wait_ready()
        folder = server.log_path.parent
        assert (folder / "scheduler_input_ipc").is_socket()
    assert not folder.exists()


def test_a_machine_without_a_short_folder_is_an_error(tmp_path):
    with pytest.raises(ServerStartError, match="Set TMPDIR to a short path"):
        short_folder("/" + 100 * "x", [str(tmp_path / "none")])
