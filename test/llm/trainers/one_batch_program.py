"""Steps of ranks against steps of an oracle, for methods and corrections.

Started on each rank; the first one prints, for each case, how far the weights are from
the oracle's, and, where no minibatch is drawn, the metrics from those of one process.
The oracle scores one sequence at a time and has formulas of its own.
"""

from __future__ import annotations

import json
import math
import random
import sys
import warnings
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from tensordict import TensorDict, lazy_stack

from torchrl_sglang import CorrectedGSPOLoss, Learner, OffPolicyCorrection
from torchrl_sglang.objectives.config import PRESETS, RolloutCorrectionConfig
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer
from torchrl_sglang.trainers.methods import METHODS
from torchrl_sglang.trainers.models import scorer
from torchrl_sglang.trainers.ranks import TrainerRanks

TOKENIZER = make_tiny_tokenizer()
VOCABULARY = len(TOKENIZER)
MAX_TOKENS = 9
LR = 0.05

# Clipping bounds, and what a sum over tokens is divided by.
METHOD = {
    "grpo": (0.2, 0.2, "tokens"),
    "dapo": (0.2, 0.28, "tokens"),
    "dr_grpo": (0.2, 0.2, "constant"),
    "gspo": (3e-4, 4e-4, "sequences"),
    "cispo": (0.999, 2.0, "tokens"),
    "rloo": (0.2, 0.2, "tokens"),
}
TIS, ICEPOP = (0.0, 2.0), (0.5, 5.0)
SUM, GEO, K3 = ("sum", 0.5, 2.0), ("mean", 0.999, 1.001), ("k3", 0.01)
# Old policy, level and bounds of the weights, and rejection.
CORRECTION = {
    "decoupled_token_is": ("recomputed", "token", TIS, None),
    "decoupled_seq_is": ("recomputed", "sequence", TIS, None),
    "decoupled_token_icepop": ("recomputed", "token", ICEPOP, None),
    "decoupled_seq_is_rs": ("recomputed", "sequence", TIS, SUM),
    "decoupled_geo_rs": ("recomputed", None, None, GEO),
    "decoupled_geo_rs_seq_tis": ("recomputed", "sequence", TIS, GEO),
    "decoupled_geo_rs_token_tis": ("recomputed", "token", TIS, GEO),
    "decoupled_k3_rs": ("recomputed", None, None, K3),
    "decoupled_k3_rs_seq_tis": ("recomputed", "sequence", TIS, K3),
    "decoupled_k3_rs_token_tis": ("recomputed", "token", TIS, K3),
    "bypass_ppo_clip": ("rollout", None, None, None),
    "bypass_ppo_clip_geo_rs": ("rollout", None, None, GEO),
    "bypass_ppo_clip_k3_rs": ("rollout", None, None, K3),
    "bypass_pg_is": ("current", "sequence", TIS, None),
    "bypass_pg_token_icepop": ("current", "token", ICEPOP, None),
    "bypass_pg_geo_rs": ("current", None, None, GEO),
    "bypass_pg_geo_rs_seq_tis": ("current", "sequence", TIS, GEO),
    "bypass_pg_geo_rs_token_tis": ("current", "token", TIS, GEO),
    "disabled": ("recomputed", None, None, None),
    "normalized_token": ("recomputed", "token", TIS, None),
    "normalized_sequence": ("recomputed", "sequence", TIS, K3),
    "none": ("rollout", None, None, None),
}
NORMALIZED = {
    "normalized_token": RolloutCorrectionConfig(
        rollout_is="token", rollout_is_batch_normalize=True
    ),
    "normalized_sequence": RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs="seq_mean_k3",
        rollout_rs_threshold=0.01,
    ),
}
assert METHOD.keys() == METHODS.keys()
assert CORRECTION.keys() == PRESETS.keys() | NORMALIZED.keys() | {"none"}


def make_model():
    return make_tiny_model(
        TOKENIZER,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        initializer_range=0.15,
        dtype=torch.float64,
    )


def log_probs(model, row):
    """Returns the log-probs of a response, one sequence at a time."""
    logits = model(input_ids=torch.tensor([row["tokens"]])).logits[0]
    first = row["first"]
    chosen = torch.tensor(row["tokens"][first:]).unsqueeze(-1)
    return logits[first - 1 : -1].log_softmax(-1).gather(-1, chosen).squeeze(-1)


