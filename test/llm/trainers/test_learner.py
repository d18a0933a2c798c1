"""The learner: what a step changes, what it does not, and what does not matter."""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers.learner_batches import make_batch
from helpers.log_probs import score
from helpers.slow import diagonal
from helpers.torchrun import run_ranks
from llm.objectives.test_packing import PACKING, make_model
from tensordict import lazy_stack
from torch.optim import lr_scheduler as lrs
from torchrl.objectives.llm import GRPOLoss
from transformers import get_scheduler

from torchrl_sglang import (
    GRPO,
    CorrectedGRPOLoss,
    CorrectedGSPOLoss,
    Distillation,
    Learner,
    RolloutCorrectionConfig,
    replay_routing,
)
from torchrl_sglang.errors import ConfigurationError, NotFiniteError
from torchrl_sglang.objectives.transform import OffPolicyCorrection
from torchrl_sglang.trainers.models import load_model, scorer
from torchrl_sglang.trainers.passes import cut_by_tokens
from torchrl_sglang.trainers.ranks import TrainerRanks

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")


@pytest.fixture
def make_learner(tiny_model_path, tokenizer):
    def made(*, correct=None, loss=None, optimizer=None, lr=1e-3, **arguments):
        model = load_model(tiny_model_path, device=CPU)
        kind = optimizer or torch.optim.AdamW
        adam = kind([p for p in model.parameters() if p.requires_grad], lr=lr)
        return Learner(
            CorrectedGRPOLoss(
                scorer(model, tokenizer),
                **{"clip_epsilon": 0.2, "entropy_bonus": False, **(loss or {})},
            ),
            adam,
            arguments.pop("schedule", None),
            correct=None if correct is None else OffPolicyCorrection(correct),
            **arguments,
        )

    return made


def weights(learner):
    return torch.cat([each.detach().flatten() for each in learner.model.parameters()])


@pytest.mark.parametrize("where", ["transform", "loss"])
def test_responses_that_are_too_old(make_learner, where):
    """They have no log-probs, and nothing to train on."""
    kinds = {
        "transform": {"correct": "decoupled_token_is"},
        "loss": {"loss": {"correction": "bypass_ppo_clip"}},
    }
    learner = make_learner(max_tokens_per_pass=6, **kinds[where])
    before = weights(learner)
    metrics = learner.train(make_batch([0.0, 1.0] * 4, unscored=8), 3)
    assert metrics == {"train/unscored": 1.0}
    assert torch.equal(weights(learner), before)
    metrics = learner.train(make_batch([0.0, 1.0] * 4, unscored=5), 3)
    assert metrics["train/unscored"] == 5 / 8
    assert metrics["train/grad_norm"] > 0
    assert all(map(math.isfinite, metrics.values()))
    assert not torch.equal(weights(learner), before)


