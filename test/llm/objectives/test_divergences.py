"""Divergences from a teacher equal autograd's over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from torchrl_sglang import Distillation
from torchrl_sglang.errors import ConfigurationError, NotFiniteError
from torchrl_sglang.objectives.distillation import (
    LARGEST_WEIGHT,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    TEACHER_TOPS,
    compared_ids,
    distillation_terms,
)
from torchrl_sglang.objectives.divergences import (
    least_k,
    missed_mass,
    token_divergence,
)
from torchrl_sglang.objectives.packing import PassTerms
from torchrl_sglang.objectives.support import Drawn
from torchrl_sglang.objectives.token_terms import token_terms

VOCABULARY, TOKENS = 40, 9


def whole_divergence(kind, student, teacher, share):
    """The definitions, over the whole vocabulary."""
    kl = torch.nn.functional.kl_div
    options = {"reduction": "none", "log_target": True}
    if kind == "reverse":
        return kl(teacher, student, **options).sum(-1)
    if kind == "forward":
        return kl(student, teacher, **options).sum(-1)
    mixture = (share * teacher.exp() + (1 - share) * student.exp()).log()
    of_teacher = kl(mixture, teacher, **options).sum(-1)
    return share * of_teacher + (1 - share) * kl(mixture, student, **options).sum(-1)


def logits_of(seed, sharpness=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return sharpness * torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=dtype)


def divergence_of(settings, logits, teacher):
    top = teacher.topk(settings.k, -1)
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    _, _, log_probs = token_terms(logits * 1, tokens, ids=top.indices)
    return token_divergence(settings, log_probs, top.values, vocabulary=VOCABULARY)


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
def test_with_all_tokens_value_and_gradient_are_exact(kind, share):
    logits = logits_of(0).requires_grad_()
    teacher = logits_of(1, 2.0).log_softmax(-1)
    expected = whole_divergence(kind, logits.log_softmax(-1), teacher, share)
    settings = Distillation(divergence=kind, k=VOCABULARY, teacher_share=share)
    found = divergence_of(settings, logits, teacher)
    assert torch.allclose(found, expected, atol=1e-12)
    weights = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((weights * expected).sum(), logits)
    (gradient,) = torch.autograd.grad((weights * found).sum(), logits)
    assert torch.allclose(gradient, wanted, atol=1e-12)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
def test_the_error_of_the_top_tokens_is_bounded_by_the_missed_mass(kind):
    """Of a student that starts at the teacher, as a trained one ends."""
    teacher = logits_of(1, 4.0).log_softmax(-1)
    logits = (teacher + 0.2 * logits_of(2)).requires_grad_()
    expected = whole_divergence(kind, logits.log_softmax(-1), teacher, 0.5)
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    errors = []
    for k in (2, 8, 20):
        found = divergence_of(Distillation(divergence=kind, k=k), logits, teacher)
        assert (found <= expected + 1e-12).all()
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        missed = missed_mass(teacher.topk(k, -1).values)
        error = (gradient - wanted).abs().sum(-1)
        assert (error <= 2 * missed + 1e-9).all()
        errors.append(error.max().item())
    assert errors == sorted(errors, reverse=True)


def test_the_other_tokens_keep_a_student_from_leaving_the_set():
    teacher = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    settings = Distillation(k=2)
    inside = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    outside = torch.tensor([[1e-6, 1e-6, 0.5, 0.5 - 2e-6]]).log()
    values = [
        token_divergence(settings, student[:, :2], teacher[:, :2], vocabulary=4)
        for student in (inside, outside)
    ]
    assert values[0].abs().max() < 1e-6
    assert values[1].item() > 1


def test_a_gradient_beside_that_of_the_sampled_token_is_exact():
    """With temperatures and supports, which the divergence has not."""
    logits = logits_of(3).requires_grad_()
    tokens = torch.arange(TOKENS)
    ids = logits_of(4).topk(5, -1).indices
    counts = torch.tensor([0, 3] * (TOKENS // 2) + [0])
    support = [
        torch.tensor([token, token + 1, token + 2])
        for token, count in zip(tokens.tolist(), counts.tolist(), strict=True)
        if count
    ]
    drawn = Drawn(
        temperatures=torch.full((TOKENS,), 0.7, dtype=torch.float64),
        counts=counts,
        ids=torch.cat(support),
    )
    weights = logits_of(5)[:, :5]
    scaled = logits / 0.7
    for row, count in enumerate(counts.tolist()):
        if count:
            mask = torch.ones(VOCABULARY, dtype=torch.bool)
            mask[row : row + 3] = False
            penalty = torch.zeros_like(scaled)
            penalty[row, mask] = -math.inf
            scaled = scaled + penalty
    expected = scaled.log_softmax(-1).gather(-1, tokens[:, None]).sum()
    expected = expected + (weights * logits.log_softmax(-1).gather(-1, ids)).sum()
    (wanted,) = torch.autograd.grad(expected, logits)
    log_probs, _, others = token_terms(logits * 1, tokens, sampling=drawn, ids=ids)
    total = log_probs.sum() + (weights * others).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    assert torch.allclose(total, expected, atol=1e-12)
    assert torch.allclose(gradient, wanted, atol=1e-12)


def terms_of(settings, columns, id_log_probs, vocabulary):
    """Returns the terms of a batch of one row, all of whose tokens count."""
    batch = TensorDict({}, batch_size=(1,))
    for key, value in columns.items():
        batch[key] = value.detach()[None]
    mask = torch.ones(1, len(id_log_probs), dtype=torch.bool)
    zeros = torch.zeros(1, len(id_log_probs))
    policy = PassTerms(
        mask=mask, log_prob=zeros, entropy=zeros, id_log_probs=id_log_probs[None]
    )
    return distillation_terms(
        settings, batch, policy, mask, rollout_key="rollout", vocabulary=vocabulary
    )


def sampled_terms(estimator, student, teacher, rollout):
    """Returns the terms of a batch in which each token was sampled once."""
    return terms_of(
        Distillation(estimator=estimator),
        {TEACHER_LOG_PROBS: teacher, "rollout": rollout},
        student[:, None],
        len(student),
    )


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("estimator", ["sampled", "reward"])
def test_estimates_from_samples_have_the_gradient_of_the_reverse_divergence(
    estimator, stale
):
    """In expectation, by enumeration of all tokens, and of stale samples."""
    logits = logits_of(6)[0].requires_grad_()
    student, teacher = logits.log_softmax(-1), logits_of(7)[0].log_softmax(-1)
    rollout = (logits + 0.3 * logits_of(8)[0]).log_softmax(-1) if stale else student
    expected = whole_divergence("reverse", student, teacher, 0.5)
    (wanted,) = torch.autograd.grad(expected, logits, retain_graph=True)
    terms = sampled_terms(estimator, student, teacher, rollout)
    probs = rollout.exp().detach()
    ratio = (student.detach() - rollout.detach()).exp()
    assert (ratio < LARGEST_WEIGHT).all()
    if estimator == "sampled":
        loss = (probs * terms.loss).sum()
    else:
        # The advantage's gradient is the policy loss's.
        loss = -(probs * ratio * terms.advantage[..., 0] * student).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(gradient, wanted, atol=1e-12)
    assert torch.allclose((probs * terms.divergence).sum(), expected, atol=1e-12)
    variance = terms.metrics(torch.ones(1, VOCABULARY).bool())["distillation_variance"]
    found = terms.divergence.var(correction=0)
    assert torch.allclose(variance, found, atol=1e-9)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("estimator", ["top_k", "sampled", "reward"])
def test_log_probs_that_are_not_finite_are_refused(estimator, value):
    log_probs = torch.full((3,), -1.0)
    columns = {
        TEACHER_LOG_PROBS: log_probs.clone(),
        TEACHER_IDS: torch.zeros(3, 1, dtype=torch.int64),
        TEACHER_TOPS: log_probs.clone()[:, None],
        "rollout": log_probs,
    }
    columns[TEACHER_LOG_PROBS][1] = columns[TEACHER_TOPS][1] = value
    with pytest.raises(NotFiniteError, match="in row 0"):
        terms_of(Distillation(estimator=estimator), columns, log_probs[:, None], 9)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
def test_tokens_that_the_student_lacks_are_others(kind):
    """As in a teacher whose output layer was padded with further rows."""
    settings, logits = Distillation(divergence=kind, k=6), logits_of(3).requires_grad_()
    teacher = logits_of(1, 2.0).log_softmax(-1)
    ids = teacher.topk(5, -1).indices
    lacked = torch.full((TOKENS, 1), VOCABULARY + 2)
    columns = {
        TEACHER_IDS: torch.cat([ids[:, :2], lacked, ids[:, 2:]], -1),
        TEACHER_TOPS: teacher.gather(-1, ids)[:, [0, 1, 1, 2, 3, 4]] - 0.1,
    }
    batch = TensorDict({TEACHER_IDS: columns[TEACHER_IDS][None]}, batch_size=(1,))
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    compared = compared_ids(settings, batch, tokens, VOCABULARY)[0]
    assert compared.max() < VOCABULARY
    student = logits.log_softmax(-1)
    terms = terms_of(settings, columns, student.gather(-1, compared), VOCABULARY)
    expected = token_divergence(
        settings, student.gather(-1, ids), teacher.gather(-1, ids) - 0.1, vocabulary=40
    )
    assert torch.allclose(terms.divergence[0], expected, atol=1e-12)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    assert torch.allclose(gradient, wanted, atol=1e-12)


def test_a_mass_decides_k():
    log_probs = torch.tensor([[0.5, 0.3, 0.1], [0.7, 0.2, 0.1]]).log()
    assert [least_k(log_probs, mass) for mass in (0.59, 0.61, 0.84, 0.86, 0.999)] == [
        *(1, 2, 2, 3, 4)
    ]
    settings = Distillation(k="mass:0.99")
    assert (settings.mass, settings.num_top(99), settings.num_top(10**5)) == (
        *(0.99, 99, 256),
    )
    assert Distillation(k=8).mass is None


def test_a_whole_vocabulary_is_a_small_one():
    settings = Distillation(estimator="vocabulary", divergence="forward")
    assert settings.num_top(99) == 99
    with pytest.raises(ConfigurationError, match="at most 8192 tokens"):
        settings.num_top(150_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"divergence": "revers"}, "Did you mean 'reverse'"),
        ({"estimator": "k2"}, "not one of top_k, vocabulary, sampled, reward"),
        ({"estimator": "student_top_k"}, "one list of tokens for all positions"),
        ({"divergence": "forward", "estimator": "sampled"}, "'reverse' alone"),
        ({"k": 0}, "k"),
        ({"k": "64"}, "neither a number of tokens nor a share"),
        ({"k": "mass:1.5"}, "between 0 and 1"),
        ({"weight": -1.0}, "weight"),
        ({"teacher_share": 1.0}, "between 0 and 1"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Distillation(**arguments)
