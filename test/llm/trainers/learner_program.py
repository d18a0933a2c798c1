"""Ranks with a sharded model and shares of a batch, run by ``test_learner.py``.

Rank 0 prints how far its update is from that of one process, for each kind of step.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from helpers.learner_batches import make_batch
from tensordict import lazy_stack, set_list_to_stack

from torchrl_sglang import CorrectedGRPOLoss, Distillation, Learner
from torchrl_sglang.errors import ConfigurationError, SGLangError
from torchrl_sglang.objectives.transform import OffPolicyCorrection
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer
from torchrl_sglang.trainers.models import load_model, scorer, shard
from torchrl_sglang.trainers.ranks import TrainerRanks

CPU = torch.device("cpu")
TOKENIZER = make_tiny_tokenizer()
KINDS = {
    "one step": {"correct": "decoupled_token_is"},
    "two steps": {"correct": "decoupled_token_is", "epochs": 2},
    "reference": {"reference": 2},
    "replayed": {"correct": "decoupled_token_is", "epochs": 2, "drawn": True},
    "tree": {"correct": "decoupled_token_is", "epochs": 2, "packing": "tree"},
    "teacher": {"distillation": Distillation(k=4)},
    "sampled": {"distillation": Distillation(estimator="sampled"), "packing": "tree"},
}


def make_model(ranks: TrainerRanks, seed: int = 1):
    model = make_tiny_model(TOKENIZER, seed=seed).double()
    model = load_model(model, device=CPU, gradient_checkpointing=True)
    return model if ranks.size == 1 else shard(model, ranks, CPU)


def with_supports(row):
    """Returns a row whose last tokens were each drawn from three, at another T."""
    tokens, drawn = row["tokens", "full"], row["masks", "all_assistant_mask"]
    kept = (tokens[drawn].unsqueeze(-1) + torch.tensor([0, 3, 5])) % 50
    return row.copy().update(
        {
            "sampling_support": {
                "full": torch.cat([tokens[drawn, None], kept[:, 1:]], -1).flatten(),
                "full_counts": drawn.long() * 3,
            },
            "sampling_temperature": {"full": torch.where(drawn, 0.7, 1.0)},
        }
    )


def with_teacher(row):
    """Returns a row with the columns of a teacher."""
    tokens = row["tokens", "full"]
    ids = (tokens.unsqueeze(-1) + torch.arange(4)) % 50
    tops = (ids + tokens.unsqueeze(-1)).double().cos().log_softmax(-1) - 0.1
    columns = {"log_probs": tops[:, 0], "top_ids": ids, "top_log_probs": tops}
    return row.copy().update({"teacher": columns})


def update(
    rows,
    ranks: TrainerRanks,
    *,
    correct=None,
    reference=None,
    epochs=1,
    drawn=False,
    packing=True,
    distillation=None,
):
    """Returns the weights after a batch."""
    rows = [with_supports(row) for row in rows] if drawn else rows
    rows = [with_teacher(row) for row in rows] if distillation else rows
    model = make_model(ranks)
    loss = CorrectedGRPOLoss(
        scorer(model, TOKENIZER),
        clip_epsilon=0.2,
        entropy_bonus=False,
        kl_to_ref_coeff=None if reference is None else 1e-6,
        packing=packing if ranks.size > 1 else True,
        distillation=distillation,
    )
    if reference is not None:
        reference = make_model(ranks, seed=reference).requires_grad_(False)
    learner = Learner(
        loss,
        torch.optim.SGD(model.parameters(), lr=1e-2),
        correct=None if correct is None else OffPolicyCorrection(correct),
        reference=reference,
        epochs=epochs,
        clip_grad_norm=None,
        max_tokens_per_pass=45,
        ranks=ranks,
    )
    learner.train(lazy_stack(rows), 0)
    whole = [
        each.full_tensor() if ranks.size > 1 else each for each in model.parameters()
    ]
    return torch.cat([each.detach().flatten() for each in whole])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = TrainerRanks(rank=rank, size=2, local_rank=rank, local_size=2)
    rewards, lengths = [0.0, 1.0, 1.0, 0.2] * 2, [1, 40, 3, 9, 25, 2, 7, 5]
    rows = list(make_batch(rewards, lengths).unbind(0))
    found = {}
    for kind, given in KINDS.items():
        alone = update(rows, TrainerRanks(), **given)
        start = make_model(TrainerRanks())
        start = torch.cat([each.detach().flatten() for each in start.parameters()])
        shared = update(rows[:3] if rank == 0 else rows[3:], ranks, **given)
        found[kind] = float((shared - alone).norm() / (alone - start).norm())
    # Where a rank has no response to train on, all of them say so.
    rows = make_batch(rewards, lengths, unscored=4).unbind(0)
    try:
        update(rows[:4] if rank == 0 else rows[4:], ranks)
    except ConfigurationError as error:
        refused = ranks.gather("no response to train on" in str(error))
    # Where a rank cannot read what its tokens were drawn from, likewise.
    rows = [with_supports(row) for row in make_batch(rewards, lengths).unbind(0)]
    rows[6]["sampling_support", "full_counts"][-1] += 1
    try:
        update(rows[:4] if rank == 0 else rows[4:], ranks)
    except SGLangError as error:
        wrong = ranks.gather("sampling_support" in str(error))
    if rank == 0:
        refused += wrong
        sys.stdout.write(json.dumps(found | {"refused": refused}) + "\n")
    dist.destroy_process_group()