@torch.no_grad()
def make_rows():
    """Returns responses, of which the first three were sampled by another policy."""
    numbers, model, rows = random.Random(5), make_model(), []
    for index in range(9):
        first, length = numbers.randint(2, 4), numbers.randint(1, 6)
        tokens = [numbers.randrange(VOCABULARY) for _ in range(first + length)]
        row = {"tokens": tokens, "first": first, "advantage": numbers.gauss(0, 1)}
        row["rollout"] = log_probs(model, row)
        if index < 3:
            row["rollout"] += 1.5 - torch.rand(length, dtype=torch.float64)
        elif index > 5:
            row["rollout"] += 0.1 * torch.randn(length, dtype=torch.float64)
        rows.append(row)
    return rows


def keeps(rejection, ratio):
    """Whether a sequence is kept, by the log-ratios of its tokens."""
    if rejection is None:
        return True
    kind, *bounds = rejection
    if kind == "k3":
        values = [math.expm1(each) - each for each in ratio]
        return sum(values) / len(values) <= bounds[0]
    value = sum(ratio) if kind == "sum" else sum(ratio) / len(ratio)
    return math.log(bounds[0]) <= value <= math.log(bounds[1])


def weigh(level, bounds, ratio):
    """Returns the truncated importance weights of the tokens of a sequence."""
    if level is None:
        return [1.0] * len(ratio)
    ratio = [sum(ratio)] * len(ratio) if level == "sequence" else ratio
    low, high = bounds
    weights = [math.exp(each) for each in ratio]
    if low:
        return [each if low <= each <= high else 0.0 for each in weights]
    return [min(each, high) for each in weights]


def oracle_loss(model, rows, before, method, correction):
    """Returns the loss of a minibatch, whose rows no rank has alone."""
    low, high, divided_by = METHOD[method]
    old_policy, level, bounds, rejection = CORRECTION[correction]
    terms, weights, kept = [], [], []
    for row, recomputed in zip(rows, before, strict=True):
        current = log_probs(model, row)
        now = current.detach()
        trainer = recomputed if old_policy == "recomputed" else now
        ratio = (trainer - row["rollout"]).tolist()
        old = row["rollout"] if old_policy == "rollout" else trainer
        weights.append(weigh(level, bounds, ratio))
        kept.append(keeps(rejection, ratio))
        terms.append((current, current - old, row["advantage"]))
    if correction == "normalized_token":
        flat = [each for of_row in weights for each in of_row]
        weights = [[w * len(flat) / sum(flat) for w in of_row] for of_row in weights]
    if correction == "normalized_sequence":
        mean = sum(of_row[0] for of_row in weights) / len(weights)
        weights = [[w / mean for w in of_row] for of_row in weights]
    total = sum(each.sum() for each in model.parameters()) * 0
    tokens = sum(len(w) for w, is_kept in zip(weights, kept, strict=True) if is_kept)
    for (current, ratio, advantage), weight, is_kept in zip(
        terms, weights, kept, strict=True
    ):
        if not is_kept:
            continue
        log_ratio = ratio.mean().expand_as(ratio) if method == "gspo" else ratio
        gain = advantage * torch.tensor(weight, dtype=torch.float64)
        clipped = log_ratio.clamp(math.log1p(-low), math.log1p(high)).exp()
        if method == "cispo":
            objective = clipped.detach() * gain * current
        else:
            objective = torch.minimum(log_ratio.exp() * gain, clipped * gain)
        divisor = {
            "tokens": tokens,
            "constant": len(rows) * MAX_TOKENS,
            "sequences": sum(kept) * len(weight),
        }[divided_by]
        total = total - objective.sum() / divisor
    return total


