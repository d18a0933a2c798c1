"""Several hosts, which are namespaces of this machine: what listens, and what is lost."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.forked_starts import trainer_python
from helpers.hosts import Host, Network, hosts, why_no_hosts
from helpers.log_probs import TOLERANCE

PROGRAM = Path(__file__).with_name("host_program.py")
KEY, PORT = "sk-servers", 30_000
OUTAGE_SECONDS = 20.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Trainer:
    """A trainer on a host; ``trainer.generate(...)`` calls a function there."""

    def __init__(self, host: Host, log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self._process = host.start(
                [trainer_python(), PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=1,
            )
        assert self.answer() == {"value": "ready"}

    def begin(self, name: str, **arguments: Any) -> None:
        """Begins a call."""
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")

    def answer(self) -> dict[str, Any]:
        """Waits for the end of a call; returns its value or its error."""
        line = self._process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        found: dict[str, Any] = json.loads(line)
        return found

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self.begin(name, **arguments)
            found = self.answer()
            assert "value" in found, found
            return found["value"]

        return call


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := why_no_hosts():
        pytest.skip(reason)
    with hosts("trainer", "server-1", "server-2", "agent") as network:
        yield network


@pytest.fixture
def urls(network: Network, tiny_model_path: str, tmp_path: Path) -> list[str]:
    """Starts a server on each of two hosts, by hand."""
    key = tmp_path / "key.txt"
    key.write_text(KEY)
    key.chmod(0o600)
    options = ["--device", "cpu", "--port", PORT, "--api-key-file", key]
    serve = [trainer_python(), "-m", "torchrl_sglang", "serve", tiny_model_path]
    started = []
    for host in network.hosts[1:3]:
        log = tmp_path / f"{host.name}.log"
        with log.open("w") as file:
            words = [*serve, *options, "--host", host.address]
            started.append(host.start(words, stdout=subprocess.PIPE, stderr=file))
    urls = []
    for process in started:
        urls.append(process.stdout.readline().strip())
    assert urls == [f"http://{host.address}:{PORT}" for host in network.hosts[1:3]]
    return urls


@pytest.fixture
def trainer(
    network: Network, urls: list[str], tiny_model_path: str, tmp_path: Path
) -> Trainer:
    """A trainer that is connected to both servers."""
    trainer = Trainer(network.hosts[0], tmp_path / "trainer.log")
    trainer.connect(model=tiny_model_path, urls=urls, api_key=KEY)
    return trainer


def check(generated: dict[str, Any], version: str | None = None) -> None:
    """Checks log-probs against Hugging Face's, and the version of the weights."""
    assert generated["difference"] < TOLERANCE
    if version is not None:
        assert generated["versions"] == [version]


def test_a_slow_network_and_a_wrong_clock(network, trainer):
    trainer.set_clock(ahead=-7200.0)
    network.delay_seconds, network.loss = 0.05, 0.005
    trainer.make_sender(transport="broadcast")
    check(trainer.generate(count=4, length=8))
    assert trainer.update(scale=0.9)["version"] == "1"
    check(trainer.generate(count=4, length=8), "1")


@pytest.mark.parametrize("task", ["generate", "update"])
def test_a_link_that_is_down_for_a_while(task, network, trainer):
    """TCP sends again what was lost; each side waits for that."""
    server = network.hosts[1]
    trainer.make_sender(transport="broadcast")
    trainer.update(scale=0.9)
    network.delay_seconds = 0.05
    arguments = {"count": 8, "length": 400} if task == "generate" else {"scale": 0.9}
    trainer.begin(task, **arguments)
    time.sleep(0.8)
    server.link_up = False
    time.sleep(OUTAGE_SECONDS)
    server.link_up = True
    found = trainer.answer()
    print(task, found, trainer.states())
    assert "value" in found, found
    network.delay_seconds = 0.0
    check(trainer.generate(count=4, length=8), {"generate": "1", "update": "2"}[task])


def test_a_host_that_disappears(network, trainer):
    trainer.make_sender(transport="broadcast")
    trainer.update(scale=0.9)
    trainer.begin("generate", count=8, length=400)
    time.sleep(0.5)
    network.hosts[2].lose_power()
    found = trainer.answer()
    print(found, trainer.states())
    check(found["value"], "1")
    print(trainer.update(scale=0.9))
    check(trainer.generate(count=4, length=8), "2")


CLIENT = """
import openai, sys, time
time.time = lambda right=time.time: right() + 3600.0
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
stream = client.chat.completions.create(
    model="policy",
    messages=[{"role": "user", "content": "hello"}],
    max_tokens=200,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
"""


def test_an_agent_on_another_host(network, trainer):
    host, agent = network.hosts[0], network.hosts[3]
    session = trainer.open_gateway(host=host.address)
    client = [trainer_python(), "-c", CLIENT, session["base_url"], session["key"]]
    text = agent.run(client)
    found = trainer.recorded()
    assert found["texts"] == [text]
    assert found["difference"] < TOLERANCE
