"""Rows that travel to another process as bytes are as they were."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torchrl.data.llm import History

from torchrl_sglang.collectors.packed_rows import pack, unpack


def row(length: int) -> TensorDict:
    history = History(role=["user", "assistant"], content=["Hi", "x" * length])
    return TensorDict(
        {
            "tokens": TensorDict(response=torch.arange(length)),
            "log_probs": {"response": torch.rand(length, dtype=torch.bfloat16)},
            "mask": torch.arange(length) % 2 == 0,
            "reward": torch.tensor(0.5, dtype=torch.float64),
            "apart": torch.arange(12).view(3, 4).T[::2],
            "task": NonTensorData({"answer": length}),
            "history": history,
        }
    )


def test_rows_arrive_as_they_were():
    rows = LazyStackedTensorDict(*map(row, (3, 0, 300)))
    found = unpack(pack((7, rows)))[1]
    assert type(found) is LazyStackedTensorDict
    for one, other in zip(found.unbind(0), rows.unbind(0), strict=True):
        assert list(one.keys(True, True)) == list(other.keys(True, True))
        assert one["task"] == other["task"]
        assert one["history"].content == other["history"].content
        for key in one.exclude("task", "history").keys(True, True):
            assert one[key].dtype == other[key].dtype
            assert torch.equal(one[key], other[key])
            one[key].flatten()[:1] = 0


def test_tensors_keep_no_other_alive_and_have_no_gradient():
    value = torch.ones(4, requires_grad=True)
    (found, same) = unpack(pack((value[:2], value[2:])))
    assert not found.requires_grad
    assert found.untyped_storage().nbytes() == same.untyped_storage().nbytes() == 8


def test_others_are_pickled_as_ever():
    sparse = torch.eye(3).to_sparse()
    parameter = torch.nn.Parameter(torch.ones(2))
    found = unpack(pack([sparse, parameter, None, ()]))
    assert torch.equal(found[0].to_dense(), torch.eye(3))
    assert type(found[1]) is torch.nn.Parameter
    assert found[2:] == [None, ()]


def test_values_that_cannot_be_pickled_are_refused():
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pack({"reward": lambda: 0})
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    found = unpack(pack({"reward": lambda: 3}, cloudpickle.CloudPickler))
    assert found["reward"]() == 3
