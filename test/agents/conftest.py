"""The environments of the clients, their processes, and the model that they talk to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.agent_clients import CLIENTS, ENVIRONMENTS, Client, Program, Relay
from helpers.agent_table import PROGRAMS
from helpers.scripted_server import Reply, ScriptedServer, save_scripted_model
from helpers.tool_template import gateway_of
from transformers import AutoTokenizer

from torchrl_sglang import AsyncSGLang, Gateway

MODEL_TEXTS = [path.read_text() for path in sorted(CLIENTS.glob("*.py"))]
"""What the merges of the model's tokenizer are learnt from."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_scripted_model(folder, texts=MODEL_TEXTS)


@pytest.fixture(scope="session")
def model_tokenizer(model_folder: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(model_folder)


def interpreter_of(program: Program) -> str:
    """Returns the client's interpreter; skips the test where there is none."""
    if not program.environment:
        return sys.executable
    missing = ENVIRONMENTS / f"{program.environment}.missing"
    if missing.exists():
        pytest.skip(f"{program.environment} is not installed: {missing.read_text()}")
    if (ENVIRONMENTS / program.environment / "node_modules").exists():
        # Programs are started by a file for the tests' own interpreter.
        return "node" if program.file.endswith(".mjs") else sys.executable
    python = ENVIRONMENTS / program.environment / "bin/python"
    if not python.exists():
        pytest.skip(f"{python} is not there; `make test-agents` makes it.")
    return str(python)


@pytest.fixture
def serve(model_folder: Path, model_tokenizer: AutoTokenizer) -> Any:
    """Starts a gateway in front of a server with a script."""

    @contextmanager
    def serve(
        script: list[Reply], **arguments: Any
    ) -> Iterator[tuple[ScriptedServer, Gateway]]:
        with (
            ScriptedServer(model_folder, model_tokenizer, script) as server,
            AsyncSGLang.connect(server.url) as engine,
            gateway_of(engine, **arguments) as gateway,
        ):
            yield server, gateway

    return serve


Start = Callable[[str | Program], Client]


class Running:
    """The process of one client, which is started again after it was killed."""

    def __init__(self, program: Program, home: Path) -> None:
        self._home = home
        self._program = program
        file = str(CLIENTS / program.file)
        self._command = [interpreter_of(program), file]
        self._command += [program.variant] * bool(program.variant)
        self._client: Client | None = None

    def client(self) -> Client:
        if self._client is None or not self._client.is_running:
            self._client = Client(self._command, self._home)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    relay.close()


@pytest.fixture
def cell(
    relay: Relay, model_folder: Path, model_tokenizer: AutoTokenizer
) -> dict[str, Any]:
    """What all cells of the matrix need."""
    return {"relay": relay, "folder": model_folder, "tokenizer": model_tokenizer}


@pytest.fixture(scope="module")
def processes(relay: Relay) -> Iterator[dict[str, Running]]:
    """The process of the latest client, by its name."""
    found: dict[str, Running] = {}
    yield found
    for process in found.values():
        process.close()


@pytest.fixture
def running(
    request: pytest.FixtureRequest,
    processes: dict[str, Running],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Running]:
    name = request.param
    if name not in processes:
        for other in list(processes):
            processes.pop(other).close()
        home = tmp_path_factory.mktemp(name)
        processes[name] = Running(PROGRAMS[name], home)
    return name, processes[name]


@pytest.fixture
def running_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts clients, those of the table by their names."""
    started: list[Running] = []

    def start(given: str | Program) -> Client:
        program = PROGRAMS[given] if isinstance(given, str) else given
        started.append(Running(program, tmp_path_factory.mktemp("client")))
        return started[-1].client()

    yield start
    for process in started:
        process.close()


@pytest.fixture(scope="session")
def verifiers_python() -> str:
    """The interpreter with verifiers."""
    return interpreter_of(Program(file="", environment="verifiers", errors={}))


@pytest.fixture(scope="session")
def tasksets_python() -> str:
    """The interpreter with verifiers, Harbor and OpenEnv."""
    program = Program(file="", environment="verifiers_tasksets", errors={})
    return interpreter_of(program)


@pytest.fixture(scope="session")
def trl_python() -> str:
    """The interpreter with TRL."""
    return interpreter_of(Program(file="", environment="trl", errors={}))