@pytest.mark.parametrize("correct", [None, "decoupled_token_is"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_reward_that_is_not_finite(make_learner, value, correct):
    """The step is not taken, and nothing of it is left; the next one is."""
    learner = make_learner(correct=correct)
    before = weights(learner)
    batch = make_batch([0.0, 1.0, value, 0.0, 1.0, 0.0, 1.0, 0.0])
    said = rf"'advantage' is nan.*responses to 'question 0' \(reward {value:g}\)"
    with pytest.warns(RuntimeWarning, match=said):
        metrics = learner.train(batch, 0)
    assert metrics == {"train/unscored": 0.0, "train/skipped": 1.0}
    assert torch.equal(weights(learner), before)
    assert not learner.optimizer.state_dict()["state"]
    assert not any(each.grad is not None for each in learner.model.parameters())
    metrics = learner.train(make_batch([0.0, 1.0] * 4), 0)
    assert weights(learner).isfinite().all()
    assert not torch.equal(weights(learner), before)


def test_a_skipped_step_names_prompts_of_another_key(make_learner):
    learner = make_learner(query_key="question")
    batch = make_batch([math.nan] * 4)
    rows = [row.rename_key_("query", "question") for row in batch.unbind(0)]
    with pytest.warns(RuntimeWarning, match=r"responses to 'question 0' \(reward nan"):
        learner.train(lazy_stack(rows), 0)


def test_a_step_that_is_skipped_without_rewards(make_learner):
    """A loop of one's own has its advantages from elsewhere."""
    learner = make_learner()
    batch = lazy_stack([row.exclude("next") for row in make_batch([math.nan] * 4)])
    with pytest.warns(RuntimeWarning, match="to train on 4 responses without rewards"):
        assert learner.train(batch, 0)["train/skipped"] == 1.0


def test_steps_that_are_skipped_in_a_row_end_the_run(make_learner):
    learner = make_learner(max_skipped_steps=2)
    before = weights(learner)
    good, bad = make_batch([0.0, 1.0] * 4), make_batch([math.nan] * 8)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="No optimizer step"):
            learner.train(bad, 0)
    with pytest.raises(NotFiniteError, match="3 steps in a row, more than"):
        learner.train(bad, 0)
    assert torch.equal(weights(learner), before)
    learner.train(good, 0)
    assert learner.skipped == 0


def test_a_gradient_that_is_not_finite(make_learner):
    """Every column is finite: the model's own numbers are not."""
    learner = make_learner()
    hook = next(learner.model.parameters()).register_hook(lambda g: g * math.inf)
    before = weights(learner)
    with pytest.warns(RuntimeWarning, match="norm is nan"):
        learner.train(make_batch([0.0, 1.0] * 4), 0)
    assert torch.equal(weights(learner), before)
    hook.remove()
    assert learner.train(make_batch([0.0, 1.0] * 4), 0)["train/skipped"] == 0.0


def test_weights_that_are_not_finite_are_nowhere_sent(make_learner):
    learner = make_learner()

    @torch.no_grad()
    def overflow(*args, **kwargs):
        next(learner.model.parameters()).view(-1)[3] = math.inf

    learner.optimizer.register_step_post_hook(overflow)
    with pytest.raises(NotFiniteError, match="is not finite any more"):
        learner.train(make_batch([0.0, 1.0] * 4), 0)


@pytest.mark.parametrize("kind", ["plain", "transform", "prompt_mean", "constant"])
def test_the_update_does_not_depend_on_the_passes(make_learner, kind):
    """From one response a pass to all of them: plain gradient descent, so that the
    change of the weights is the gradient.
    """
    given = {
        "plain": {},
        "transform": {"correct": "decoupled_token_is"},
        "prompt_mean": {"loss": {"aggregation": "prompt_mean"}},
        "constant": {"loss": {"aggregation": "constant", "max_tokens": 40}},
    }[kind]
    batch = make_batch([0.0, 1.0, 1.0, 0.2] * 2, [1, 40, 3, 9, 25, 2, 7, 5])
    found = []
    for limit in (1, 30, 100, 10_000):
        learner = make_learner(
            optimizer=torch.optim.SGD,
            lr=10.0,
            clip_grad_norm=None,
            max_tokens_per_pass=limit,
            **given,
        )
        before = weights(learner)
        learner.train(batch, 0)
        found.append(weights(learner) - before)
    for other in found[1:]:
        assert (other - found[0]).norm() < 1e-5 * found[0].norm()
    assert found[0].norm() > 0


def test_the_divergence_is_to_the_reference(make_learner, hf_model, tiny_model_path):
    """The reference's log-probs are Hugging Face's."""
    reference = load_model(tiny_model_path, device=CPU).requires_grad_(False)
    learner = make_learner(loss={"kl_to_ref_coeff": 0.1}, reference=reference)
    batch = make_batch([0.0, 1.0] * 4)
    assert learner.train(batch, 0)["train/kl_to_ref"] == pytest.approx(0, abs=1e-6)
    assert learner.train(batch, 0)["train/kl_to_ref"] > 1e-6
    rows = batch.select("tokens", "masks")
    learner._score(reference, "x", rows)
    for row in rows.unbind(0):
        expected = score(hf_model, row["tokens", "full"])
        written = row["masks", "all_assistant_mask"]
        assert (row["x", "full"] - expected)[written].abs().max() < 1e-5


@pytest.mark.parametrize("estimator", ["sampled", "reward"])
def test_estimates_need_the_log_probs_that_tokens_were_sampled_with(
    make_learner, estimator
):
    settings = Distillation(estimator=estimator)
    given = {"loss": {"distillation": settings}, "correct": "decoupled_token_is"}
    make_learner(**given)
    with pytest.raises(ConfigurationError, match="replaces it by a recomputed policy"):
        make_learner(**given, epochs=2)
    make_learner(loss=given["loss"], epochs=2)


def test_a_reference_that_cannot_pack_is_refused_at_once(make_learner, hf_model):
    hf_model.config._attn_implementation = "eager"
    for packing in (True, "tree"):
        with pytest.raises(ConfigurationError, match="attention by 'eager'"):
            make_learner(loss={"packing": packing}, reference=hf_model)
    make_learner(reference=hf_model)


@pytest.mark.parametrize("packing", [False, True])
def test_log_probs_of_a_bfloat16_model(tiny_model_path, tokenizer, packing):
    """All are computed in float32, and a step begins with a ratio of 1."""
    model = load_model(tiny_model_path, device=CPU, dtype=torch.bfloat16)
    loss = CorrectedGSPOLoss(
        scorer(model, tokenizer),
        packing=packing,
        entropy_bonus=True,
        kl_to_ref_coeff=0.1,
    )
    learner = Learner(
        loss,
        torch.optim.SGD(model.parameters(), lr=0.0),
        correct=OffPolicyCorrection("decoupled_token_is"),
        reference=model,
        epochs=2,
    )
    scored = []
    loss.on_scored = lambda rows, known: scored.append((rows, known))
    metrics = learner.train(make_batch([0.0, 1.0] * 4), 0)
    for name in ("clip_fraction", "kl_approx", "kl_to_ref"):
        assert metrics[f"train/{name}"] == 0.0
    rows, known = scored[0]
    assert known.dtype == torch.float32
    tokens = torch.stack(rows.get(("tokens", "full"), as_list=True))
    with torch.no_grad():
        expected = model(tokens).logits.float().log_softmax(-1)
    expected = expected[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(known[:, 3:], expected[:, 2:], atol=1e-3, rtol=0)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_divergence_of_a_step_is_to_its_old_policy(make_learner, minibatches):
    """Whether that is recomputed before, or that of the step's own pass."""
    learner = make_learner(
        correct="decoupled_token_is",
        optimizer=torch.optim.SGD,
        lr=0.0,
        minibatches=minibatches,
    )
    metrics = learner.train(make_batch([0.0, 1.0] * 4), 0)
    assert metrics["train/kl_approx"] == pytest.approx(0, abs=1e-5)
    assert abs(metrics["rollout_corr/kl"]) > 1e-2


@pytest.mark.parametrize("kind", ["plain", "transform", "two steps", "reference"])
def test_the_update_is_that_of_padded_passes(make_learner, kind, tiny_model_path):
    batch = make_batch([0.0, 1.0, 1.0, 0.2] * 2, [1, 40, 3, 9, 25, 2, 7, 5])
    given = {
        "plain": {},
        "transform": {"correct": "decoupled_token_is"},
        "two steps": {"correct": "decoupled_token_is", "minibatches": 2},
        "reference": {"loss": {"kl_to_ref_coeff": 0.1}},
    }[kind]
    found, tokens = [], []
    # Minibatches of trees have other rows.
    packings = (False, True) if kind == "two steps" else (False, True, "tree")
    for packing in packings:
        arguments = {**given, "loss": {**given.get("loss", {}), "packing": packing}}
        if kind == "reference":
            arguments["reference"] = load_model(tiny_model_path, device=CPU)
        learner = make_learner(
            optimizer=torch.optim.SGD,
            lr=10.0,
            clip_grad_norm=None,
            max_tokens_per_pass=45,
            **arguments,
        )
        sizes = []
        learner.model.register_forward_pre_hook(
            lambda _, args, kwargs, sizes=sizes: sizes.append(
                (args[0] if args else kwargs["input_ids"]).numel()
            ),
            with_kwargs=True,
        )
        before = weights(learner)
        torch.manual_seed(0)
        metrics = learner.train(batch, 0)
        found.append(weights(learner) - before)
        tokens.append(sizes)
    for other in found[1:]:
        assert (other - found[0]).norm() < 1e-5 * found[0].norm()
    assert found[0].norm() > 0
    padded, packed, *trees = tokens
    assert max(chain(packed, *trees)) <= 45
    times = 2 if kind == "two steps" else 1
    assert sum(packed) == times * (92 + 8 * 3) < sum(padded)
    for shared in trees:
        # Each pass computes the prompt once.
        assert sum(shared) <= times * (92 + 3 * 3)
        ratio = sum(packed) / sum(shared)
        assert metrics["train/tree_ratio"] == pytest.approx(ratio, rel=0.1)


def make_groups():
    """Four groups of four responses of one token, to prompts of 20."""
    batch = make_batch([0.0, 1.0, 1.0, 0.2] * 4, [1] * 16)
    for number, row in enumerate(batch.unbind(0)):
        for name in ("tokens", "masks", "log_probs"):
            for key, value in row[name].items():
                if key not in ("prompt", "response"):
                    row[name, key] = torch.cat([value[:1]] * 17 + [value])
        row["tokens", "full"][:20] = 5 + number // 4
        row["tokens", "prompt"] = row["tokens", "full"][:20]
    return batch


@pytest.mark.parametrize("limit", [10_000, 30, 22])
def test_rows_with_a_common_prefix_are_in_one_minibatch(make_learner, limit, caplog):
    batch = make_groups()
    learner = make_learner(
        loss={"packing": "tree"}, minibatches=2, max_tokens_per_pass=limit
    )
    with caplog.at_level("INFO", "torchrl"):
        metrics = learner.train(batch, 0)
    distinct = len({tuple(row["tokens", "full"].tolist()) for row in batch}) + 4 * 20
    ratio = 16 * 21 / distinct
    if limit == 22:
        assert metrics["train/tree_ratio"] < 0.7 * ratio
        assert caplog.text.count("Trees are cut") == 1
    else:
        assert metrics["train/tree_ratio"] == pytest.approx(ratio)
        assert "Trees are cut" not in caplog.text


def test_experts_of_another_number_of_tokens_are_refused(tokenizer):
    model = make_model("Qwen3Moe", PACKING["Qwen3Moe"])
    loss = CorrectedGRPOLoss(scorer(model, tokenizer), clip_epsilon=0.2, packing="tree")
    learner = Learner(loss, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = make_groups()
    for row in batch.unbind(0):
        experts = torch.zeros(len(row["tokens", "full"]) - 1, 2, 2, dtype=torch.int8)
        row["routed_experts"] = {"full": experts}
    with (
        replay_routing(model),
        pytest.raises(ConfigurationError, match="experts of 20 tokens for a sequence"),
    ):
        learner.train(batch, 0)


@pytest.mark.parametrize("kind", ["plain", "reference", "steps", "dropout"])
def test_prefixes_are_shared_where_that_pays(make_learner, kind, tiny_model_path):
    """Unless a batch takes several steps, or each response has its own dropout."""
    batch, found = make_groups(), []
    for packing in (False, "auto"):
        given = {"steps": {"minibatches": 2}}.get(kind, {})
        loss = {"packing": packing}
        if kind == "reference":
            given["reference"] = load_model(tiny_model_path, device=CPU)
            loss["kl_to_ref_coeff"] = 0.1
        learner = make_learner(
            optimizer=torch.optim.SGD, lr=10.0, clip_grad_norm=None, loss=loss, **given
        )
        if kind == "dropout":
            for module in learner.model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.1
            learner = Learner(learner.loss, learner.optimizer)
        before = weights(learner)
        torch.manual_seed(0)
        metrics = learner.train(batch, 0)
        found.append(weights(learner) - before)
        shares = packing == "auto" and kind in ("plain", "reference")
        assert ("train/tree_ratio" in metrics) == shares
    assert (found[1] - found[0]).norm() < 1e-5 * found[0].norm()
    metrics = learner.train(make_batch([0.0, 1.0, 1.0, 0.2], [20, 30, 25, 28]), 0)
    assert "train/tree_ratio" not in metrics


CORRECTIONS = {
    "is": {"correct": "decoupled_token_is"},
    "rejection": {
        "correct": RolloutCorrectionConfig(
            rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.6_2"
        )
    },
    "prompt_mean": {"correct": "decoupled_token_is", "aggregation": "prompt_mean"},
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_only_step_of_a_batch_needs_no_pass_before(make_learner, name):
    """Its old policy is that of the loss's own pass: the update is the same."""
    given = CORRECTIONS[name]
    aggregation = given.get("aggregation", "token_mean")
    batch = make_batch([0.0, 1.0, 1.0, 0.2] * 2, [1, 40, 3, 9, 25, 2, 7, 5])
    found, metrics, passes = [], [], []
    for one in (True, False):
        learner = make_learner(
            optimizer=torch.optim.SGD,
            lr=10.0,
            clip_grad_norm=None,
            loss={"aggregation": aggregation},
        )
        correct = OffPolicyCorrection(given["correct"], aggregation=aggregation)
        learner = Learner(
            learner.loss, learner.optimizer, correct=correct, clip_grad_norm=None
        )
        assert learner._one_pass
        learner._one_pass = one
        calls = []
        learner.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        before = weights(learner)
        metrics.append(learner.train(batch, 0))
        found.append(weights(learner) - before)
        passes.append(len(calls))
    assert passes == [1, 2]
    assert (found[1] - found[0]).norm() < 1e-5 * found[0].norm()
    assert found[0].norm() > 0
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"minibatches": 2},
        {"epochs": 2},
        {"loss": {"kl_to_inference_coeff": 0.1}},
        {"loss": {"aggregation": "prompt_mean"}},
        {"loss": {"masking_strategy": "rlhf"}},
    ],
)
def test_other_steps_need_the_pass_before(make_learner, given):
    assert not make_learner(correct="decoupled_token_is", **given)._one_pass


@pytest.mark.timeout(200)
def test_ranks_with_a_sharded_model_have_the_update_of_one_process():
    """Also after passes without gradients, which FSDP2 leaves gathered parameters of:
    those of the old policy before two steps, and those of a reference.
    """
    program = Path(__file__).with_name("learner_program.py")
    printed = run_ranks(program)
    found = json.loads(printed.splitlines()[-1])
    # Both ranks say that one has nothing to train on; the second says what is wrong
    # with its columns, and the first that it was another's.
    assert found.pop("refused") == [True, True, False, True]
    kinds = {"one step", "two steps", "reference", "replayed", "tree"}
    assert found.keys() == kinds | {"teacher", "sampled"}
    assert max(found.values()) < 1e-5


def test_the_reference_of_a_model_that_is_given(hf_model, tokenizer):
    """It is not the model that is trained, nor is that one frozen."""
    run = GRPO(
        copy.deepcopy(hf_model),
        prompts=["1+1="],
        rewards=lambda conversation, task: 0.0,
        engine="http://127.0.0.1:1",
        kl_to_ref_coeff=0.1,
        lr=1e-2,
    )
    training, alone = run._training, TrainerRanks()
    model = training.load(alone)
    reference = training.make_reference(model, alone)
    learner = training.make_learner(model, tokenizer, alone, reference=reference)
    batch = make_batch([0.0, 1.0] * 4)
    assert learner.train(batch, 0)["train/kl_to_ref"] == pytest.approx(0, abs=1e-6)
    assert learner.train(batch, 0)["train/kl_to_ref"] > 1e-6
    with pytest.raises(ConfigurationError, match="give its folder or name, or lora"):
        training.make_reference(model, TrainerRanks(size=2))


def test_nothing_is_dropped(hf_model):
    """Also where layers are in training mode, which checkpointing needs."""
    tokens = torch.arange(5, 40)
    expected = score(hf_model, tokens)
    config = copy.deepcopy(hf_model.config)
    config.attention_dropout = 0.5
    noisy = type(hf_model)(config)
    noisy.load_state_dict(hf_model.state_dict())
    model = load_model(noisy, device=CPU, gradient_checkpointing=True)
    assert model.training
    assert (score(model, tokens) - expected).abs().max() < 1e-5


def test_a_model_that_cannot_pack_is_said(tiny_model_path, tokenizer):
    model = load_model(tiny_model_path, device=CPU)
    model.set_attn_implementation("eager")
    loss = CorrectedGRPOLoss(scorer(model, tokenizer), clip_epsilon=0.2)
    with pytest.warns(RuntimeWarning, match="padded.*'eager', which needs a mask"):
        learner = Learner(loss, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert learner.train(make_batch([0.0, 1.0] * 4), 0)["train/grad_norm"] > 0


def test_minibatches_and_epochs(make_learner):
    learner = make_learner(minibatches=4, epochs=2)
    learner.train(make_batch([0.0, 1.0] * 4), 0)
    assert learner.steps == 8
    # As many as there are responses, at most.
    learner.train(make_batch([0.0, 1.0, 0.0, 1.0], unscored=2), 0)
    assert learner.steps == 8 + 4


CHANGED = {
    "lr": {"lr": 1e-6},
    "eps": {"eps": 1e-4},
    "weight_decay": {"weight_decay": 0.25},
    "schedule": {"warmup": 7},
    "clip": {"clip_grad_norm": 0.5},
}


@pytest.mark.parametrize("name", CHANGED)
def test_changed_settings_count_after_a_resumption(make_learner, name):
    """Optimizer and schedule are those of a new run at this step."""

    def made(lr=1e-3, warmup=3, eps=1e-8, weight_decay=0.1, **given):
        adam = partial(torch.optim.AdamW, eps=eps, weight_decay=weight_decay)
        learner = make_learner(lr=lr, optimizer=adam, **given)
        learner.schedule = get_scheduler(
            "linear", learner.optimizer, warmup, num_training_steps=20
        )
        return learner

    saving = made()
    batch = make_batch([0.0, 1.0] * 4)
    saving.train(batch, 0)
    saving.train(batch, 0)
    resumed, new = made(**CHANGED[name]), made(**CHANGED[name])
    resumed.load_state_dict(copy.deepcopy(saving.state_dict()))
    assert torch.equal(weights(resumed), weights(saving))
    for _ in range(2):
        new.optimizer.step()
        new.schedule.step()
    found, expected = resumed.optimizer.param_groups[0], new.optimizer.param_groups[0]
    assert {**found, "params": None} == {**expected, "params": None}
    (state, *_) = resumed.optimizer.state_dict()["state"].values()
    assert int(state["step"]) == 2
    resumed.train(batch, 0)
    new.optimizer.step()
    new.schedule.step()
    assert resumed.schedule.get_last_lr() == new.schedule.get_last_lr()


SCHEDULES = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, T_max=10, eta_min=1e-4),
    "StepLR": lambda o: lrs.StepLR(o, 3, 0.1),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, 1.0, 8),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 1.0, total_steps=12),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 1e-4, 1e-2, 3, cycle_momentum=False),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, 1.0, 3), lrs.CosineAnnealingLR(o, 7)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.LinearLR(o, 0.1, 1.0, 4), lrs.ExponentialLR(o, 0.9)]
    ),
}


