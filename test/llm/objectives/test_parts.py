"""Gradients do not depend on how a batch is cut."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from helpers.sampled_batches import Case, TableActor, make_batch, make_case
from helpers.slow import diagonal
from tensordict import lazy_stack
from torch import nn

from torchrl_sglang import (
    CorrectedCISPOLoss,
    CorrectedGRPOLoss,
    CorrectedGSPOLoss,
    OffPolicyCorrection,
    RolloutCorrectionConfig,
)
from torchrl_sglang.errors import ConfigurationError

SIZES = (1, 2, 3, 4, 16)
"""Responses of a part."""

IN_LOSS = {
    "none": None,
    "clipping": "bypass_ppo_clip",
    "rejection": RolloutCorrectionConfig(
        rollout_is="token",
        rollout_rs="token_k1,seq_mean_k3",
        rollout_rs_threshold="0.6_1.5,0.3",
        bypass_mode=True,
        loss_type="reinforce",
    ),
    "everything rejected": RolloutCorrectionConfig.preset(
        "bypass_ppo_clip_k3_rs", rollout_rs_threshold=1e-12
    ),
    "staleness": RolloutCorrectionConfig(
        rollout_is="token", proximal="interpolated", max_staleness=2
    ),
}


class SlicedActor(nn.Module):
    """A policy whose logits are its parameters; rows say which are theirs."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_keys = [("tokens", "full")]
        self.logits = nn.Parameter(case.logits.to(dtype))

    def get_dist(self, tensordict):
        width = max(map(len, tensordict.get(("tokens", "full"), as_list=True)))
        rows = tensordict["row"].flatten()
        inner = TableActor(self.logits[rows, -width:])
        del inner.logits
        inner.logits = self.logits[rows, -width:]
        return inner.get_dist(tensordict)

    _get_sft_dist = _get_rlhf_dist = get_dist


def numbered(case: Case, *, unscored: int | None = None):
    """Returns the ragged batch of a case, with reference log-probs.

    Args:
        case: the rows.
        unscored: a row without any loss token: it has no log-prob, and is masked.
    """
    rows = []
    for number, row in enumerate(make_batch(case, "ragged").unbind(0)):
        if number == unscored:
            row["log_probs", "full"].fill_(math.nan)
            row["masks", "all_assistant_mask"].fill_(False)
        reference = row["log_probs", "full"].nan_to_num(-1.0, -1.0, -1.0) - 0.1
        row.set(("next", "ref_log_probs", "full"), reference)
        rows.append(row.set("row", torch.tensor([number])))
    return lazy_stack(rows)


def make_loss(actor, kind=CorrectedGRPOLoss, **kwargs):
    return kind(
        actor,
        clip_epsilon=(0.2, 0.3),
        entropy_coeff=0.1,
        kl_to_ref_coeff=0.5,
        kl_to_inference_coeff=0.2,
        masking_strategy="rlhf",
        consumer_version=4,
        **kwargs,
    )


def whole(loss, batch):
    """Returns gradient and output of one pass."""
    output = loss(batch)
    names = ("objective", "entropy", "kl_to_ref", "kl_to_inference")
    total = sum(getattr(output, f"loss_{name}").sum() for name in names)
    (gradient,) = torch.autograd.grad(total, loss.actor_network.logits)
    return gradient, output


def check(case, batch, kind, dtype, **kwargs):
    precision = 1e-10 if dtype == torch.float64 else 1e-5
    expected, output = whole(make_loss(SlicedActor(case, dtype), kind, **kwargs), batch)
    limits = {"atol": precision * max(expected.norm().item(), 1e-3), "rtol": precision}
    for size in SIZES:
        loss = make_loss(SlicedActor(case, dtype), kind, **kwargs)
        found = loss.accumulate(batch.split(size))
        gradient = loss.actor_network.logits.grad
        torch.testing.assert_close(gradient, expected, **limits)
        assert type(found) is type(output)
        for name in ("loss_objective", "loss_entropy", "loss_kl_to_ref", "kl_approx"):
            torch.testing.assert_close(
                getattr(found, name).sum(),
                getattr(output, name).detach().sum(),
                atol=1e-5,
                rtol=1e-5,
            )
        assert all(map(math.isfinite, loss.correction_metrics.values()))


@pytest.mark.parametrize(
    ("name", "form"),
    diagonal(
        IN_LOSS, product(["token_mean", "prompt_mean"], [torch.float64, torch.float32])
    ),
)
@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 8), marks=pytest.mark.slow)], ids=str
)
def test_the_gradient_is_that_of_one_pass(name, form, seeds):
    aggregation, dtype = form
    for seed in seeds:
        case = make_case(seed, unknown=0.2 if seed % 3 == 2 else 0.0)
        batch = numbered(case, unscored=0 if seed % 4 == 3 else None)
        options = {"correction": IN_LOSS[name], "aggregation": aggregation}
        check(case, batch, CorrectedGRPOLoss, dtype, **options)


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_cispo(aggregation):
    case = make_case(3)
    check(
        case, numbered(case), CorrectedCISPOLoss, torch.float64, aggregation=aggregation
    )


