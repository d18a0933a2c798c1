"""Whole runs of GRPO on a taskset of verifiers, on a real engine."""

from __future__ import annotations

import pytest
import torch
from helpers.agent_clients import CLIENTS

from torchrl_sglang import GRPO, AsyncSGLang
from torchrl_sglang.gateway.adapters.verifiers_agent import VerifiersAgent
from torchrl_sglang.testing.tiny_model import save_tiny_model

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny_model(folder, initializer_range=0.3)


@pytest.fixture(scope="module")
def engine(model):
    with AsyncSGLang.from_pretrained(str(model), device="cpu") as engine:
        yield engine


@pytest.fixture
def train(model, engine, verifiers_python, tmp_path):
    """Runs GRPO and returns its logs."""

    def train(env=None, **arguments):
        torch.manual_seed(0)
        with VerifiersAgent(
            "vowels_taskset",
            harness={"id": "talking_harness", "turns": 1},
            env=env,
            python=verifiers_python,
            environment={"PYTHONPATH": str(CLIENTS)},
        ) as agent:
            run = GRPO(
                model,
                prompts=agent.prompts(),
                eval_prompts=agent.prompts(),
                eval_every=STEPS,
                agent=agent,
                groups_per_batch=4,
                steps=STEPS,
                lr=2e-3,
                generate_kwargs={"max_new_tokens": 12},
                engine=engine,
                show_samples=None,
                output=tmp_path / "run",
                **arguments,
            )
            run.train()
        return run.history

    with torch.random.fork_rng(devices=[]):
        yield train


def test_a_synchronous_run_on_rewards_of_the_tasks(train):
    history = train(group_size=8)
    first, *_, last = (step for step in history if "eval/reward" in step)
    assert last["eval/reward"] > first["eval/reward"] + 0.3
    for step in history[1:]:
        assert step["metrics/reward/vowels"] == pytest.approx(step["batch/reward"])
        assert step["metrics/letters"] > 0


def test_an_asynchronous_run_on_a_rubric_that_ranks_attempts(train):
    """All sessions have the reward 0: what counts is the order within each."""
    env = {"id": "ranking_env", "n": 4}
    history = train(env, group_size=2, max_staleness=2)
    assert {step["batch/reward"] for step in history[1:]} == {0.0}
    assert {step["batch/flat_groups"] for step in history[1:]} == {0.0}
    assert max(step["batch/age_max"] for step in history[1:]) > 0
    first, *_, last = (step for step in history if "eval_metrics/own" in step)
    assert last["eval_metrics/own"] > first["eval_metrics/own"] + 0.1
