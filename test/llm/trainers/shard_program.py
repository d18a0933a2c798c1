"""A rank that goes on where one process was: ``shard_program.py FOLDER CASE ...``.

It trains on one more batch, and saves a checkpoint and the model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from helpers.sharding import batch_of, make_learner, model_of
from tensordict import set_list_to_stack
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_sglang.trainers.checkpoints import Checkpoints
from torchrl_sglang.trainers.models import load_model, save_model, shard
from torchrl_sglang.trainers.ranks import find_trainer_ranks


def check_types(folder, ranks):
    """Weights and gradients of passes in bfloat16 are float32."""
    half, device = torch.bfloat16, torch.device("cpu")
    whole = load_model(model_of(folder, "tied"), device=device, dtype=half)
    found = load_model(model_of(folder, "tied"), device=device)
    shard(found, ranks, device, compute_dtype=half)
    tokens = torch.arange(5, 25)[None]
    expected, logits = whole(tokens).logits, found(tokens).logits
    assert logits.dtype == half
    torch.testing.assert_close(logits, expected)
    expected.float().logsumexp(-1).sum().backward()
    logits.float().logsumexp(-1).sum().backward()
    gradients = {name: each.grad for name, each in whole.named_parameters()}
    for name, each in found.named_parameters():
        assert each.dtype == each.grad.dtype == torch.float32
        torch.testing.assert_close(
            each.grad.full_tensor(), gradients[name].float(), rtol=0.05, atol=0.05
        )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    ranks = find_trainer_ranks()
    check_types(folder, ranks)
    if not ranks.is_first:
        # A model of 32 billion parameters has no place in every rank's memory.
        AutoModelForCausalLM.from_pretrained = None
    for case in sys.argv[2:]:
        learner = make_learner(folder, case, ranks)
        parameters = dict(learner.model.named_parameters())
        assert all(isinstance(each, DTensor) for each in parameters.values())
        begun = Checkpoints(folder / f"{case}_before", identity={}, ranks=ranks)
        begun.restore(learner)
        learner.train(batch_of(1, ranks), 0)
        saved = Checkpoints(folder / f"{case}_after", identity={}, ranks=ranks)
        saved.save(2, learner, {"gathered": ranks.gather(ranks.rank)})
        # What is trained meanwhile is not in the checkpoint.
        with torch.no_grad():
            for each in parameters.values():
                each.mul_(-1)
        saved.wait()
        saved.restore(learner)
        tokenizer = AutoTokenizer.from_pretrained(model_of(folder, case))
        policy = SimpleNamespace(
            tokenizer=tokenizer, chat_template=None, chat_template_name=None
        )
        save_model(learner.model, policy, folder / f"{case}_model", ranks)
    ranks.end()