@pytest.mark.parametrize("kind", [CorrectedGRPOLoss, CorrectedGSPOLoss])
def test_other_normalisations(kind):
    options = {}
    if kind is CorrectedGRPOLoss:
        options = {"aggregation": "constant", "max_tokens": 9}
    for seed in range(4):
        case = make_case(seed)
        check(case, numbered(case), kind, torch.float64, **options)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize(
    "config",
    [
        "decoupled_seq_is_rs",
        RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True),
        RolloutCorrectionConfig(
            rollout_is=None, rollout_rs="token_k3", rollout_rs_threshold=0.05
        ),
    ],
    ids=str,
)
def test_a_batch_that_was_corrected_whole(config, aggregation):
    """Weights that are divided by their mean over the batch are right, too."""
    for seed in range(6):
        case = make_case(seed)
        correct = OffPolicyCorrection(
            config, masking_strategy="rlhf", aggregation=aggregation
        )
        batch = correct(numbered(case, unscored=0 if seed % 2 else None))
        check(case, batch, CorrectedGRPOLoss, torch.float64, aggregation=aggregation)


def test_gradients_that_are_there_are_added_to():
    case = make_case(2)
    batch = numbered(case)
    expected, _ = whole(make_loss(SlicedActor(case, torch.float64)), batch)
    loss = make_loss(SlicedActor(case, torch.float64))
    loss.actor_network.logits.grad = torch.ones_like(expected)
    loss.accumulate(batch.split(2))
    torch.testing.assert_close(loss.actor_network.logits.grad, expected + 1)


def test_parts_that_fail_leave_no_gradient():
    case = make_case(2)
    batch = numbered(case)
    batch[len(batch) - 1]["advantage"].fill_(math.nan)
    loss = make_loss(SlicedActor(case, torch.float64))
    with pytest.raises(ConfigurationError, match="'advantage' is nan in row 0 of"):
        loss.accumulate(batch.split(1))
    assert loss.actor_network.logits.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "none"}, "leave the average over the batch"),
        (
            {
                "correction": RolloutCorrectionConfig(
                    rollout_is="token",
                    rollout_is_batch_normalize=True,
                    proximal="interpolated",
                )
            },
            "rollout_is_batch_normalize=True divides",
        ),
    ],
)
def test_what_cannot_be_cut(options, message):
    case = make_case(2)
    loss = make_loss(SlicedActor(case, torch.float64), **options)
    with pytest.raises(ConfigurationError, match=message):
        loss.accumulate(numbered(case).split(1))


def test_no_part_at_all():
    with pytest.raises(ConfigurationError, match="no part of a batch"):
        make_loss(SlicedActor(make_case(2), torch.float64)).accumulate([])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["advantage", "reference"])
def test_a_column_that_is_not_finite(column, value):
    case = make_case(2)
    batch = numbered(case)
    key = "advantage" if column == "advantage" else ("next", "ref_log_probs", "full")
    batch[1].get(key)[-1] = value
    loss = make_loss(SlicedActor(case, torch.float64))
    with pytest.raises(ConfigurationError, match=rf"{value} in row 1 of the batch"):
        loss(batch)
    if column == "advantage":
        correct = OffPolicyCorrection("decoupled_token_is", masking_strategy="rlhf")
        with pytest.raises(ConfigurationError, match="'advantage' is"):
            correct(batch)


def masked(case: Case):
    """Returns a batch whose tokens were all masked since they were written."""
    rows = make_batch(case, "ragged").unbind(0)
    for row in rows:
        row["log_probs", "full"].fill_(math.nan)
        row["masks", "all_assistant_mask"].fill_(False)
    return lazy_stack([row.set("row", torch.tensor([i])) for i, row in enumerate(rows)])


@pytest.mark.parametrize("strategy", ["rlhf", "sft"])
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_a_batch_that_is_wholly_masked_has_no_weight(aggregation, strategy):
    case = make_case(2)
    correct = OffPolicyCorrection(
        "decoupled_token_is", masking_strategy=strategy, aggregation=aggregation
    )
    batch = correct(masked(case))
    assert all(map(math.isfinite, correct.metrics.values()))
    unknown = correct.metrics["rollout_corr/unknown_masked_fraction"]
    assert unknown == (1.0 if strategy == "sft" else 0.0)
    for correction in (None, "bypass_ppo_clip_k3_rs"):
        loss = CorrectedGRPOLoss(
            SlicedActor(case, torch.float64),
            masking_strategy=strategy,
            aggregation=aggregation,
            correction=correction,
        )
        output = loss(batch if correction is None else masked(case))
        (output.loss_objective + output.loss_entropy).sum().backward()
        assert output.loss_objective.sum().item() == 0
        assert not loss.actor_network.logits.grad.any()
        assert all(map(math.isfinite, loss.correction_metrics.values()))


def test_log_probs_that_are_missing_are_no_masked_tokens():
    case = make_case(2)
    batch = numbered(case)
    for row in batch.unbind(0):
        row["log_probs", "full"].fill_(math.nan)
    loss = CorrectedGRPOLoss(
        SlicedActor(case, torch.float64),
        masking_strategy="rlhf",
        correction="bypass_ppo_clip_k3_rs",
    )
    for run in (lambda: loss(batch), lambda: loss.accumulate(batch.split(1))):
        with pytest.raises(ConfigurationError, match="return_log_probs=True"):
            run()


def test_log_probs_of_a_trainer_that_is_broken():
    case = make_case(2)
    batch = make_batch(case, "padded")
    lost = torch.full_like(batch["train_log_probs", "full"], math.nan)
    correct = OffPolicyCorrection("decoupled_token_is", masking_strategy="rlhf")
    with pytest.raises(ConfigurationError, match="Every log-prob of the trainer is"):
        correct(batch.set(("train_log_probs", "full"), lost))
