"""Changed elements over HTTP: whatever goes wrong, the next update sends everything.

The servers are fakes with a real loader and a model that loads as SGLang's do, whose
parameters show every bit.
"""

from __future__ import annotations

import base64

import pytest
import torch
from helpers.fake_server import FakeServer, _json
from helpers.loading_server import FusedModel, LoadingServer
from helpers.slow import diagonal

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import UnsupportedByServerError, WeightTransferError
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model

SEND = "/update_weights_from_tensor"
TELL = "/get_weights_by_name"


class Run:
    """A trainer, and servers behind proxies."""

    def __init__(self, path, tokenizer, count=1, *, engines=None):
        torch.manual_seed(0)
        self.model = make_tiny_model(tokenizer).to(torch.bfloat16)
        self.weights = dict(self.model.named_parameters())
        # SGLang serves the type of the checkpoint, float32, which holds every bfloat16.
        self.served = {n: torch.zeros_like(w).float() for n, w in self.weights.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5)
        self.servers = [
            LoadingServer(path, FusedModel(self.served)).__enter__()
            for _ in range(count)
        ]
        self.proxies = [FaultyProxy(server.url) for server in self.servers]
        self.engine = AsyncSGLang.connect(
            urls=[proxy.url for proxy in self.proxies], max_attempts=1
        )
        self.scheme = SGLangWeightSyncScheme(
            self.engine,
            self.model,
            transport="delta",
            bucket_bytes=100_000,
            send_timeout=30,
            control_timeout=30,
            restart_timeout=0,
        )
        self.sender = self.scheme.create_sender()

    def step(self):
        for weight in self.weights.values():
            weight.grad = torch.randn_like(weight)
        self.optimizer.step()

    def update(self):
        """Takes a step and sends it; returns the report, after a look at every bit."""
        self.step()
        report = self.sender.update_weights()
        self.check()
        return report

    def check(self):
        for server in self.servers:
            for name, weight in self.weights.items():
                held = server.model.held(name)
                assert held.dtype == torch.float32
                assert torch.equal(held.view(torch.int32), bits_of(weight)), name

    def close(self):
        self.scheme.shutdown()
        self.engine.shutdown()
        for proxy in self.proxies:
            proxy.close()
        for server in self.servers:
            server.__exit__(None, None, None)


def bits_of(weight):
    return weight.detach().float().view(torch.int32)


@pytest.fixture
def run(tiny_model_path, tokenizer):
    made = Run(tiny_model_path, tokenizer)
    yield made
    made.close()


@pytest.fixture
def two(tiny_model_path, tokenizer):
    made = Run(tiny_model_path, tokenizer, 2)
    yield made
    made.close()


def is_full(report) -> bool:
    return "everything" in report.reason


def test_only_the_first_update_is_full(run):
    first = run.update()
    assert is_full(first)
    loads = run.servers[0].model.loads
    for _ in range(5):
        report = run.update()
        assert not is_full(report)
        assert report.wire_bytes < first.wire_bytes / 5
    # Only the empty call that gives the version has loaded tensors since.
    assert run.servers[0].model.loads == loads + 5


def test_nothing_changed(run):
    run.update()
    report = run.sender.update_weights()
    assert "the 0.00% of elements" in report.reason
    assert report.wire_bytes < 10_000
    run.check()


def restart(run):
    """The server forgets everything, as one does that is started again."""
    run.servers[0].model = FusedModel(run.served)


def other_trainer(run):
    """Another program loads weights by SGLang's own route."""
    name, value = next(iter(run.served.items()))
    run.servers[0].model.load_weights([(name, value + 1)])


def one_bit(run):
    """Anything else changes a parameter."""
    parameter = next(run.servers[0].model.parameters())
    parameter.data.view(torch.int32).view(-1)[7] ^= 1


def other_version(run):
    run.servers[0].weight_version = "1"


@pytest.mark.parametrize("event", [restart, other_trainer, one_bit, other_version])
def test_a_server_with_other_weights_gets_all_of_them(run, event):
    run.update()
    assert not is_full(run.update())
    event(run)
    assert is_full(run.update())
    assert not is_full(run.update())


