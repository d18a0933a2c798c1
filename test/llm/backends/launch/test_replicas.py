"""What differs between the servers of one engine."""

from __future__ import annotations

import os

import pytest

from torchrl_sglang.backends.launch.local import replica_specs
from torchrl_sglang.errors import ConfigurationError

CPU = {"model": "m", "device": "cpu"}
CUDA = {"model": "m", "device": "cuda"}
FOUR = tuple("0123")


def test_on_cpu_they_are_alike_and_share_the_cores():
    spec = {**CPU, "tp_size": 2, "environment": {"A": "b"}}
    assert replica_specs(1, spec) == [spec]
    threads = str(max(len(os.sched_getaffinity(0)) // 2, 1))
    shared = {**spec, "environment": {"OMP_NUM_THREADS": threads, "A": "b"}}
    assert replica_specs(2, spec) == [shared] * 2
    own = {**CPU, "environment": {"OMP_NUM_THREADS": "7"}}
    assert replica_specs(2, own) == [own] * 2


@pytest.mark.parametrize("name", ["seed", "random_seed", "port", "nccl_port"])
def test_what_counts_up(name):
    specs = replica_specs(3, {**CPU, name: 7})
    assert [spec[name] for spec in specs] == [7, 8, 9]
    assert replica_specs(1, {**CPU, name: None}) == [{**CPU, name: None}]


@pytest.mark.parametrize(
    ("count", "arguments", "cuda_devices", "groups"),
    [
        (1, {}, None, ["3"]),
        (2, {}, None, ["2", "3"]),
        (2, {"tp_size": 2}, None, ["01", "23"]),
        (1, {"num_devices": 2, "pipeline_parallel_size": 2}, None, ["0123"]),
        (2, {"tensor_parallel_size": 2}, [3, 2, 1, 0], ["32", "10"]),
        (2, {}, [[1], [1]], ["1", "1"]),
    ],
)
def test_gpus(count, arguments, cuda_devices, groups):
    specs = replica_specs(
        count, {**CUDA, **arguments}, cuda_devices=cuda_devices, available=FOUR
    )
    assert [spec["cuda_devices"] for spec in specs] == [tuple(g) for g in groups]


def test_gpus_of_the_user_s_own_choice():
    spec = {**CUDA, "base_gpu_id": 1, "nnodes": 2}
    assert replica_specs(1, spec, available=FOUR) == [spec]


@pytest.mark.parametrize(
    ("count", "spec", "cuda_devices", "words"),
    [
        (3, {**CUDA, "tp_size": 2}, None, "need 6 GPUs, and 4"),
        (2, {**CUDA, "base_gpu_id": 1}, None, "base_gpu_id=1 is for one server"),
        (2, {**CPU, "nnodes": 2}, None, "nnodes=2 is for one server"),
        (1, CPU, [0], "for device='cuda'"),
        (0, CPU, None, "num_replicas must be .* got 0"),
        (True, CPU, None, "num_replicas must be .* got True"),
        ("2", CPU, None, "num_replicas must be .* got .2."),
    ],
)
def test_impossible_replicas_are_refused(count, spec, cuda_devices, words):
    with pytest.raises(ConfigurationError, match=words):
        replica_specs(count, spec, cuda_devices=cuda_devices, available=FOUR)
