"""The recipe's learner, without an engine."""

from __future__ import annotations

import copy
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


SMALL = (
    "train.correction=null",
    "env.repeats=4",
    "train.dialog_turns_per_batch=8",
    "train.optim_batch_size=4",
)


@pytest.fixture
def make_learner(compose, tiny_model_path):
    from grpo_learner import Learner
    from grpo_utils import get_tokenizer, get_train_model

    def made(*overrides, mode="async"):
        cfg = compose(mode, *SMALL, *overrides)
        model = get_train_model(cfg, tiny_model_path)
        return Learner(cfg, model, get_tokenizer(tiny_model_path))

    return made


def weights(learner) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in learner.model.parameters()])


def make_batch(rewards, lengths=None):
    """Returns whole groups of four; by default three tokens each."""
    rows = [make_row(number, stale=False) for number in range(len(rewards))]
    generator = torch.Generator().manual_seed(0)
    for row, reward, length in zip(rows, rewards, lengths or [3] * 8, strict=False):
        row["next", "reward"].fill_(reward)
        prompt = torch.tensor([5, 6, 7])
        response = torch.randint(8, 60, (length,), generator=generator)
        log_probs = torch.full((length,), -5.0)
        full = torch.cat([prompt, response])
        row["tokens"] = TensorDict(prompt=prompt, response=response, full=full)
        row["masks"] = TensorDict(
            all_attention_mask=torch.ones(len(full), dtype=torch.bool),
            all_assistant_mask=torch.arange(len(full)) >= 3,
        )
        row["log_probs"] = TensorDict(
            response=log_probs, full=torch.cat([torch.zeros(3), log_probs])
        )
    return lazy_stack(rows)