class Halving(lrs.LRScheduler):
    """A schedule that makes a learning rate from the one before."""

    def __init__(self, optimizer):
        self.halved, self.own_optimizer = 0, optimizer
        super().__init__(optimizer)

    def get_lr(self):
        self.halved += self.last_epoch % 2
        factor = 0.5 if self.last_epoch % 2 else 1.0
        return [group["lr"] * factor for group in self.optimizer.param_groups]


SCHEDULES["user's"] = Halving


@pytest.mark.parametrize(("name", "lr"), diagonal(SCHEDULES, [3e-4, 1e-3]))
def test_a_schedule_goes_on_where_a_run_was(make_learner, name, lr):
    """The learning rates are those of a run without a break, also with another one, and
    after steps that are taken back.
    """
    batch = make_batch([0.0, 1.0, 1.0, 0.0])

    def made(lr):
        learner = make_learner(optimizer=torch.optim.SGD, lr=lr)
        learner.schedule = SCHEDULES[name](learner.optimizer)
        return learner

    def rates(learner, steps):
        return [learner.train(batch, 0)["train/lr"] for _ in range(steps)]

    whole, saving, resumed = made(lr), made(1e-3), made(lr)
    expected = rates(whole, 7)
    rates(saving, 4)
    state = copy.deepcopy(saving.state_dict())
    resumed.load_state_dict(state)
    assert rates(resumed, 3) == expected[4:]
    resumed.load_state_dict(state)
    assert rates(resumed, 3) == expected[4:]


