"""Whether servers find the memory that they released, when they wake up."""

from __future__ import annotations

import pytest
import torch

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.released_memory import ReleasedMemory, gpu_memory, shortage

GB = 10**9


class Gpu:
    """Memory of a device that a server and a trainer share."""

    def __init__(self):
        self.used = {"server weights": 6 * GB, "server cache": 34 * GB, "trainer": 0}

    def read(self):
        return 80 * GB - sum(self.used.values()), 80 * GB


def step(gpu, memory, trainer):
    with memory.counting():
        gpu.used |= {"server weights": 0, "server cache": 0}
    gpu.used["trainer"] = trainer
    with memory.counting():
        gpu.used["server weights"] = 6 * GB


def test_what_is_free_again():
    gpu = Gpu()
    memory = ReleasedMemory(TrainerRanks(), gpu.read)
    # Before the first step nothing was released.
    memory.check(0.5)
    step(gpu, memory, 40 * GB)
    memory.check(0.5)
    gpu.used["server cache"] = 34 * GB
    step(gpu, memory, 42 * GB)
    with pytest.raises(
        ConfigurationError, match=r"34.0 GB .* 32.0 GB .*'mem_fraction_static': 0.46\}"
    ):
        memory.check(0.5)


@pytest.mark.parametrize("share", [None, 0.1])
def test_no_share_that_fits_is_named(share):
    found = shortage(30 * GB, 10 * GB, 80 * GB, share)
    assert "Give a smaller mem_fraction_static, more GPUs" in found


def test_a_trainer_without_a_gpu():
    assert gpu_memory(torch.device("cpu")) is None
    memory = ReleasedMemory(TrainerRanks(), None)
    with memory.counting():
        pass
    memory.check(0.6)
