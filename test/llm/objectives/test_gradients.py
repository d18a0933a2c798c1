"""Gradients through TorchRL's GRPOLoss against the formulas, token by token.

The reference reads a case as lists of numbers, follows the definition of each method in
plain Python, in float64, and has its gradient from autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import pytest
import torch
from helpers.sampled_batches import Case, Row, TableActor, make_batch, make_case
from torch import Tensor
from torchrl.objectives.llm import GRPOLoss

from torchrl_sglang import OffPolicyCorrection, RolloutCorrectionConfig

VERSION = 4
CLIP = (0.2, 0.3)

Weigh = Callable[[Row, list[int]], list[tuple[float, bool]]]
"""Row and positions of its known tokens -> weight, and whether the token counts."""


@dataclass
class Method:
    """A configuration, and what it means."""

    config: RolloutCorrectionConfig | str
    weigh: Weigh
    old: str = "train"


def ratios(row: Row, known: list[int]) -> list[float]:
    return [math.exp(row.train[t] - row.rollout[t]) for t in known]


def tis(row, known):
    return [(min(r, 2.0), True) for r in ratios(row, known)]


def sequence_tis(row, known):
    product = math.prod(ratios(row, known))
    return [(min(product, 2.0), True)] * len(known)


def icepop(row, known):
    return [(r if 0.5 <= r <= 5.0 else 0.0, True) for r in ratios(row, known)]


def masked_importance_sampling(row, known):
    product = math.prod(ratios(row, known))
    return [(min(product, 2.0), 0.5 <= product <= 2.0)] * len(known)


def geometric(row, known):
    every = ratios(row, known)
    mean = math.prod(every) ** (1 / len(every)) if every else 1.0
    return [(1.0, 0.8 <= mean <= 1.5)] * len(known)


def token_ratio(row, known):
    return [(1.0, 0.6 <= r <= 1.5) for r in ratios(row, known)]


def estimate(kind: str, ratio: float) -> float:
    if kind == "k2":
        return 0.5 * math.log(ratio) ** 2
    return ratio - 1 - math.log(ratio)


def by_divergence(kind: str, level: str, limit: float) -> Weigh:
    combine = {"sum": sum, "mean": fmean, "max": max}

    def weigh(row, known):
        values = [estimate(kind, ratio) for ratio in ratios(row, known)]
        if level == "token":
            return [(1.0, value <= limit) for value in values]
        return [(1.0, not values or combine[level](values) <= limit)] * len(known)

    return weigh


def veto(row, known):
    good = all(ratio >= 0.5 for ratio in ratios(row, known))
    return [(1.0, good)] * len(known)


def dppo(row, known):
    found = []
    for t in known:
        moved = math.exp(row.train[t]) - math.exp(row.rollout[t])
        sign = 1 if row.advantage > 0 else -1
        found.append((0.0 if sign * moved > 0.05 else 1.0, True))
    return found


def stale(row, known):
    return [(1.0, row.versions[t] >= VERSION - 2) for t in known]


def unweighted(row, known):
    return [(1.0, True)] * len(known)


def interpolated(row: Row, t: int) -> float:
    version = row.versions[t]
    lag = max(VERSION - version, 0) if version >= 0 else 0
    alpha = lag / (lag + 1)
    return (1 - alpha) * row.rollout[t] + alpha * row.train[t]


def interpolated_tis(row, known):
    return [
        (min(math.exp(interpolated(row, t) - row.rollout[t]), 2.0), True) for t in known
    ]


def both(first: Weigh, second: Weigh) -> Weigh:
    def weigh(row, known):
        pairs = zip(first(row, known), second(row, known), strict=True)
        return [(a * b, kept and left) for (a, kept), (b, left) in pairs]

    return weigh


def zeroed(inner: Weigh) -> Weigh:
    def weigh(row, known):
        return [(w if kept else 0.0, True) for w, kept in inner(row, known)]

    return weigh


def rejecting(name: str, threshold: object, **kwargs) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(
        rollout_is=None, rollout_rs=name, rollout_rs_threshold=threshold, **kwargs
    )


METHODS = {
    "token TIS": Method("decoupled_token_is", tis),
    "sequence TIS": Method("decoupled_seq_is", sequence_tis),
    "IcePop": Method("decoupled_token_icepop", icepop),
    "masked IS": Method("decoupled_seq_is_rs", masked_importance_sampling),
    "geometric mean": Method(rejecting("seq_mean_k1", (0.8, 1.5)), geometric),
    "token k1": Method(rejecting("token_k1", "0.6_1.5"), token_ratio),
    "token k2": Method(rejecting("token_k2", 0.1), by_divergence("k2", "token", 0.1)),
    "token k3": Method(rejecting("token_k3", 0.1), by_divergence("k3", "token", 0.1)),
    "sum k2": Method(rejecting("seq_sum_k2", 0.4), by_divergence("k2", "sum", 0.4)),
    "sum k3": Method(rejecting("seq_sum_k3", 0.4), by_divergence("k3", "sum", 0.4)),
    "mean k2": Method(rejecting("seq_mean_k2", 0.2), by_divergence("k2", "mean", 0.2)),
    "mean k3": Method(rejecting("seq_mean_k3", 0.2), by_divergence("k3", "mean", 0.2)),
    "max k2": Method(rejecting("seq_max_k2", 0.4), by_divergence("k2", "max", 0.4)),
    "max k3": Method(rejecting("seq_max_k3", 0.4), by_divergence("k3", "max", 0.4)),
    "veto": Method(RolloutCorrectionConfig(rollout_is=None, veto_threshold=0.5), veto),
    "DPPO": Method(
        RolloutCorrectionConfig(rollout_is=None, bypass_mode=True, dppo_threshold=0.05),
        dppo,
        old="rollout",
    ),
    "staleness": Method(
        RolloutCorrectionConfig(rollout_is=None, bypass_mode=True, max_staleness=2),
        stale,
        old="rollout",
    ),
    "recomputed": Method("disabled", unweighted),
    "bypass": Method("bypass_ppo_clip", unweighted, old="rollout"),
    "interpolated": Method(
        RolloutCorrectionConfig(rollout_is="token", proximal="interpolated"),
        interpolated_tis,
        old="interpolated",
    ),
    "two criteria": Method(
        rejecting("token_k2,seq_max_k3", "0.3,0.6"),
        both(by_divergence("k2", "token", 0.3), by_divergence("k3", "max", 0.6)),
    ),
    "everything": Method(
        RolloutCorrectionConfig(
            rollout_is="token",
            rollout_rs="token_k1",
            rollout_rs_threshold=(0.6, 1.5),
            veto_threshold=0.5,
            max_staleness=2,
        ),
        both(tis, both(token_ratio, both(veto, stale))),
    ),
    "zeroed": Method(
        rejecting("token_k1", (0.6, 1.5), rejected="zeroed"), zeroed(token_ratio)
    ),
    "zeroed sequences": Method(
        rejecting("seq_mean_k1", (0.8, 1.5), rejected="zeroed"), zeroed(geometric)
    ),
}


def old_log_prob(method: Method, row: Row, t: int) -> float:
    if method.old == "interpolated":
        return interpolated(row, t)
    return row.train[t] if method.old == "train" else row.rollout[t]


def clipped(ratio: Tensor, advantage: float) -> Tensor:
    low, high = 1 - CLIP[0], 1 + CLIP[1]
    return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def reference(
    method: Method, case: Case, logits: Tensor, aggregation: str, *, reinforce: bool
) -> Tensor:
    """Returns the loss by its definition, one token after the other."""
    log_probs = logits.log_softmax(-1)
    rows: list[list[tuple[Tensor, int, int]]] = []
    for index, row in enumerate(case.rows):
        known = [t for t, value in enumerate(row.rollout) if math.isfinite(value)]
        terms = []
        for t, (weight, counts) in zip(known, method.weigh(row, known), strict=True):
            if not counts:
                continue
            position = case.width - len(row.tokens) + t
            log_prob = log_probs[index, position, row.tokens[t]]
            if reinforce:
                gain = row.advantage * log_prob
            else:
                ratio = (log_prob - old_log_prob(method, row, t)).exp()
                gain = clipped(ratio, row.advantage)
            terms.append((-weight * gain, index, position))
        rows.append(terms)
    left = [[term for term, _, _ in terms] for terms in rows if terms]
    if not left:
        return logits.sum() * 0
    if aggregation == "none":
        return sum(
            (position + 1) * (index + 1) * term
            for terms in rows
            for term, index, position in terms
        )
    if aggregation == "prompt_mean":
        # verl's seq-mean-token-mean: sequences without tokens do not count.
        return torch.stack([torch.stack(terms).mean() for terms in left]).mean()
    return torch.stack([term for terms in left for term in terms]).mean()


def loss_of(
    actor: TableActor, correction: OffPolicyCorrection, batch, aggregation: str
) -> Tensor:
    loss = GRPOLoss(
        actor,
        clip_epsilon=CLIP,
        aggregation=aggregation,
        entropy_bonus=False,
        masking_strategy="rlhf",
    )
    value = loss(correction(batch)).loss_objective
    if aggregation == "none":
        # Any function of the loss of each token has to have the formula's gradient.
        rows = torch.arange(1, value.shape[0] + 1).view(-1, 1, 1)
        columns = torch.arange(1, value.shape[1] + 1).view(1, -1, 1)
        return (value * rows * columns).sum()
    return value.sum()


def check(method: Method, case: Case, layout: str, aggregation: str) -> None:
    torch.manual_seed(0)
    later = (case.logits + 0.4 * torch.randn_like(case.logits)).requires_grad_()
    expected = reference(method, case, later, aggregation, reinforce=False)
    (expected_gradient,) = torch.autograd.grad(expected, later)
    correction = OffPolicyCorrection(
        method.config,
        masking_strategy="rlhf",
        aggregation=aggregation,
        consumer_version=VERSION,
    )
    actor = TableActor(later.detach())
    value = loss_of(actor, correction, make_batch(case, layout), aggregation)
    (gradient,) = torch.autograd.grad(value, actor.logits)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 12), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_is_that_of_the_formula(name, aggregation, seeds):
    for seed in seeds:
        unknown = 0.2 if seed % 3 == 2 else 0.0
        case = make_case(seed, unknown=unknown)
        layout = ("ragged", "padded", "padded", "ragged", "nested")[seed % 5]
        check(METHODS[name], case, layout, aggregation)


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
def test_a_batch_of_which_nothing_is_kept(aggregation):
    method = Method(
        rejecting("token_k2", 1e-12), lambda row, known: [(1.0, False)] * len(known)
    )
    case = make_case(2)
    actor = TableActor(case.logits)
    correction = OffPolicyCorrection(
        method.config, masking_strategy="rlhf", aggregation=aggregation
    )
    value = loss_of(actor, correction, make_batch(case, "ragged"), aggregation)
    value.backward()
    assert value.item() == 0
    assert not actor.logits.grad.any()


preset = partial(RolloutCorrectionConfig.preset, rollout_rs_threshold="0.8_1.5")
REINFORCE = {
    "bypass_pg_is": sequence_tis,
    "bypass_pg_token_icepop": icepop,
    preset("bypass_pg_geo_rs"): geometric,
    preset("bypass_pg_geo_rs_seq_tis"): both(sequence_tis, geometric),
    preset("bypass_pg_geo_rs_token_tis"): both(tis, geometric),
}


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
@pytest.mark.parametrize("config", REINFORCE, ids=str)
def test_reinforce_has_the_gradient_of_the_log_prob(config, aggregation):
    """The actor computes the log-probs that the loss's ratio is to: it is 1."""
    method = Method(config, REINFORCE[config])
    for seed in range(6):
        case = make_case(seed)
        logits = case.logits.clone().requires_grad_()
        expected = reference(method, case, logits, aggregation, reinforce=True)
        (expected_gradient,) = torch.autograd.grad(expected, logits)
        actor = TableActor(case.logits)
        correction = OffPolicyCorrection(
            config,
            actor_network=actor,
            masking_strategy="rlhf",
            aggregation=aggregation,
        )
        batch = make_batch(case, "ragged").exclude("train_log_probs")
        value = loss_of(actor, correction, batch, aggregation)
        (gradient,) = torch.autograd.grad(value, actor.logits)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)


def test_normalized_weights_have_mean_one():
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_batch_normalize=True
    )
    case = make_case(4)
    every = [
        min(ratio, 2.0)
        for row in case.rows
        for ratio in ratios(row, list(range(len(row.tokens))))
    ]
    mean = fmean(every)
    method = Method(
        config,
        lambda row, known: [(weight / mean, kept) for weight, kept in tis(row, known)],
    )
    check(method, case, "ragged", "token_mean")