def test_a_schedule_that_needs_more_than_steps_is_refused(make_learner):
    learner = make_learner()
    schedule = lrs.ReduceLROnPlateau(learner.optimizer)
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau.*CosineAnnealing"):
        Learner(learner.loss, learner.optimizer, schedule)


def muon_of(model):
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.0)


def adam_of_last(model):
    last = [model.lm_head.weight, *model.model.layers[-1].parameters()]
    groups = [{"params": last[:1]}, {"params": last[1:], "lr": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)


@pytest.mark.parametrize("make", [muon_of, adam_of_last])
def test_parameters_that_no_optimizer_has(make_learner, make):
    """They have no part in the norm, in a step that is skipped, and in the next one."""
    base, batch = make_learner(), make_batch([0.0, 1.0] * 4)
    model = base.model
    learner = Learner(base.loss, make(model), clip_grad_norm=None)
    trained = [p for group in learner.optimizer.param_groups for p in group["params"]]
    base.loss.accumulate([batch.exclude("query")])
    grads = [each.grad for each in trained]
    expected = torch.nn.utils.get_total_norm(grads).item()
    model.zero_grad()
    assert len(trained) < len(list(model.parameters()))
    for _ in range(3):
        found = learner.train(batch, 0)["train/grad_norm"]
        assert found == pytest.approx(expected, rel=1e-5)
        assert not any(each.grad is not None for each in model.parameters())
    other = next(p for p in model.parameters() if all(p is not t for t in trained))
    hook = other.register_hook(lambda grad: grad * math.nan)
    assert learner.train(batch, 0)["train/skipped"] == 0.0
    hook.remove()
    hook = trained[0].register_hook(lambda grad: grad * math.nan)
    with pytest.warns(RuntimeWarning, match="norm is nan"):
        assert learner.train(batch, 0)["train/skipped"] == 1.0
    hook.remove()
    assert learner.train(batch, 0)["train/skipped"] == 0.0


def test_an_optimizer_of_other_parameters_is_refused(make_learner):
    learner = make_learner()
    elsewhere = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    with pytest.raises(ConfigurationError, match="one of the optimizer's"):
        Learner(learner.loss, elsewhere)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("advantage", "no 'advantage'"),
        ("tokens", "no .'tokens', 'full'."),
        ("log_probs", "return_log_probs=True"),
    ],
)
def test_a_batch_that_lacks_a_column(make_learner, column, message):
    learner, batch = make_learner(), make_batch([0.0, 1.0] * 2)
    some = [row.exclude(column) if i else row for i, row in enumerate(batch.unbind(0))]
    for lacking in (batch.exclude(column), lazy_stack(some)):
        with pytest.raises(ConfigurationError, match=message):
            learner.train(lacking, 0)
        with pytest.raises(ConfigurationError, match=message.replace("no ", "")):
            learner.loss(lacking)


