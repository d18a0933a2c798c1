"""The divergence that a set of tokens misses, and its estimate from samples."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from torchrl_sglang import Distillation
from torchrl_sglang.objectives.calibration import missed_divergence
from torchrl_sglang.objectives.distillation import (
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    TEACHER_TOPS,
    compared_ids,
    distillation_terms,
)
from torchrl_sglang.objectives.divergences import token_divergence
from torchrl_sglang.objectives.packing import PassTerms
from torchrl_sglang.requests.token_columns import TOKENS

VOCABULARY = 40


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
@pytest.mark.parametrize("k", [2, 20, VOCABULARY])
def test_the_mean_over_all_tokens_is_the_missed_divergence(kind, k):
    """In expectation over the student's tokens, by enumeration."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = (
        2 * torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64)
    ).log_softmax(-1)
    options = {"divergence": kind, "teacher_share": 0.3}
    top = teacher.topk(k).indices

    def divergence(ids):
        settings = Distillation(**options, k=len(ids))
        pair = student[ids][None], teacher[ids][None]
        return token_divergence(settings, *pair, vocabulary=VOCABULARY)

    expected = divergence(torch.arange(VOCABULARY)) - divergence(top)
    tokens = torch.arange(VOCABULARY)
    ids = torch.cat([top.expand(VOCABULARY, k), tokens[:, None]], -1)
    outside = ~torch.isin(tokens, top)
    settings = Distillation(**options, k=k)
    found = missed_divergence(settings, student[ids], teacher[ids], outside)
    assert torch.allclose((student.exp() * found).sum(), expected, atol=1e-9)
    assert (expected > 1e-3).item() is (k < VOCABULARY)
    assert not found[~outside].any()


def test_a_batch_has_the_estimate_beside_its_divergence():
    """Each token of the vocabulary was sampled once, at the same place."""
    student, teacher = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]).log()
    tokens, mask = torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool)
    top = teacher.topk(2)
    batch = TensorDict(
        {
            TOKENS: tokens,
            TEACHER_LOG_PROBS: teacher[None],
            TEACHER_IDS: top.indices.expand(1, 4, 2),
            TEACHER_TOPS: top.values.expand(1, 4, 2),
            ("log_probs", "full"): student[None] - math.log(2),
        },
        batch_size=(1,),
    )
    settings = Distillation(k=2)
    ids = compared_ids(settings, batch, tokens, 4)
    policy = PassTerms(
        mask=mask,
        log_prob=student[None],
        entropy=torch.zeros(1, 4),
        id_log_probs=student[ids],
    )
    terms = distillation_terms(
        settings, batch, policy, mask, rollout_key=("log_probs", "full"), vocabulary=4
    )
    whole = (student.exp() * (student - teacher)).sum()
    # Of samples that are half as likely as the student has them.
    found = (student.exp() / 2 * terms.missed_nats).sum()
    assert torch.allclose(found, whole - terms.divergence[0, 0], atol=1e-6)
    assert terms.missed_nats[0, :2].tolist() == [0.0, 0.0]
