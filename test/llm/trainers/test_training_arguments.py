"""What a run finds wrong with loss, optimizer and schedule before anything starts."""

from __future__ import annotations

import pytest
import torch

from torchrl_sglang import GRPO, CorrectedGRPOLoss
from torchrl_sglang.errors import ConfigurationError

PROMPTS = [{"query": "Say 1."}]
ENDLESS = {"max_new_tokens": None}


def brief(conversation, task):
    return -len(conversation.response)


def make(**arguments):
    return GRPO("model", **{"prompts": PROMPTS, "rewards": brief, **arguments})


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        # A loss that a function makes does not have them.
        (
            {"loss": CorrectedGRPOLoss, "correction": "bypass_ppo_clip_k3_rs"},
            "correction=.* is an argument of the loss",
        ),
        ({"loss": CorrectedGRPOLoss, "kl_to_ref_coeff": 0.5}, "kl_to_ref_coeff=0.5"),
        ({"loss": {"aggregation": "constant"}}, "max_tokens=None do not fit"),
        ({"loss": {"max_tokens": 9}}, "max_tokens=9 do not fit"),
        ({"loss": {"max_tokens": 0}, "method": "dr_grpo"}, "max_tokens must be"),
        ({"loss": {"aggregation": "token_mean"}, "method": "dr_grpo"}, "do not fit"),
        ({"generate_kwargs": ENDLESS, "method": "dr_grpo"}, "max_new_tokens=None"),
        ({"loss": {"correction": "decoupled_token_is"}}, "give correction=... to GRPO"),
        ({"loss": {"packing": "yes"}}, "packing must be 'auto', 'tree', True or False"),
        ({"loss": {"replay_sampling": "yes"}}, "replay_sampling must be"),
        # These read a metric in each step.
        ({"schedule": "reduce_lr_on_plateau"}, "'reduce_lr_on_plateau' cannot be used"),
        ({"schedule": "greedy"}, "schedule='greedy' cannot be used"),
        ({"schedule": "constant", "warmup_steps": 4}, "give schedule='constant_with"),
        ({"lr": 1e-3, "optimizer": sgd}, "lr=0.001 is not used"),
        ({"lr": 1e-3, "optimizer": {"lr": 1.0}}, "lr=0.001 is not used"),
    ],
)
def test_arguments_without_effect_or_that_fail_later_are_refused(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**wrong)


@pytest.mark.parametrize(
    "given",
    [
        {"loss": CorrectedGRPOLoss, "correction": "decoupled_token_is"},
        {"loss": {"aggregation": "constant", "max_tokens": 9}},
        {"loss": {"max_tokens": 9}, "method": "dr_grpo", "generate_kwargs": ENDLESS},
        {
            "loss": {"aggregation": "token_mean", "max_tokens": None},
            "method": "dr_grpo",
        },
        {"loss": {"packing": False, "replay_sampling": False}},
        {"schedule": "constant"},
        {"schedule": "cosine", "warmup_steps": 2, "steps": 9},
        {"optimizer": sgd},
        {"optimizer": {"lr": 1.0}},
    ],
)
def test_what_a_run_takes(given):
    make(**given)


def test_the_learning_rate_of_each_kind_of_run():
    weight = torch.nn.Parameter(torch.zeros(1))
    found = [
        make(**given)._training.make_optimizer([weight]).param_groups[0]["lr"]
        for given in ({}, {"lora": {"r": 8}}, {"lr": 1e-3}, {"optimizer": {"lr": 1.0}})
    ]
    assert found == [1e-6, 1e-5, 1e-3, 1.0]
