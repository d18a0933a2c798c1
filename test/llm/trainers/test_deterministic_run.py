"""What ``GRPO(deterministic=True)`` asks of servers, collector and torch."""

from __future__ import annotations

import os

import pytest
import torch

from torchrl_sglang import GRPO
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.trainers.deterministic import WORKSPACE, deterministic_algorithms

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = [{"query": f"Say {number}."} for number in range(8)]


@pytest.fixture
def make(tiny_model_path, tmp_path, monkeypatch):
    """Makes a run; cuBLAS's variable is as before afterwards."""
    monkeypatch.setenv(WORKSPACE, ":16:8")

    def made(**arguments):
        given = {
            "prompts": PROMPTS,
            "rewards": lambda conversation, task: float(conversation.sample),
            "group_size": 2,
            "groups_per_batch": 2,
            "steps": 1,
            "output": tmp_path / "run",
            "deterministic": True,
        }
        return GRPO(tiny_model_path, **{**given, **arguments})

    with torch.random.fork_rng(devices=[]):
        yield made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_staleness": 1}, "max_staleness=0, got 1"),
        ({"collector": lambda policy: None, "prompts": None}, "makes one"),
        ({"agent": lambda task, *, base_url, api_key: 0.0, "rewards": None}, "agent"),
        ({"deterministic": 1}, "deterministic"),
    ],
)
def test_arguments_that_depend_on_timing_are_refused(
    make, fake_engine, arguments, message
):
    with pytest.raises(ConfigurationError, match=message):
        make(engine=fake_engine, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="servers can start on its GPUs")
def test_servers_on_cpu_are_refused_before_they_start(make):
    with pytest.raises(ConfigurationError, match="needs servers on GPUs"):
        make()


def test_running_servers_that_ignore_seeds_are_refused(make, engine):
    run = make(engine=engine)
    with pytest.raises(UnsupportedByServerError, match="deterministic mode"):
        run.train()


@pytest.mark.filterwarnings("ignore:temperature=0")
def test_torch_is_deterministic_for_the_run_only(make, restored_engine):
    during = []

    def reward(conversation, task):
        during.append(torch.are_deterministic_algorithms_enabled())
        return float(conversation.sample)

    # Greedy: a server on CPU takes no seeds.
    with make(
        engine=restored_engine,
        rewards=reward,
        generate_kwargs={"max_new_tokens": 6, "temperature": 0.0},
        seed=5,
    ) as run:
        run.begin()
        assert next(run.batches()) is not None
        assert run.collector.deterministic
        assert run.collector.state_dict()["seed"] == 5
    assert during
    assert all(during)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_workspace_that_is_not_deterministic_is_refused(monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(ConfigurationError, match=":0:0"), deterministic_algorithms():
        pass
    monkeypatch.delenv(WORKSPACE)
    with deterministic_algorithms():
        assert os.environ[WORKSPACE] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
