"""A run that trains the distribution that its tokens were drawn from."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from helpers.csv_logs import logged
from helpers.torchrun import run_ranks

from torchrl_sglang import GRPO
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAM = Path(__file__).with_name("train_program.py")
PROMPTS = [{"query": f"Say {n}.", "number": n} for n in range(24)]
SAMPLING = {
    "max_new_tokens": 12,
    "temperature": 0.7,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
}


def different(conversation, task):
    return float(sum(conversation.turns[-1].token_ids) % 97)


@pytest.fixture
def make(restored_engine, tiny_model_path, tmp_path):
    """Makes a run on the servers of the test session."""

    def made(**arguments):
        given = {
            "prompts": PROMPTS,
            "rewards": different,
            "generate_kwargs": SAMPLING,
            "group_size": 4,
            "groups_per_batch": 2,
            "steps": 3,
            "lr": 2e-3,
            "engine": restored_engine,
            "output": tmp_path / "run",
            "logger": "csv",
            "logprobs_mode": "behaviour",
        }
        return GRPO(tiny_model_path, **{**given, **arguments})

    return made


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "packing": False,
            "max_tokens_per_pass": 128,
            "kl_to_ref_coeff": 0.1,
            "gradient_checkpointing": True,
        },
        {"correction": "decoupled_token_is", "minibatches": 2, "lr": 0.0},
        pytest.param({"kl_to_ref_coeff": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_the_first_ratio_is_one(make, tmp_path, arguments):
    make(**arguments, eval_prompts=PROMPTS[:2], eval_every=2).train()
    assert logged(tmp_path, "train/kl_approx") == pytest.approx([0.0] * 3, abs=1e-5)
    assert logged(tmp_path, "train/ESS") == pytest.approx([1.0] * 3, abs=1e-5)
    if "correction" in arguments:
        assert max(logged(tmp_path, "rollout_corr/k3_kl")) < 1e-8
    if "kl_to_ref_coeff" in arguments:
        # The reference has the same supports, and is the policy at first.
        first, *_, last = logged(tmp_path, "train/kl_to_ref")
        assert abs(first) < 1e-8
        assert last > 1e-6


def test_without_replay_it_is_not(make, tmp_path):
    make(steps=1, loss={"replay_sampling": False}).train()
    assert abs(*logged(tmp_path, "train/kl_approx")) > 1e-2


@pytest.mark.slow
def test_ranks_of_torchrun(restored_engine, tiny_model_path, tmp_path):
    """Supports reach each rank with its share of the batch."""
    options = {"generate_kwargs": SAMPLING, "logprobs_mode": "behaviour"}
    arguments = tiny_model_path, restored_engine.server_url, tmp_path / "run", 2
    run_ranks(PROGRAM, *arguments, json.dumps(options), folder=tmp_path)
    assert logged(tmp_path, "train/kl_approx") == pytest.approx([0.0] * 2, abs=1e-5)


def test_what_is_told(make, tmp_path):
    """Before a prompt is generated."""
    top_p = {"max_new_tokens": 12, "top_p": 0.9}
    with pytest.raises(UnsupportedByServerError, match="top_p=0.9.*top_k of 1 to 4096"):
        make(generate_kwargs=top_p).train()
    with pytest.raises(UnsupportedByServerError, match="seed=3 would be ignored"):
        make(generate_kwargs={**SAMPLING, "seed": 3}).train()
    with pytest.raises(ConfigurationError, match="'model', 'sampling' or 'behaviour'"):
        make(logprobs_mode="exact")
    with pytest.warns(RuntimeWarning, match="top_p=0.9.*logprobs_mode='behaviour'"):
        make(generate_kwargs=top_p, logprobs_mode="model", steps=1).train()
    biased = {**SAMPLING, "presence_penalty": 0.5}
    with pytest.warns(RuntimeWarning, match="'presence_penalty'.* support alone"):
        make(generate_kwargs=biased, steps=1, output=tmp_path / "other").train()
    # A support has what is left of it, and the ratio is 1.
    least = {**SAMPLING, "min_new_tokens": 4}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "A penalty, a bias")
        run = make(generate_kwargs=least, steps=1, output=tmp_path / "least")
        run.train()
    assert abs(run.metrics["train/kl_approx"]) < 1e-5
