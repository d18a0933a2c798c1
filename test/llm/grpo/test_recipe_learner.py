"""The recipe's learner, without an engine."""

from __future__ import annotations

import math
import re

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_sglang.errors import ConfigurationError

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_row(number: int, *, stale: bool) -> TensorDict:
    """Returns a response of three tokens, as the collector writes it."""
    prompt, response = torch.tensor([5, 6, 7]), torch.tensor([8, 9, 10 + number])
    log_probs = torch.full((3,), math.nan if stale else -5.0)
    return TensorDict(
        query=f"question {number // 4}",
        tokens=TensorDict(
            prompt=prompt, response=response, full=torch.cat([prompt, response])
        ),
        masks=TensorDict(
            all_attention_mask=torch.ones(6, dtype=torch.bool),
            all_assistant_mask=(torch.arange(6) >= 3) & (not stale),
        ),
        log_probs=TensorDict(
            response=log_probs, full=torch.cat([torch.zeros(3), log_probs])
        ),
        next=TensorDict(
            reward=torch.full((1, 1), float(number % 2)),
            done=torch.ones(1, dtype=torch.bool),
            policy_version=torch.tensor(0),
        ),
    )


@pytest.mark.parametrize("correction", ["decoupled_token_is", "bypass_ppo_clip"])
def test_responses_that_are_too_old(compose, tiny_model_path, correction):
    """With train.on_stale=mask, they have no log-probs, and nothing to train on."""
    from grpo_learner import Learner
    from grpo_utils import get_tokenizer, get_train_model

    cfg = compose(
        "async",
        f"train.correction={correction}",
        "env.repeats=4",
        "train.dialog_turns_per_batch=8",
        "train.optim_batch_size=4",
        "train.gradient_accumulation_steps=4",
        "optimizer.clip_grad_norm=null",
    )
    model = get_train_model(cfg, tiny_model_path)
    learner = Learner(cfg, model, get_tokenizer(tiny_model_path))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    batch = lazy_stack([make_row(number, stale=True) for number in range(8)])
    assert learner.train(batch, 3) == {"batch/untrained": 1.0}
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])
    # Each forward pass has one response, and five of eight have no log-probs.
    batch = lazy_stack([make_row(number, stale=number < 5) for number in range(8)])
    metrics = learner.train(batch, 3)
    assert metrics["batch/untrained"] == 5 / 8
    assert metrics["optim/grad_norm"] > 0
    assert math.isfinite(metrics["loss/total"])
    assert any(
        not torch.equal(each, before[name]) for name, each in model.state_dict().items()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer.name=Adamw"], "did you mean 'AdamW'?"),
        (["optimizer.name=x"], "give AdamW, Adam, ..."),
        (["optimizer.name=SGD", "optimizer.eps=1e-3"], "optimizer.name=SGD has no eps"),
    ],
)
def test_optimizers_that_do_not_exist(compose, arguments, message):
    from grpo_learner import make_optimizer

    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_optimizer(compose("sync", *arguments), [torch.nn.Parameter(torch.ones(1))])
