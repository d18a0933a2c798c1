"""Which transport is chosen, from every place that weights and servers can be."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch

from torchrl_sglang.backends.launch.local import find_gpus, replica_specs
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import ServerPlacement
from torchrl_sglang.weight_update.plan import choose
from torchrl_sglang.weight_update.transports.handle_ranks import assign
from torchrl_sglang.weight_update.transports.handles import pack
from torchrl_sglang.weight_update.transports.placement import Topology, reach_of
from torchrl_sglang.weight_update.transports.registry import check_options

UUID = "GPU-5f2a0000-aaaa-bbbb-cccc-000000000000"


def server(gpus=None, visible=None, *, device="cuda", local=True):
    return ServerPlacement(
        url="http://127.0.0.1:30000",
        local=local,
        device=device,
        gpus=gpus,
        visible_gpus=gpus if visible is None else visible,
    )


def facts(*servers, device="cuda:0", names=("0", UUID), pp_size=1, directory=None):
    return Topology(
        device=device,
        gpu_names=frozenset(names),
        servers=servers,
        pp_size=pp_size,
        directory=directory,
    )


ON_CPU = server((), device="cpu")
CHOICES = {
    "CPU": (facts(ON_CPU, device="cpu", names=()), "broadcast", "on cpu"),
    "to GPUs": (facts(server(("0",)), device="cpu", names=()), "broadcast", "on cpu"),
    "same GPU": (facts(server(("0",))), "cuda_ipc", "share the GPU"),
    "two on the same GPU": (
        facts(server(("0",)), server(("0",))),
        "cuda_ipc",
        "share the GPU",
    ),
    "a rank beside each": (
        facts(server(("0",)), server(("1",)), names=("0", UUID, "1", "GPU-b")),
        "cuda_ipc",
        "share the GPU",
    ),
    "by UUID": (facts(server((UUID,))), "cuda_ipc", "share the GPU"),
    "by the start of a UUID": (facts(server(("GPU-5f2a",))), "cuda_ipc", "share"),
    "another UUID": (facts(server(("GPU-77",))), "broadcast", "elsewhere"),
    "one of two ranks": (facts(server(("0", "1"))), "cuda_ipc", "share"),
    "other GPU": (facts(server(("1",))), "broadcast", "elsewhere"),
    "other GPU, both seen": (
        facts(server(("1",), ("0", "1"))),
        "broadcast",
        "elsewhere",
    ),
    "somebody else's": (facts(server()), "broadcast", "give transport='cuda_ipc'"),
    "another machine's": (
        facts(server(("1",), local=False)),
        "broadcast",
        "elsewhere",
    ),
    "a directory": (facts(server(("0",)), directory="/x"), "disk", "'/x'"),
    "stages and a directory": (
        facts(server(("0",)), pp_size=2, directory="/x"),
        "disk",
        "'/x'",
    ),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choice(case):
    known, name, words = CHOICES[case]
    chosen, reason = choose(known)
    assert chosen == name
    assert words in reason
    assert reason.endswith(".")


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (facts(ON_CPU, pp_size=2), "2 pipeline stages"),
        (facts(server(("0",)), server(("1",))), "sees the GPUs 1 only"),
        (facts(server(("0",)), server()), "not known which GPUs it sees"),
        (facts(server(("0",)), server(local=False)), "another machine"),
    ],
)
def test_nothing_works_without_a_directory(known, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        choose(known)
    assert "directory=..." in str(caught.value)


@pytest.mark.parametrize(
    ("place", "opens", "shares"),
    [
        (server(("0",)), True, True),
        (server(("1",), ("0", "1")), True, False),
        (server(("1",)), False, False),
        (server(), None, False),
        (server(("0",), local=False), False, False),
        (ON_CPU, False, False),
    ],
)
def test_reach(place, opens, shares):
    reach = reach_of(place, facts(place))
    assert (reach.opens, reach.shares) == (opens, shares)
    assert bool(reach.reason) == (opens is False)


def test_auto_takes_every_argument_that_one_transport_uses():
    check_options("auto", {"master_port": 5, "connect_timeout": 3.0})
    check_options("auto", {"directory": "/x"})
    with pytest.raises(ConfigurationError, match="does not use it"):
        check_options("cuda_ipc", {"master_port": 5})


def test_a_mistyped_option_names_the_nearest():
    with pytest.raises(ConfigurationError, match="Did you mean 'directory'"):
        check_options("disk", {"directories": "/x"})
    with pytest.raises(ConfigurationError, match="pin_adapter must be"):
        check_options("auto", {"pin_adapter": "yes"})
    # A default is no option that another transport could mind.
    assert check_options("broadcast", {"adapter": "policy"}) == {}


@pytest.mark.parametrize(
    ("arguments", "gpus", "visible"),
    [
        ({"cuda_devices": ("3",)}, ("3",), ("3",)),
        ({"cuda_devices": ("2", "3"), "tp_size": 2}, ("2", "3"), ("2", "3")),
        ({"base_gpu_id": 1}, ("1",), ("0", "1", "2", "3")),
        (
            {"base_gpu_id": 0, "gpu_id_step": 2, "tp_size": 2},
            ("0", "2"),
            ("0", "1", "2", "3"),
        ),
        ({"base_gpu_id": 3, "tp_size": 2}, None, ("0", "1", "2", "3")),
    ],
)
def test_gpus_of_a_server(arguments, gpus, visible):
    assert find_gpus({"device": "cuda", **arguments}, available="0123") == (
        gpus,
        visible,
    )


def test_gpus_of_replicas():
    spec = {"model": "m", "device": "cuda", "tensor_parallel_size": 2}
    specs = replica_specs(2, spec, cuda_devices=[0, 1, 2, 3], available="0123")
    assert [find_gpus(own, available="0123")[0] for own in specs] == [
        ("0", "1"),
        ("2", "3"),
    ]
    assert find_gpus({"model": "m", "device": "cpu"}) == ((), ())
    own = {"device": "cuda", "environment": {"CUDA_VISIBLE_DEVICES": "7"}}
    assert find_gpus(own, available="0123") == (None, None)


def test_values_are_packed_whole_and_alone():
    """A part of a large storage does not take all of it along."""
    large = torch.arange(1_000_000, dtype=torch.float32)
    text, kept = pack([("a", large[5:8].clone()), ("b", torch.ones(2).bfloat16())])
    assert len(text) < 10_000
    assert kept == []
    (name, value), (_, other) = pickle.loads(base64.b64decode(text))
    assert name == "a"
    assert value.tolist() == [5, 6, 7]
    assert other.dtype == torch.bfloat16


RANKS = [frozenset({"0", UUID}), frozenset({"1", "GPU-b1"})]


@pytest.mark.parametrize(
    ("servers", "tp_size", "owners", "near"),
    [
        ([server(("0",)), server(("1",))], 1, (0, 1), True),
        ([server(("1", "0"))], 2, (1, 0), True),
        ([server(("GPU-b1",)), server((UUID,))], 1, (1, 0), True),
        # Servers that share a GPU, and ranks that do, too.
        ([server(("0",))] * 3, 1, (0, 0, 0), True),
        # A rank of a server on another GPU opens what it sees.
        ([server(("1", "2"))], 2, (1, 1), False),
        ([server(("2",), ("2", "1"))], 1, (1,), False),
        ([server()], 1, (0,), False),
    ],
)
def test_whose_memory_a_server_opens(servers, tp_size, owners, near):
    assert assign(servers, tp_size, RANKS) == (owners, near)


def test_ranks_on_one_gpu_take_turns():
    found = assign([server(("0",))] * 3, 1, [frozenset({"0"})] * 2)
    assert found == ((0, 1, 0), True)
