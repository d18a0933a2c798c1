"""The loader that joins a trainer's process group, as a server with one rank."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.vllm_over_gloo.vllm.distributed.weight_transfer.nccl_common import (
    trainer_init,
)
from helpers.vllm_over_gloo.vllm.utils.network_utils import get_open_port
from helpers.waiting import wait_until
from torch import nn

from torchrl_sglang.backends.launch.loaders import FOLDER

LATE_SECONDS = 3.0


class Model(nn.Linear):
    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class Group:
    """A group whose trainer is gone."""

    closed = 0

    def broadcast(self, tensor, seconds):
        raise ConnectionError("the trainer is gone")

    def close(self):
        self.closed += 1


@pytest.fixture
def server(monkeypatch):
    """The loader, in a process with SGLang's groups of ranks."""
    for name in ("sglang", "sglang.srt", "sglang.srt.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    group = SimpleNamespace(rank_in_group=0)
    sys.modules["sglang.srt.distributed"].get_tp_group = lambda: group
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("torchrl_sglang_vllm")
    state = module.loader.LoaderState()

    def do(action, model, **order):
        content = torch.empty(0, dtype=torch.uint8)
        module.loader.ACTIONS[action](model, state, order, content)

    module.do = do
    return module


def join(server, model, seconds):
    """Joins a group; returns the trainer's end."""
    info = {
        "master_address": "127.0.0.1",
        "master_port": get_open_port(),
        "world_size": 2,
        "rank_offset": 1,
    }
    trainers = []
    thread = threading.Thread(target=lambda: trainers.append(trainer_init(info)))
    thread.start()
    server.do("join", model, **info, timeout=seconds)
    thread.join()
    return trainers[0]


def take(server, model, seconds):
    tensors = [["weight", "float32", [2, 2]], ["bias", "float32", [2]]]
    wire = {"packed": False, "buffer_bytes": 1}
    server.do("take", model, tensors=tensors, **wire, timeout=seconds)


def test_a_broadcast_has_the_timeout_of_its_update(server):
    model = Model(2, 2)
    trainer = join(server, model, LATE_SECONDS / 2)
    weight, bias = torch.randn(2, 2), torch.randn(2)

    def send():
        time.sleep(LATE_SECONDS)
        for tensor in (weight, bias):
            trainer.broadcast(tensor, 0)

    thread = threading.Thread(target=send)
    thread.start()
    take(server, model, 60.0)
    thread.join()
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.bias, bias)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out"):
        take(server, model, 1.0)
    assert time.monotonic() - start < 30.0
    with pytest.raises(LookupError, match="has not joined"):
        take(server, model, 1.0)


def test_a_group_is_closed_when_another_is_joined(server):
    model, group = Model(2, 2), Group()
    server.GROUPS[model] = group
    trainer = join(server, model, 60.0)
    assert group.closed == 1
    del trainer


def test_a_group_is_closed_after_a_failure(server):
    model, group = Model(2, 2), Group()
    server.GROUPS[model] = group
    with pytest.raises(ConnectionError):
        take(server, model, 60.0)
    assert group.closed == 1
    assert model not in server.GROUPS


def test_a_group_that_is_joined_too_late_is_closed(server):
    may_end, group = threading.Event(), Group()

    def call():
        may_end.wait()
        return group

    with pytest.raises(TimeoutError, match=r"did not join the group within 0\.1 s"):
        server.within(0.1, call)
    may_end.set()
    wait_until(lambda: group.closed == 1, seconds=30.0)


def test_a_packed_broadcast_ends_with_the_tensor_that_fills_it(server):
    tensors = [
        ["a", "float32", [2]],
        ["b", "bfloat16", [3]],
        ["c", "float32", [1]],
    ]
    order = {"tensors": tensors, "packed": True, "buffer_bytes": 8}
    assert [len(part) for part in server.split(order)] == [2, 1]
    order["packed"] = False
    assert [len(part) for part in server.split(order)] == [1, 1, 1]
