"""Errors of one of two ranks, which both raise, or both live with.

Started on each rank; the first one prints the outcome of each on both, for each error.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from helpers.learner_batches import make_batch
from tensordict import lazy_stack, set_list_to_stack

from torchrl_sglang import CorrectedGRPOLoss, Learner
from torchrl_sglang.errors import NotFiniteError, SGLangError
from torchrl_sglang.objectives.transform import OffPolicyCorrection
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer
from torchrl_sglang.trainers.models import scorer
from torchrl_sglang.trainers.ranks import TrainerRanks

TOKENIZER = make_tiny_tokenizer()


def with_nan(rows, learner):
    rows[0]["advantage"].fill_(math.nan)


def without(column):
    def exclude(rows, learner):
        rows[:] = [row.exclude(column) for row in rows]

    return exclude


def unscored(rows, learner):
    for row in rows:
        row["log_probs", "full"].fill_(math.nan)


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def loss_raises(error):
    def replace(rows, learner):
        learner.loss._gain = raising(error)

    return replace


def own_accumulate(rows, learner):
    accumulate = learner.loss.accumulate
    learner.loss.accumulate = lambda parts, **_: accumulate(parts)


def accumulate_raises(rows, learner):
    learner.loss.accumulate = raising(NOT_FINITE)


class Correction:
    """A correction of the user's, which has no collectives."""

    masking_strategy, metrics = "sft", {}

    def __init__(self, error=None):
        self.error = error

    def __call__(self, rows):
        if self.error is not None:
            raise self.error
        return rows


def own_correction(rows, learner):
    learner._correct = Correction()


def correction_raises(rows, learner):
    learner._correct = Correction(NOT_FINITE)


def model_raises(error):
    def hook(rows, learner):
        learner.model.register_forward_pre_hook(raising(error))

    return hook


def gradient_overflows(rows, learner):
    parameter = next(learner.model.parameters())
    parameter.register_hook(lambda grad: grad * math.inf)


NOT_FINITE = NotFiniteError("Not finite.")
# What happens on rank 0 and on rank 1.
KINDS = {
    "nan": (None, with_nan),
    "the user's loss": (loss_raises(NOT_FINITE), None),
    "the user's accumulate": (own_accumulate, accumulate_raises),
    "the user's correction": (own_correction, correction_raises),
    "gradient": (gradient_overflows, None),
    "two losses": (loss_raises(NOT_FINITE), loss_raises(ValueError("Wrong."))),
    "nan, and no masks": (without("masks"), with_nan),
    "no advantage": (None, without("advantage")),
    "no log-probs": (without("log_probs"), None),
    "unscored": (None, unscored),
    "model": (None, model_raises(RuntimeError("Out of memory."))),
}


def outcome(learner, rows):
    """Returns the share of skipped steps, or the kind of the error."""
    try:
        return learner.train(lazy_stack(rows), 0)["train/skipped"]
    except SGLangError as error:
        return type(error).__name__
    except Exception:
        return "SGLangError"


def main(*_: str) -> None:
    warnings.simplefilter("ignore")
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    rank = dist.get_rank()
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    ranks = TrainerRanks(
        rank=rank, size=2, local_rank=rank, local_size=2, control=control
    )
    found = {}
    for kind, of_ranks in KINDS.items():
        model = make_tiny_model(TOKENIZER)
        learner = Learner(
            CorrectedGRPOLoss(scorer(model, TOKENIZER), clip_epsilon=0.2),
            torch.optim.SGD(model.parameters(), lr=0.1),
            correct=OffPolicyCorrection("decoupled_token_is"),
            epochs=2,
            ranks=ranks,
        )
        rows = list(make_batch([0.0, 1.0] * 4).unbind(0))
        rows = rows[:3] if rank == 0 else rows[3:]
        if of_ranks[rank] is not None:
            of_ranks[rank](rows, learner)
        found[kind] = ranks.gather(outcome(learner, rows))
    if ranks.is_first:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    main()
    dist.destroy_process_group()
