"""The losses: what TorchRL's get wrong, and that nothing else differs from them."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from helpers.sampled_batches import TableActor, make_batch, make_case
from tensordict import lazy_stack
from torch import nn
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import CISPOLoss as TorchRLCISPOLoss
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss

from torchrl_sglang import (
    CorrectedCISPOLoss,
    CorrectedGRPOLoss,
    OffPolicyCorrection,
    RolloutCorrectionConfig,
)
from torchrl_sglang.errors import ConfigurationError

CLIP = (0.2, 0.3)
SEEDS = range(6)


def make_loss(kind, actor, **kwargs):
    options = {
        "clip_epsilon": CLIP,
        "entropy_bonus": False,
        "masking_strategy": "rlhf",
        **kwargs,
    }
    return kind(actor, **options)


def gradient(kind, case, batch, **kwargs):
    """Returns the output of a loss and the gradient of its objective."""
    actor = TableActor(case.logits)
    output = make_loss(kind, actor, **kwargs)(batch)
    (found,) = torch.autograd.grad(output.loss_objective.sum(), actor.logits)
    return output, found


def clipped_tokens(case) -> list[tuple[int, int, int, float]]:
    """Returns row, position, token and advantage where CISPO's weight is clipped."""
    return [
        (index, case.width - len(row.tokens) + t, row.tokens[t], row.advantage)
        for index, row in enumerate(case.rows)
        for t in range(len(row.tokens))
        if not 1 - CLIP[0] <= math.exp(row.train[t] - row.rollout[t]) <= 1 + CLIP[1]
    ]


def test_torchrls_cispo_has_no_gradient_for_clipped_tokens():
    """The fault that ours is there for, in the installed version."""
    case = make_case(2)
    _, theirs = gradient(TorchRLCISPOLoss, case, make_batch(case, "ragged"))
    _, ours = gradient(CorrectedCISPOLoss, case, make_batch(case, "ragged"))
    clipped = clipped_tokens(case)
    assert clipped
    for index, position, _, _ in clipped:
        assert not theirs[index, position].any()
        assert ours[index, position].any()


@pytest.mark.parametrize(
    "options", [{"aggregation": "constant"}, {"max_tokens": 4}], ids=str
)
def test_a_constant_needs_both(options):
    with pytest.raises(ConfigurationError, match="give aggregation='constant' and"):
        make_loss(CorrectedGRPOLoss, TableActor(make_case(0).logits), **options)


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
@pytest.mark.parametrize("threshold", [None, 0.05])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_objective_is_torchrls(seed, threshold, aggregation):
    case = make_case(seed, unknown=0.2 if seed == 5 else 0.0)
    options = {"aggregation": aggregation, "kl_mask_threshold": threshold}
    batch = make_batch(case, "padded" if seed % 2 else "ragged")
    expected, expected_gradient = gradient(TorchRLGRPOLoss, case, batch, **options)
    found, found_gradient = gradient(CorrectedGRPOLoss, case, batch, **options)
    torch.testing.assert_close(found.loss_objective, expected.loss_objective)
    torch.testing.assert_close(found_gradient, expected_gradient)
    torch.testing.assert_close(found.ESS, expected.ESS)
    assert type(found) is type(expected)


def with_reference(case, layout: str):
    """Adds log-probs of a reference policy, which are those of the rollout."""
    batch = make_batch(case, layout)
    if layout == "ragged":
        rows = [
            row.set(("next", "ref_log_probs", "full"), row["log_probs", "full"])
            for row in batch.unbind(0)
        ]
        return lazy_stack(rows)
    reference = batch["log_probs", "full"]
    return batch.set(("next", "ref_log_probs", "full"), reference)


def averages(kind, case, batch) -> dict[str, float]:
    loss = make_loss(
        kind,
        TableActor(case.logits),
        kl_to_ref_coeff=0.5,
        kl_to_inference_coeff=0.25,
        entropy_bonus=True,
        entropy_coeff=0.1,
    )
    names = ("clip_fraction", "kl_approx", "entropy", "kl_to_ref", "kl_to_inference")
    losses = ("loss_kl_to_ref", "loss_kl_to_inference", "loss_entropy")
    output = loss(batch)
    return {name: getattr(output, name).item() for name in (*names, *losses)}