def test_of_two_servers_only_the_restarted_one_gets_everything(two):
    two.update()
    restart(two)
    report = two.update()
    assert "1 server(s): everything" in report.reason
    assert report.reason.count("to 1 server(s)") == 2
    assert "2 server(s): the" in two.update().reason


@pytest.mark.parametrize(
    ("call", "fault"),
    diagonal([(SEND, 1), (SEND, 2), (TELL, 2)], ["cut", "lose", "fail", "refuse"]),
)
def test_a_call_that_fails(run, call, fault):
    """Also an acknowledgement that is lost, of what the server has loaded."""
    path, number = call
    run.update()
    run.update()
    injection = run.proxies[0].inject(path, fault, first=number)
    with pytest.raises(WeightTransferError):
        run.update()
    assert injection.happened.is_set()
    run.proxies[0].clear()
    assert is_full(run.update())
    assert not is_full(run.update())


@pytest.mark.parametrize("first", [True, False], ids=["full", "changes"])
def test_a_message_that_is_damaged_on_the_way(run, first):
    """A checksum shows it before anything is loaded of it."""
    if not first:
        run.update()
    server = run.servers[0]
    load = server.routes[SEND]

    def damage(content):
        (entry,) = content["serialized_named_tensors"]
        data = bytearray(base64.b64decode(entry))
        # In the tensor, not in the pickle around it, which kills a server.
        data[len(data) // 2] ^= 4
        content["serialized_named_tensors"] = [base64.b64encode(data).decode()]
        return load(content)

    before = [value.clone() for value in server.model.parameters()]
    server.routes[SEND] = damage
    with pytest.raises(WeightTransferError, match="checksum"):
        run.update()
    assert all(map(torch.equal, before, server.model.parameters()))
    server.routes[SEND] = load
    assert is_full(run.update())
    assert not is_full(run.update())


def test_a_message_that_comes_twice(run):
    """A difference is not added a second time."""
    run.update()
    server = run.servers[0]
    load = server.routes[SEND]

    def twice(content):
        load(dict(content))
        return load(content)

    server.routes[SEND] = twice
    with pytest.raises(WeightTransferError, match="refused changes"):
        run.update()
    server.routes[SEND] = load
    assert is_full(run.update())


def test_a_loader_that_fails(run):
    """The server goes on, says so, and gets everything the next time."""
    run.update()
    server, model = run.servers[0], run.servers[0].model
    server.model = FusedModel(run.served)
    server.model.load_weights = None
    with pytest.raises(WeightTransferError, match="its log says why"):
        run.update()
    server.model = model
    assert is_full(run.update())


def test_a_server_that_tells_nothing_sensible(run):
    run.servers[0].routes[TELL] = lambda content: _json([1.0, 2.0])
    with pytest.raises(WeightTransferError, match="does not know the update"):
        run.update()


def test_a_server_that_comes_back_without_the_loader(two):
    """It would end at the first message, and the other one goes on without it."""
    two.update()
    restart(two)
    two.servers[0].server_args = {}
    sent = len(two.servers[0].payloads(SEND))
    with pytest.raises(WeightTransferError, match="without custom_weight_l") as caught:
        two.update()
    assert caught.value.untouched
    assert len(two.servers[0].payloads(SEND)) == sent
    two.engine.remove_servers(two.proxies[0].url)
    two.servers.pop(0).__exit__(None, None, None)
    two.update()


def test_servers_without_the_loader(tiny_model_path, tokenizer):
    """They would end, so nothing is sent."""
    with FakeServer(tiny_model_path) as server:
        engine = AsyncSGLang.connect(server.url)
        model = make_tiny_model(tokenizer)
        scheme = SGLangWeightSyncScheme(engine, model, transport="delta")
        with pytest.raises(UnsupportedByServerError, match="custom_weight_loader='to"):
            scheme.create_sender().update_weights()
        assert SEND not in [path for _, path, _ in server.requests]
        scheme.shutdown()
        engine.shutdown()
