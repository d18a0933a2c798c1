"""Which GPUs a server gets: pure, and the driver is asked without waking CUDA."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from helpers.forked_starts import trainer_python

from torchrl_sglang.backends.launch.gpus import (
    assign_devices,
    device_environment,
    devices_per_server,
    parse_visible_devices,
)
from torchrl_sglang.errors import ConfigurationError

EIGHT = tuple("01234567")


@pytest.mark.parametrize(
    ("value", "count", "names"),
    [
        (None, 0, ()),
        (None, 3, ("0", "1", "2")),
        ("", 0, ()),
        ("-1", 0, ()),
        ("2", 1, ("2",)),
        ("3, 1", 2, ("3", "1")),
        ("GPU-5f2a,MIG-77", 2, ("GPU-5f2a", "MIG-77")),
        # CUDA stops where it does not know a name.
        ("1,-1,2", 1, ("1",)),
        ("1,9", 1, ("1",)),
    ],
)
def test_visible_devices(value, count, names):
    assert parse_visible_devices(value, count) == names


@pytest.mark.parametrize(
    ("arguments", "groups"),
    [
        ({"num_replicas": 1}, ["7"]),
        ({"num_replicas": 2}, ["6", "7"]),
        ({"num_replicas": 8}, list("01234567")),
        ({"num_replicas": 2, "size": 2}, ["45", "67"]),
        ({"num_replicas": 2, "size": 4}, ["0123", "4567"]),
        ({"num_replicas": 2, "cuda_devices": [4, 5]}, ["4", "5"]),
        ({"num_replicas": 2, "size": 2, "cuda_devices": [7, 0, 3, 4]}, ["70", "34"]),
        (
            {"num_replicas": 2, "size": 2, "cuda_devices": [[4, 5], (6, 7)]},
            ["45", "67"],
        ),
        ({"num_replicas": 2, "cuda_devices": [[0], [0]]}, ["0", "0"]),
        ({"num_replicas": 1, "cuda_devices": ["cuda:3"]}, ["3"]),
        ({"num_replicas": 1, "cuda_devices": [torch.device("cuda", 2)]}, ["2"]),
        ({"num_replicas": 1, "cuda_devices": range(5, 6)}, ["5"]),
    ],
)
def test_groups(arguments, groups):
    assert assign_devices(**arguments, available=EIGHT) == [tuple(g) for g in groups]


def test_the_trainer_is_confined_itself():
    available = ("GPU-a", "GPU-b", "5")
    assert assign_devices(2, available=available) == [("GPU-b",), ("5",)]
    assert assign_devices(1, cuda_devices=[0], available=available) == [("GPU-a",)]
    # A name is passed on: it may be of a GPU that the trainer does not see.
    assert assign_devices(2, cuda_devices=["GPU-z", "3"], available=available) == [
        ("GPU-z",),
        ("3",),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_replicas": 3, "size": 4}, ["need 12 GPUs", "8 are visible"]),
        ({"num_replicas": 9}, ["9 servers", "need 9 GPUs", "0,1,2,3,4,5,6,7"]),
        ({"num_replicas": 2, "cuda_devices": [1]}, ["neither 2 GPUs", "need 2"]),
        ({"num_replicas": 1, "cuda_devices": [8]}, ["no cuda:8", "8 are visible"]),
        ({"num_replicas": 1, "cuda_devices": [-1]}, ["-1 is not a GPU"]),
        ({"num_replicas": 1, "cuda_devices": [True]}, ["True is not a GPU"]),
        ({"num_replicas": 1, "cuda_devices": [""]}, ["'' is not a GPU"]),
        ({"num_replicas": 1, "cuda_devices": "cpu"}, ["'c' is not a GPU"]),
        ({"num_replicas": 1, "cuda_devices": ["cuda"]}, ["'cuda' is not a GPU"]),
        ({"num_replicas": 2, "cuda_devices": [1, 1]}, ["twice", "groups"]),
        ({"num_replicas": 2, "cuda_devices": [[1], 2]}, ["[1] is not a GPU"]),
        ({"num_replicas": 2, "cuda_devices": [[1, 2], [3]]}, ["2 groups of 1"]),
        ({"num_replicas": 1, "size": 2, "cuda_devices": [[1, 1]]}, ["one twice"]),
    ],
)
def test_groups_that_cannot_be(arguments, words):
    with pytest.raises(ConfigurationError) as caught:
        assign_devices(**arguments, available=EIGHT)
    assert all(word in str(caught.value) for word in words)


def test_no_gpus_at_all():
    with pytest.raises(ConfigurationError, match=r"need 1 GPU, and 0 .*: none"):
        assign_devices(1, available=())


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({}, 1),
        ({"tp_size": None}, 1),
        ({"tp_size": "2"}, 2),
        ({"tp_size": 4, "pp_size": 2}, 8),
        ({"tp_size": 4, "pp_size": 2, "nnodes": 2}, 4),
        ({"tp_size": 2, "dp_size": 2}, 4),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 2),
    ],
)
def test_devices_per_server(arguments, count):
    assert devices_per_server(arguments) == count


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tp_size": 3, "nnodes": 2}, "3 GPUs .*nnodes=2"),
        ({"tp_size": 0}, "tp_size .*at least 1, got 0"),
        ({"tp_size": "two"}, "tp_size .* got 'two'"),
        ({"pp_size": True}, "pp_size .* got True"),
    ],
)
def test_sizes_that_cannot_be(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        devices_per_server(arguments)


def test_environment():
    assert device_environment(("4", "GPU-a"), {}) == {
        "CUDA_VISIBLE_DEVICES": "4,GPU-a",
        "NCCL_CUMEM_ENABLE": "0",
    }
    # Both ends of a communicator must agree.
    assert device_environment((), {"NCCL_CUMEM_ENABLE": "1"}) == {
        "NCCL_CUMEM_ENABLE": "1"
    }


def test_asking_leaves_cuda_alone():
    code = (
        "import torch; "
        "from torchrl_sglang.backends.launch.gpus import "
        "default_device, visible_devices; "
        "print(len(visible_devices()), default_device(), torch.cuda.is_initialized())"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [trainer_python(), "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-3:] == ["0", "cpu", "False"]
