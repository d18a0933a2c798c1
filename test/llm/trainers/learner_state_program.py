"""A learner's state on each rank that torchrun has started: saved, and loaded."""

from __future__ import annotations

import warnings

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from torchrl_sglang import CorrectedGRPOLoss, Learner
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer
from torchrl_sglang.trainers.models import scorer, shard
from torchrl_sglang.trainers.optimizers import make_schedule
from torchrl_sglang.trainers.ranks import TrainerRanks, find_trainer_ranks


def make_learner(ranks: TrainerRanks) -> Learner:
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        vocab_size=100,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    shard(model, ranks, torch.device("cpu"))
    loss = CorrectedGRPOLoss(
        scorer(model, make_tiny_tokenizer()), clip_epsilon=0.2, entropy_bonus=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = make_schedule("constant_with_warmup", optimizer, 0, 10)
    return Learner(loss, optimizer, schedule, ranks=ranks)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks = find_trainer_ranks()
    learner = make_learner(ranks)
    learner.model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    learner.optimizer.step()
    state = learner.state_dict()
    other = make_learner(ranks)
    other.load_state_dict(state)
    found, wanted = (each.model.state_dict() for each in (other, learner))
    for name, value in wanted.items():
        assert torch.equal(found[name].full_tensor(), value.full_tensor()), name
    found, wanted = (each.optimizer.state_dict() for each in (other, learner))
    for name, value in wanted["state"].items():
        for moment in ("exp_avg", "exp_avg_sq"):
            one, two = found["state"][name][moment], value[moment]
            assert torch.equal(one.full_tensor(), two.full_tensor()), name
    ranks.end()