@pytest.mark.parametrize("correction", ["null", "decoupled_token_is"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_reward_that_is_not_finite(make_learner, value, correction):
    """The step is not taken, and nothing of it is left; the next one is."""
    learner = make_learner(f"train.correction={correction}", "train.optim_batch_size=8")
    before = weights(learner)
    batch = make_batch([0.0, 1.0, value, 0.0, 1.0, 0.0, 1.0, 0.0])
    said = rf"'advantage' is nan.*responses to 'question 0' \(reward {value:g}\)"
    with pytest.warns(RuntimeWarning, match=said):
        metrics = learner.train(batch, 0)
    assert metrics == {"batch/untrained": 0.0, "optim/skipped": 1.0}
    assert torch.equal(weights(learner), before)
    assert not learner.optimizer.state_dict()["state"]
    assert not any(each.grad is not None for each in learner.model.parameters())
    metrics = learner.train(make_batch([0.0, 1.0] * 4), 0)
    assert all(map(math.isfinite, metrics.values()))
    assert weights(learner).isfinite().all()
    assert not torch.equal(weights(learner), before)


def test_steps_that_are_skipped_in_a_row_end_the_run(make_learner):
    learner = make_learner("optimizer.max_skipped_steps=2")
    before = weights(learner)
    batch = make_batch([math.nan] * 8)
    with pytest.warns(RuntimeWarning, match="No optimizer step"):
        assert learner.train(batch, 0)["optim/skipped"] == 1.0
    with pytest.raises(FloatingPointError, match="3 steps in a row, more than"):
        learner.train(batch, 0)
    assert torch.equal(weights(learner), before)
    assert learner.scheduler.last_epoch == 0


def test_a_step_that_is_taken_begins_the_count_again(make_learner):
    learner = make_learner("optimizer.max_skipped_steps=2")
    good, bad = make_batch([0.0, 1.0] * 4), make_batch([math.nan] * 8)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="No optimizer step"):
            learner.train(bad, 0)
        learner.train(good, 0)
    assert learner.skipped == 0


def test_a_gradient_that_is_not_finite(make_learner):
    """Every column is finite: the model's own numbers are not."""
    learner = make_learner("optimizer.max_skipped_steps=9")
    hook = next(learner.model.parameters()).register_hook(lambda g: g * math.inf)
    before = weights(learner)
    with pytest.warns(RuntimeWarning, match="norm is nan"):
        learner.train(make_batch([0.0, 1.0] * 4), 0)
    assert torch.equal(weights(learner), before)
    hook.remove()
    assert learner.train(make_batch([0.0, 1.0] * 4), 0)["optim/skipped"] == 0.0


def test_weights_that_are_not_finite_are_nowhere_sent(make_learner):
    learner = make_learner()

    @torch.no_grad()
    def overflow(*args, **kwargs):
        next(learner.model.parameters()).view(-1)[3] = math.inf

    learner.optimizer.register_step_post_hook(overflow)
    batch = make_batch([0.0, 1.0] * 4)
    with pytest.raises(FloatingPointError, match="is not finite any more"):
        learner.train(batch, 0)


def updated(make_learner, parts, *overrides):
    """Returns what one step of plain gradient descent adds to the weights."""
    learner = make_learner(
        "train.optim_batch_size=8",
        f"train.gradient_accumulation_steps={parts}",
        "optimizer.name=SGD",
        # Large, so that the float32 of the weights hides nothing.
        "optimizer.lr=10.0",
        "optimizer.clip_grad_norm=null",
        "optimizer.scheduler=constant",
        *overrides,
    )
    before = weights(learner)
    learner.train(make_batch([0.0, 1.0, 1.0, 0.2] * 2, [1, 40, 3, 9, 25, 2, 7, 5]), 0)
    return weights(learner) - before


@pytest.mark.parametrize(
    "correction", ["null", "decoupled_token_is", "bypass_ppo_clip_k3_rs"]
)
def test_the_update_does_not_depend_on_the_number_of_passes(make_learner, correction):
    given = f"train.correction={correction}"
    if correction == "bypass_ppo_clip_k3_rs":
        given = (
            "train.correction={rollout_is:null,rollout_rs:token_k3,"
            "rollout_rs_threshold:1.0,bypass_mode:true}"
        )
    once = updated(make_learner, 1, given)
    assert once.norm() > 0
    for parts in (2, 4, 8):
        found = updated(make_learner, parts, given)
        assert (found - once).norm() < 1e-5 * once.norm()


def test_equal_rewards_have_no_advantage(make_learner):
    """In float32, eight times 0.7 is on average another number than 0.7."""
    learner = make_learner("env.repeats=8")
    rows = make_batch([0.7] * 8)
    for row in rows.unbind(0):
        row.set("query", "the same")
    advantage = learner._add_advantage(rows)["advantage"]
    assert advantage.abs().max() < 1e-6
    assert advantage.dtype == torch.float32


CHANGED = {
    "lr": 1e-6,
    "eps": 1e-4,
    "weight_decay": 0.25,
    "warmup_steps": 7,
    "scheduler": "linear",
    "clip_grad_norm": 0.5,
    "max_skipped_steps": 1,
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_changed_counts_after_a_resumption(make_learner, name):
    """Optimizer and schedule are those of a new run at this step."""
    given = [f"optimizer.{name}={CHANGED[name]}", "train.total_dialog_turns=80"]
    saving = make_learner("optimizer.weight_decay=0.1", "train.total_dialog_turns=80")
    batch = make_batch([0.0, 1.0] * 4)
    saving.train(batch, 0)
    resumed, new = make_learner(*given), make_learner(*given)
    resumed.load_state_dict(copy.deepcopy(saving.state_dict()))
    assert torch.equal(weights(resumed), weights(saving))
    for _ in range(2):
        new.optimizer.step()
        new.scheduler.step()
    found, expected = resumed.optimizer.param_groups[0], new.optimizer.param_groups[0]
    assert {**found, "params": None} == {**expected, "params": None}
    (state, *_) = resumed.optimizer.state_dict()["state"].values()
    assert int(state["step"]) == 2
    metrics = resumed.train(batch, 0)
    for _ in range(2):
        new.optimizer.step()
        new.scheduler.step()
    assert resumed.scheduler.get_last_lr() == new.scheduler.get_last_lr()
    assert metrics["optim/grad_norm"] > 0
    assert resumed.cfg.optimizer[name] == CHANGED[name]


def test_every_parameter_is_applied_or_refused(compose, tmp_path):
    """Those that a run cannot change are refused by name; the learner has no others."""
    from omegaconf import OmegaConf

    from grpo_checkpoint import SAME, Checkpoints

    cfg = compose("sync", "train.resume=true")
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"config": OmegaConf.to_container(cfg, resolve=True)})
    for name in SAME:
        other = cfg.copy()
        OmegaConf.update(other, name, "something else")
        said = f"saved with {re.escape(name)}=.*, and this run has {re.escape(name)}="
        with pytest.raises(ConfigurationError, match=said):
            checkpoints.load(other)
    # What makes the state's tensors what they are cannot be changed.
    assert {"optimizer.name", "model.name", "train_model.lora.r"} <= set(SAME)


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