@pytest.mark.parametrize("seed", SEEDS)
def test_averages_are_over_the_tokens_of_the_loss(seed):
    case = make_case(seed)
    found = averages(CorrectedGRPOLoss, case, with_reference(case, "ragged"))
    pairs = [
        (train, rollout)
        for row in case.rows
        for train, rollout in zip(row.train, row.rollout, strict=True)
    ]
    ratios = [math.exp(train - rollout) for train, rollout in pairs]
    entropies = [
        -sum(p * math.log(p) for p in case.logits[index, position].softmax(0).tolist())
        for index, row in enumerate(case.rows)
        for position in range(case.width - len(row.tokens), case.width)
    ]
    divergence = fmean(math.exp(b - a) - 1 - (b - a) for a, b in pairs)
    expected = {
        "clip_fraction": fmean(not 0.8 <= ratio <= 1.3 for ratio in ratios),
        "kl_approx": fmean(b - a for a, b in pairs),
        "entropy": fmean(entropies),
        "kl_to_ref": divergence,
        "kl_to_inference": divergence,
        "loss_kl_to_ref": 0.5 * divergence,
        "loss_kl_to_inference": 0.25 * divergence,
        "loss_entropy": -0.1 * fmean(entropies),
    }
    assert found == pytest.approx(expected, abs=1e-6, rel=1e-6)


def widen(case, batch, columns: int):
    """Returns a padded batch, and its case, with more padding."""
    shape = (len(case.rows), columns)
    for key in batch.keys(True, True):
        if (isinstance(key, tuple) and "full" in key[-1]) or "mask" in key[-1]:
            value = batch[key]
            padding = torch.zeros(shape, dtype=value.dtype)
            batch.set(key, torch.cat([padding, value], 1))
    logits = nn.functional.pad(case.logits, (0, 0, columns, 0), value=0.3)
    return type(case)(case.rows, logits), batch


def test_padding_changes_torchrls_averages_and_not_ours():
    case = make_case(3)
    narrow = with_reference(case, "padded")
    wide_case, wide = widen(case, with_reference(case, "padded"), 9)
    assert averages(CorrectedGRPOLoss, wide_case, wide) == pytest.approx(
        averages(CorrectedGRPOLoss, case, narrow)
    )
    theirs = averages(TorchRLGRPOLoss, case, narrow)
    padded = averages(TorchRLGRPOLoss, wide_case, wide)
    # What the installed version of TorchRL gets wrong.
    wrong = {name for name in theirs if theirs[name] != pytest.approx(padded[name])}
    assert wrong == {
        *("clip_fraction", "kl_approx", "entropy", "kl_to_ref", "kl_to_inference"),
        *("loss_kl_to_ref", "loss_kl_to_inference"),
    }


def test_the_mask_of_the_divergence_is_about_the_sampling_policy():
    """TorchRL documents the reference policy; neither loss reads it here."""
    case = make_case(2)
    batch = make_batch(case, "ragged")
    assert ("next", "ref_log_probs", "full") not in batch.keys(True)
    for kind in (TorchRLGRPOLoss, CorrectedGRPOLoss):
        _, found = gradient(kind, case, batch, kl_mask_threshold=0.05)
        for index, row in enumerate(case.rows):
            for t in range(len(row.tokens)):
                distance = 0.5 * (row.train[t] - row.rollout[t]) ** 2
                position = case.width - len(row.tokens) + t
                if distance > 0.05:
                    assert not found[index, position].any()


def test_an_advantage_per_token_meets_its_token():
    case = make_case(2)
    rows = []
    for row, source in zip(
        make_batch(case, "ragged").unbind(0), case.rows, strict=True
    ):
        length = len(source.prompt) + len(source.tokens)
        advantage = torch.full((length, 1), source.advantage, dtype=torch.float64)
        rows.append(row.set("advantage", advantage))
    expected, _ = gradient(CorrectedGRPOLoss, case, make_batch(case, "ragged"))
    found, _ = gradient(CorrectedGRPOLoss, case, lazy_stack(rows))
    torch.testing.assert_close(found.loss_objective, expected.loss_objective)