def test_log_probs_that_are_unknown_of_tokens_that_were_written(make_learner):
    """Nothing would ever be trained on."""
    batch = make_batch([0.0, 1.0] * 2)
    for row in batch.unbind(0):
        row["log_probs", "full"].fill_(math.nan)
    with pytest.raises(ConfigurationError, match="return_log_probs=True"):
        make_learner().train(batch, 0)


def test_invalid_arguments_are_refused(make_learner, tokenizer, hf_model):
    learner = make_learner()
    with pytest.raises(ConfigurationError, match="take CorrectedGRPOLoss"):
        Learner(GRPOLoss(scorer(hf_model, tokenizer)), learner.optimizer)
    learner.model.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="nothing to train"):
        Learner(learner.loss, learner.optimizer)
    for name in ("minibatches", "epochs", "max_tokens_per_pass"):
        with pytest.raises(ConfigurationError, match=name):
            make_learner(**{name: 0})


def test_passes_hold_all_sequences_once():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths = torch.randint(1, 60, (17,), generator=generator).tolist()
        limit = int(torch.randint(1, 200, (), generator=generator))
        for packed in (False, True):
            parts = cut_by_tokens(lengths, limit, packed=packed)
            assert sorted(index for part in parts for index in part) == list(range(17))
            for part in parts:
                each = [lengths[index] for index in part]
                used = sum(each) if packed else len(part) * max(each)
                assert used <= limit or len(part) == 1
            for least in (5, 30):
                cut = cut_by_tokens(lengths, limit, packed=packed, least=least)
                assert sorted(index for part in cut for index in part) == [*range(17)]
                assert len(cut) == max(len(parts), min(least, 17))
        # No two of the groups would fit into one.
        sums = [sum(lengths[index] for index in part) for part in parts]
        assert sums == sorted(sums)
        assert len(sums) < 2 or sums[0] + sums[1] > limit


def test_packed_passes_have_as_many_tokens():
    """A rank with few tokens waits in each pass for one with many."""
    many, few = [300, 4000, 3900, 500, 7800, 200], [900, 1100, 1000, 1000]
    parts = [
        cut_by_tokens(lengths, 9000, packed=True, least=2) for lengths in (many, few)
    ]
    for lengths, cut in zip((many, few), parts, strict=True):
        sums = [sum(lengths[index] for index in part) for part in cut]
        assert len(sums) == 2
        assert max(sums) - min(sums) <= 400
