"""Hosts that are namespaces of this machine: their sockets, and faults of networks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.forked_starts import trainer_python
from helpers.hosts import Host, Network, hosts, why_no_hosts
from helpers.log_probs import TOLERANCE
from helpers.ray_cluster import QUICK
from helpers.small_runs import write_run
from helpers.waiting import wait_for_text, wait_until
from yarl import URL

from torchrl_sglang.backends.launch.ports import PORTS

PROGRAM = Path(__file__).with_name("host_program.py")
TRAIN = Path(__file__).parents[2] / "examples" / "grpo" / "train.py"
KEY, PORT = "sk-servers", 30_000
OUTAGE_SECONDS = 20.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Trainer:
    """A trainer on a host; ``trainer.generate(...)`` calls a function there."""

    def __init__(self, host: Host, log: Path, **environment: str) -> None:
        self.log = log
        with log.open("w") as file:
            self._process = host.start(
                [trainer_python(), PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=1,
                environment=environment,
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
    with hosts("trainer-1", "server-1", "server-2", "trainer-2") as network:
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
    urls = [process.stdout.readline().strip() for process in started]
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


def listeners(host: Host) -> set[str]:
    """Returns what listens on a host, as the table of ``cluster.rst`` has it."""
    found = set()
    for address, port in host.listening():
        assert address in (host.address, "*", "0.0.0.0"), (address, port)
        where = "here" if address == host.address else "every address"
        given = port if port == PORT else "a free port" if port in PORTS else "any port"
        found.add(f"{where}, {given}")
    return found


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
    # Store and gloo of the broadcast, and nothing else.
    trainer_host, server, *_ = network.hosts
    assert listeners(trainer_host) == {"here, any port"}
    assert len(trainer_host.listening()) == 2
    # The server, gloo of it, and the store of its ranks.
    store = "every address, a free port"
    assert listeners(server) == {f"here, {PORT}", "here, any port", store}


@pytest.mark.parametrize("task", ["generate", "update"])
def test_a_link_that_is_down_for_a_while(task, network, trainer):
    """TCP sends again what was lost; each side waits for that."""
    server = network.hosts[1]
    trainer.make_sender(transport="broadcast")
    trainer.update(scale=0.9)
    network.delay_seconds = 0.05
    arguments = {"count": 8, "length": 400} if task == "generate" else {"scale": 0.9}
    # The weights have a megabyte for each server.
    begun = network.transferred + {"generate": 30_000, "update": 600_000}[task]
    trainer.begin(task, **arguments)
    wait_until(lambda: network.transferred > begun, 60.0)
    server.link_up = False
    time.sleep(OUTAGE_SECONDS)
    server.link_up = True
    found = trainer.answer()
    assert "value" in found, found
    assert found["value"]["seconds"] > OUTAGE_SECONDS
    network.delay_seconds = 0.0
    check(trainer.generate(count=4, length=8), {"generate": "1", "update": "2"}[task])


def test_a_host_that_disappears(network, trainer):
    trainer.make_sender(transport="broadcast")
    trainer.update(scale=0.9)
    trainer.begin("generate", count=8, length=400)
    time.sleep(0.5)
    network.hosts[2].lose_power()
    found = trainer.answer()
    check(found["value"], "1")
    states = [each["state"] for each in trainer.statistics()]
    assert states == ["serving", "down"]
    trainer.update(scale=0.9)
    check(trainer.generate(count=4, length=8), "2")


def test_a_host_that_disappears_in_an_update(network, trainer):
    """The error comes soon after the timeout, and later updates hardly wait."""
    timeout = 5.0
    trainer.make_sender(transport="broadcast", send_timeout=timeout)
    trainer.update(scale=0.9)
    network.delay_seconds = 0.05
    # The weights have a megabyte for each server.
    begun = network.transferred + 600_000
    trainer.begin("update", scale=0.9)
    wait_until(lambda: network.transferred > begun, 60.0)
    start = time.monotonic()
    network.hosts[2].link_up = False
    found = trainer.answer()
    seconds = time.monotonic() - start
    assert found["error"] == "WeightTransferError"
    address = network.hosts[2].address
    assert f"No answer comes from http://{address}:{PORT}." in found["message"]
    # Two calls of the clean-up with timeouts of 5 s would add 10.
    assert timeout - 1.0 < seconds < timeout + 7.0
    network.delay_seconds = 0.0
    trainer.update(scale=0.9)
    report = trainer.update(scale=0.9)
    # Connecting takes 10 s to fail.
    assert report["seconds"] < 7.0
    check(trainer.generate(count=4, length=8), report["version"])


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


def test_a_trainer_of_two_hosts(network, urls, tiny_model_path, tmp_path):
    run = write_run(tmp_path, tiny_model_path, 2)
    master, other = network.hosts[0], network.hosts[3]
    words = [trainer_python(), "-m", "torch.distributed.run", "--nnodes", 2]
    words += ["--nproc-per-node", 1, "--master-port", 29_500, "--no-python"]
    words += ["--master-addr", master.address, f"--log-dir={tmp_path}"]
    program = [trainer_python(), TRAIN, *run, f"engine=[{','.join(urls)}]"]
    ranks = []
    for rank, host in enumerate((master, other)):
        with (tmp_path / f"rank-{rank}.log").open("w") as log:
            ranks.append(
                host.start(
                    [*words, "--node-rank", rank, *program],
                    environment={"TORCHRL_SGLANG_API_KEY": KEY, "OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=tmp_path,
                )
            )
    for rank, process in enumerate(ranks):
        text = tmp_path / f"rank-{rank}.log"
        assert process.wait(120) == 0, text.read_text()[-4000:]
    rows = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert Counter(json.loads(row)["step"] for row in rows) == {1: 16, 2: 16}


def start_ray(network: Network, folder: Path) -> str:
    """Starts a head and two workers; returns their address."""
    head, *workers = network.hosts[:3]
    # Nodes of one machine take each other's sockets there.
    temporary = Path(tempfile.gettempdir(), "ray")
    temporary.mkdir(exist_ok=True)
    for host in (head, *workers):
        host.run(["mount", "-t", "tmpfs", "ray", temporary])
    address = f"{head.address}:6379"
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    ray += [f"--object-store-memory={80 * 2**20}"]
    places = {head: ["--head", "--port=6379", "--num-cpus=0"]}
    places[head] += ["--include-dashboard=false", f"--temp-dir={temporary}"]
    places[head].append(f"--system-config={json.dumps(QUICK)}")
    places |= {worker: [f"--address={address}", "--num-cpus=2"] for worker in workers}
    started = []
    for host, options in places.items():
        log = folder / f"ray-{host.name}.log"
        with log.open("w") as file:
            process = host.start(
                [*ray, *options, f"--node-ip-address={host.address}"],
                # A busy machine takes longer than the 30 s that a node has.
                environment={"RAY_raylet_start_wait_time_s": "180"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        started.append((log, process))
        # The workers start at once.
        if host is head:
            wait_for_text(log, "Ray runtime started.", process)
    for log, process in started:
        wait_for_text(log, "Ray runtime started.", process)
    return address


def test_ray_loses_a_host(network, tiny_model_path, tmp_path):
    """Its server starts again on the other worker; the driver is on the head."""
    address = start_ray(network, tmp_path)
    trainer = Trainer(network.hosts[0], tmp_path / "driver.log", RAY_ADDRESS=address)
    urls = trainer.start_on_ray(model=tiny_model_path, num_replicas=2, device="cpu")
    places = {URL(url).host for url in urls}
    assert places == {host.address for host in network.hosts[1:3]}
    trainer.make_sender(transport="broadcast")
    trainer.update(scale=0.9)
    check(trainer.generate(count=4, length=8), "1")
    network.hosts[2].lose_power()
    wait_until(
        lambda: (
            [URL(each["url"]).host for each in trainer.statistics()]
            == [network.hosts[1].address] * 2
        ),
        report=trainer.log.read_text,
    )
    trainer.update(scale=0.9)
    check(trainer.generate(count=4, length=8), "2")