def test_a_batch_in_which_every_token_is_masked():
    case = make_case(2)
    output, found = gradient(
        CorrectedGRPOLoss, case, make_batch(case, "ragged"), kl_mask_threshold=1e-15
    )
    assert not found.any()
    for name in ("loss_objective", "ESS", "clip_fraction", "kl_approx"):
        assert getattr(output, name).item() == 0


IN_LOSS = {
    "k3": "bypass_ppo_clip_k3_rs",
    "k1": RolloutCorrectionConfig.preset(
        "bypass_ppo_clip_geo_rs", rollout_rs_threshold="0.8_1.5"
    ),
    "reinforce": "bypass_pg_is",
    "IcePop": "bypass_pg_token_icepop",
    "DPPO and staleness": RolloutCorrectionConfig(
        rollout_is=None, bypass_mode=True, dppo_threshold=0.05, max_staleness=2
    ),
    "interpolated": RolloutCorrectionConfig(
        rollout_is="token", proximal="interpolated"
    ),
}


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
@pytest.mark.parametrize("name", IN_LOSS)
def test_a_correction_in_the_loss_is_that_of_the_transform(name, aggregation):
    """The transform's gradients are held to the formulas in their own tests."""
    config = IN_LOSS[name]
    for seed in SEEDS:
        case = make_case(seed, unknown=0.1 if seed == 5 else 0.0)
        batch = make_batch(case, "padded" if seed % 2 else "ragged")
        correct = OffPolicyCorrection(
            config, masking_strategy="rlhf", aggregation=aggregation, consumer_version=4
        )
        expected, expected_gradient = gradient(
            TorchRLGRPOLoss, case, correct(batch), aggregation=aggregation
        )
        actor = TableActor(case.logits)
        loss = make_loss(
            CorrectedGRPOLoss,
            actor,
            aggregation=aggregation,
            correction=config,
            consumer_version=4,
        )
        found = loss(batch.exclude("train_log_probs"))
        (found_gradient,) = torch.autograd.grad(
            found.loss_objective.sum(), actor.logits
        )
        torch.testing.assert_close(
            found_gradient, expected_gradient, atol=1e-9, rtol=1e-9
        )
        torch.testing.assert_close(found.loss_objective, expected.loss_objective)
        assert loss.correction_metrics == pytest.approx(correct.metrics)


def test_losses_refuse_invalid_arguments():
    case = make_case(2)
    actor = TableActor(case.logits)
    with pytest.raises(ConfigurationError, match="give it to OffPolicyCorrection"):
        make_loss(CorrectedGRPOLoss, actor, correction="decoupled_token_is")
    batch = make_batch(case, "padded")
    with pytest.raises(ConfigurationError, match="MCAdvantage"):
        make_loss(CorrectedGRPOLoss, actor)(batch.exclude("advantage"))
    flat = batch.clone().set("advantage", torch.zeros(len(batch), 1))
    with pytest.raises(ConfigurationError, match="must have shape"):
        make_loss(CorrectedGRPOLoss, actor)(flat)


def saved_index(loss, batch) -> int:
    """Returns the size of the largest mask or index that a forward pass saves."""
    largest = 0

    def save(tensor):
        nonlocal largest
        if not tensor.is_floating_point():
            largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss(batch)
    return largest


@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
def test_the_logits_of_a_ragged_batch_have_no_index_each(hf_model, tokenizer, strategy):
    """As in TorchRL's class, with the same losses and gradients."""
    case = make_case(1)
    batch = make_batch(case, "ragged")
    found, saved = [], []
    for kind in (TorchRLGRPOLoss, CorrectedGRPOLoss):
        actor = TransformersWrapper(
            hf_model, tokenizer=tokenizer, input_mode="tokens", generate=False
        )
        loss = make_loss(kind, actor, masking_strategy=strategy)
        saved.append(saved_index(loss, batch))
        output = loss(batch)
        hf_model.zero_grad()
        output.loss_objective.backward()
        gradients = {n: p.grad.clone() for n, p in hf_model.named_parameters()}
        found.append({"loss": output.loss_objective.detach(), **gradients})
    hf_model.zero_grad()
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)
    assert found[0]["lm_head.weight"].any()
    theirs, ours = saved
    vocabulary = hf_model.config.vocab_size
    tokens = sum(len(row.prompt) + len(row.tokens) for row in case.rows)
    assert theirs >= vocabulary * tokens
    assert ours <= case.width * len(case.rows)
