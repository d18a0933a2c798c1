"""Servers that Ray places, whose trainer is in an actor with a GPU that Ray gave it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import gpu, log_probs
from helpers.gpu import GPUS, NEEDS_GPU, TOLERANCE, difference, new_model, start

from torchrl_sglang import RayLauncher, SGLangWeightSyncScheme

ray = pytest.importorskip("ray")

pytestmark = [
    *NEEDS_GPU,
    # Ray's own, about futures and processes.
    pytest.mark.filterwarnings("ignore"),
]

SECONDS = 400.0
SHARE = 0.4
"""Of a GPU, that a server reserves beside a trainer."""
CACHE_TOKENS = 40_000_000
"""Tokens in the cache of a server that sleeps."""
CACHE_BYTES = 512 * CACHE_TOKENS
"""Key and value of two layers of two heads of 32 bfloat16 each."""


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A placement group with a bundle for each GPU."""
    from ray import cloudpickle

    # An actor cannot import them.
    modules = (request.module, gpu, log_probs)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    ray.init(
        num_cpus=8,
        num_gpus=GPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * GPUS)
    assert group.wait(SECONDS)
    yield group
    gc.collect()
    ray.shutdown()
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


class Trainer:
    """A trainer with a server, in an actor; its methods return what it sees."""

    def __init__(self, path: str, launcher: RayLauncher, **arguments: Any) -> None:
        self.engine = start(path, launcher=launcher, **arguments)
        self.scheme = SGLangWeightSyncScheme(self.engine)
        self.sender = self.scheme.create_sender()

    def gpus(self) -> tuple[list[str], list[str]]:
        """GPUs of the trainer, and of its server."""
        (server,) = self.engine.placements
        own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return own, [*(server.gpus or ())]

    def update(self, seed: int) -> tuple[str, float, float]:
        """Transport of an update, and how far the server was from it and is now."""
        model = new_model(seed)
        before = difference(self.engine, model)
        transport = self.sender.update_weights(model).transport
        return transport, before, difference(self.engine, model)

    def update_asleep(self, seed: int) -> tuple[int, float]:
        """Bytes that a sleep of the server frees; the error after an update."""
        awake, _ = torch.cuda.mem_get_info()
        self.engine.sleep()
        asleep, _ = torch.cuda.mem_get_info()
        model = new_model(seed)
        self.engine.wake_up("weights")
        self.sender.update_weights(model)
        self.engine.wake_up("kv_cache")
        return asleep - awake, difference(self.engine, model)

    def close(self) -> None:
        self.scheme.shutdown()
        self.engine.shutdown()


def call(method: Any, *args: Any) -> Any:
    return ray.get(method.remote(*args), timeout=SECONDS)


@pytest.fixture
def start_trainer(group: Any, gpu_model_path: str) -> Iterator[Any]:
    """Starts a trainer in a bundle, with a server in the same or in another one."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    trainers = []

    def started(bundle: int, server: int, **arguments: Any) -> Any:
        place = PlacementGroupSchedulingStrategy(group, bundle)
        remote = ray.remote(num_cpus=1, num_gpus=1 - SHARE)(Trainer)
        launcher = RayLauncher(
            placement_group=group, bundles=[server], gpu_fraction=SHARE
        )
        trainers.append(
            remote.options(scheduling_strategy=place).remote(
                gpu_model_path, launcher, **arguments
            )
        )
        return trainers[-1]

    yield started
    for each in trainers:
        call(each.close)
        ray.kill(each)


def test_a_server_on_the_trainer_s_gpu(start_trainer):
    """On the last GPU, which is not the first in the trainer's eyes alone."""
    trainer = start_trainer(
        GPUS - 1, GPUS - 1, enable_sleep_mode=True, max_total_tokens=CACHE_TOKENS
    )
    own, served = call(trainer.gpus)
    assert own == served
    for seed in (3, 4):
        transport, before, after = call(trainer.update, seed)
        assert transport == "cuda_ipc"
        assert before > 0.1
        assert after < TOLERANCE
    freed, error = call(trainer.update_asleep, 5)
    assert freed > 0.8 * CACHE_BYTES
    assert error < TOLERANCE


@pytest.mark.skipif(GPUS < 2, reason="NCCL needs the trainer on a GPU of its own")
def test_a_server_on_another_gpu(start_trainer):
    trainer = start_trainer(0, 1)
    own, served = call(trainer.gpus)
    assert not {*own} & {*served}
    for seed in (3, 4):
        transport, before, after = call(trainer.update, seed)
        assert transport == "broadcast"
        assert before > 0.1
        assert after < TOLERANCE