def oracle_weights(shares, method, correction, minibatches, epochs):
    """Returns the weights after all steps of a batch."""
    model, norms = make_model(), []
    generators = [torch.Generator().manual_seed(7) for _ in shares]
    with torch.no_grad():
        before = {id(row): log_probs(model, row) for rows in shares for row in rows}
    for _ in range(epochs):
        orders = [
            torch.randperm(len(rows), generator=generator).tolist()
            for rows, generator in zip(shares, generators, strict=True)
        ]
        for step in range(minibatches):
            rows = [
                rows[index]
                for rows, order in zip(shares, orders, strict=True)
                for index in order[
                    len(rows) * step // minibatches : len(rows)
                    * (step + 1)
                    // minibatches
                ]
            ]
            olds = [before[id(row)] for row in rows]
            loss = oracle_loss(model, rows, olds, method, correction)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            norms.append(math.sqrt(sum(float(each.square().sum()) for each in grads)))
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.data.sub_(LR * grad)
    return flat(model), sum(norms) / len(norms)


def flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def as_tensordict(row):
    tokens, first = torch.tensor(row["tokens"]), row["first"]
    written = torch.arange(len(tokens)) >= first
    unknown = torch.full((first,), torch.nan, dtype=torch.float64)
    return TensorDict(
        tokens=TensorDict(full=tokens, prompt=tokens[:first], response=tokens[first:]),
        masks=TensorDict(
            all_attention_mask=torch.ones_like(written), all_assistant_mask=written
        ),
        log_probs=TensorDict(full=torch.cat([unknown, row["rollout"]])),
        advantage=torch.full((1, 1), row["advantage"], dtype=torch.float64),
    )


def train(rows, ranks, method, correction, minibatches, epochs):
    """Returns weights and metrics after the steps of a batch."""
    model, of_method = make_model(), METHODS[method]
    recomputed = CORRECTION[correction][0] == "recomputed"
    config = NORMALIZED.get(correction, correction)
    arguments = {**of_method.arguments, "entropy_bonus": False}
    if of_method.needs_max_tokens:
        arguments["max_tokens"] = MAX_TOKENS
    if not recomputed and correction != "none":
        arguments["correction"] = config
    loss = of_method.loss(scorer(model, TOKENIZER), **arguments)
    by_sequence = isinstance(loss, CorrectedGSPOLoss)
    aggregation = "prompt_mean" if by_sequence else "token_mean"
    learner = Learner(
        loss,
        torch.optim.SGD(model.parameters(), lr=LR),
        correct=OffPolicyCorrection(config, aggregation=aggregation)
        if recomputed
        else None,
        minibatches=minibatches,
        epochs=epochs,
        max_tokens_per_pass=20,
        clip_grad_norm=None,
        ranks=ranks,
    )
    torch.manual_seed(7)
    metrics = learner.train(lazy_stack([as_tensordict(row) for row in rows]), 0)
    return flat(model), metrics


def cases(kind: str):
    """Yields method, correction, minibatches and epochs.

    That is ``all`` pairs, or ``each`` correction once.
    """
    methods = list(METHOD)
    for place, correction in enumerate(CORRECTION):
        for index, method in enumerate(methods):
            if kind == "all" or index == place % len(methods):
                minibatches = 1 + (place // len(methods) + index) % 2
                yield method, correction, minibatches, 2


def compare(rows, shares, ranks, case):
    """Returns how far this rank's weights and metrics are from what they should be."""
    weights, metrics = train(shares[ranks.rank], ranks, *case)
    if not ranks.is_first:
        return None
    start = flat(make_model())
    wanted, norm = oracle_weights(shares, *case)
    expected = {"train/grad_norm": norm}
    if case[2] == 1:
        _, alone = train(rows, TrainerRanks(), *case)
        assert alone.keys() == metrics.keys()
        expected = alone | expected
    different = [
        name
        for name, value in expected.items()
        if not math.isclose(value, metrics[name], rel_tol=1e-5, abs_tol=1e-7)
    ]
    return float((weights - wanted).norm() / (wanted - start).norm()), different


def main(kind: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = make_rows()
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = TrainerRanks(rank=rank, size=size, local_rank=rank, local_size=size)
    bounds = {2: [0, 3, 9], 3: [0, 2, 5, 9]}[size]
    shares = [rows[begin:end] for begin, end in pairwise(bounds)]
    found = {
        " ".join(map(str, case)): compare(rows, shares, ranks, case)
        for case in cases(kind)
    }
    if ranks.is_first:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    main(sys.argv[1])
    dist.destroy_process_group()
