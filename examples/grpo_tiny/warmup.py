"""The warm-up: a short supervised phase with a sloppy teacher.

Reinforcement learning needs a policy that is right now and then. This one imitates a
teacher who adds digit by digit and forgets more carries than not. Imitation picks up
the mistakes as well and gets no better than its teacher, right on fewer than half of
the problems. Finding out which half is left to GRPO.
"""

from __future__ import annotations

import random

import torch
from torch.distributions import Categorical
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from task import Problem


def sloppy_answer(problem: Problem, carry_probability: float) -> str:
    """Add digit by digit, remembering each carry with the given probability.

    Args:
        problem: The addition.
        carry_probability: 1 for a flawless teacher, 0 for one who never carries.

    Returns:
        The teacher's answer.

    Example:
        >>> sloppy_answer(Problem(47, 35), carry_probability=1.0)
        '82'
        >>> sloppy_answer(Problem(47, 35), carry_probability=0.0)
        '72'
    """
    carry, answer = 0, ""
    for left, right in zip(
        reversed(str(problem.left)), reversed(str(problem.right)), strict=True
    ):
        carry, digit = divmod(int(left) + int(right) + carry, 10)
        answer = f"{digit}{answer}"
        if random.random() >= carry_probability:
            carry = 0
    return f"{carry or ''}{answer}"


def encode(
    demonstrations: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenize pairs of a query and an answer as chats.

    Args:
        demonstrations: What the user and the assistant say.
        tokenizer: A tokenizer whose chat template marks the assistant's tokens.

    Returns:
        The token ids, padded on the right, and a mask of the tokens to imitate: the
        answer and the end of the turn.
    """
    chats = [
        [
            {"role": "user", "content": query},
            {"role": "assistant", "content": answer},
        ]
        for query, answer in demonstrations
    ]
    batch = tokenizer.apply_chat_template(
        chats,
        padding=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"padding_side": "right"},
    )
    return batch["input_ids"], batch["assistant_masks"].bool()


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    carry_probability: float,
    steps: int,
    batch_size: int,
    learning_rate: float,
) -> None:
    """Train a model to answer as a sloppy teacher does.

    Args:
        model: The model, trained in place.
        tokenizer: Its tokenizer.
        problems: The training problems; the teacher solves each of them four times.

    Keyword Args:
        carry_probability: How often the teacher remembers a carry.
        steps: Number of optimizer steps.
        batch_size: Demonstrations in a step.
        learning_rate: Peak of a one-cycle schedule.
    """
    demonstrations = [
        (problem.query, sloppy_answer(problem, carry_probability))
        for problem in problems
        for _ in range(4)
    ]
    input_ids, imitate = encode(demonstrations, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    scheduler = OneCycleLR(
        optimizer, learning_rate, total_steps=steps, cycle_momentum=False
    )
    for _ in trange(steps, desc="Warm-up"):
        rows = torch.randint(len(demonstrations), (batch_size,))
        ids, mask = input_ids[rows], imitate[rows, 1:]
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = -Categorical(logits=logits).log_prob(ids[:, 1:])[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
