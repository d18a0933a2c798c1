"""Which updates tell servers to copy from the memory that they have open."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from torchrl_sglang.weight_update.transports import traced
from torchrl_sglang.weight_update.transports.traced import TracedLoader
from torchrl_sglang.weight_update.weights import TensorSpec


def action(content) -> str:
    """Returns the action of an order."""
    ((text, _),) = content.value
    return json.loads(text)["do"]


def test_only_the_memory_that_was_opened_whole_is_copied_again(monkeypatch):
    monkeypatch.setattr(traced, "memory_of", lambda tensor: ([0], tensor))
    engine = SimpleNamespace(get_world_size=lambda: 1)
    loader = TracedLoader(engine, 1.0)
    tensors = {"weight": torch.ones(2)}
    specs = [TensorSpec(name="weight", dtype=torch.float32, shape=torch.Size([2]))]
    memory, other = object(), object()
    assert not loader.has_open(None)
    opened = loader.memory(specs, tensors, apart=False, whole=memory)
    assert opened.entries is not None
    assert loader.has_open(memory)
    assert not loader.has_open(other)
    assert not loader.has_open(None)
    assert action(loader.again(1)) == "again"
    # The same addresses, beside tensors that have to be put together first.
    assert action(loader.memory(specs, tensors, apart=False)) == "again"
    assert not loader.has_open(memory)
    loader.memory(specs, tensors, apart=False, whole=memory)
    loader.release()
    assert not loader.has_open(memory)
