"""A step of Learner that trains shared prefixes once, beside the packed step.

Groups of responses share a prompt, whose length makes the ratio of all tokens to the
distinct ones. The limit is that ratio: for the time of a step, and for the memory
beyond weights, gradients and optimizer. All responses are one pass, in both kinds of
step, which are measured in turn.

    python benchmarks/tree.py 0.5b
    python benchmarks/tree.py 7b --group-size 8 --ratios 1 2 4
    python benchmarks/tree.py tiny --device cpu --response-tokens 32 --repeats 3
"""

from __future__ import annotations

from typing import Any

import torch

from script import print_row, read_options
from torchrl_sglang import CorrectedGRPOLoss, Learner
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer
from torchrl_sglang.trainers.models import scorer
from torchrl_sglang.trainers.optimizers import optimizer_of
from torchrl_sglang.trainers.ranks import TrainerRanks
from trained_model import make_trained_model
from training import Work, make_batch, measure


def prompt_length(ratio: float, group: int, response: int) -> int:
    """Returns the length of a prompt whose groups have a ratio of tokens."""
    return round(group * response * (ratio - 1) / (group - ratio)) or 1


def make_work(model: Any, ratio: float, arguments: Any) -> Work:
    """Returns groups of random responses to random prompts."""
    group, length = arguments.group_size, arguments.response_tokens
    prompt = prompt_length(ratio, group, length)
    rows = []
    for _ in range(arguments.groups):
        shared = torch.randint(3, 90, (prompt,))
        # The first token differs, so that nothing else is shared by chance.
        for first in range(group):
            response = torch.randint(3, 90, (length,))
            response[0] = 3 + first
            rows.append(torch.cat([shared, response]))
    return Work(
        model=model,
        rows=rows,
        prompt=prompt,
        group_size=group,
        limit=sum(map(len, rows)),
        device=arguments.device,
        ranks=TrainerRanks(),
    )


def make_steps(work: Work, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns a call for one step of each packing, on the same batch."""
    actor, batch = scorer(work.model, make_tiny_tokenizer()), make_batch(work)
    steps: dict[str, Any] = {}
    for packing in (True, "tree"):
        loss = CorrectedGRPOLoss(
            actor, clip_epsilon=0.2, entropy_bonus=False, packing=packing
        )
        learner = Learner(
            loss,
            optimizer,
            max_tokens_per_pass=work.limit,
            autocast=work.device == "cuda",
        )
        steps[str(packing)] = lambda learner=learner: learner.train(batch, 0)
    return steps


def main() -> None:
    """Prints, for each ratio, speed and memory of the tree as shares of the ideal."""
    arguments = read_options(
        __doc__,
        model="0.5b",
        device="cuda|cpu",
        groups=1,
        group_size=16,
        response_tokens=256,
        ratios=(1.0, 2.0, 4.0, 8.0),
        repeats=15,
    )
    torch.manual_seed(0)
    model = make_trained_model(arguments.model, arguments.device)
    optimizer = optimizer_of(None, 1e-9)(model.parameters())
    print_row("ratio", "tokens", "packed s", "tree s", "of ideal", "memory of ideal")
    for wanted in arguments.ratios:
        work = make_work(model, wanted, arguments)
        steps = make_steps(work, optimizer)
        ratio = steps["tree"]()["train/tree_ratio"]
        fixed = 0
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
            fixed = torch.cuda.memory_allocated()
        found = measure(steps, work, arguments.repeats)
        (packed, full), (tree, shared) = found["True"], found["tree"]
        saved: object = "-"
        if fixed:
            # Gradients are there at the peak, too.
            fixed += sum(p.numel() * p.element_size() for p in model.parameters())
            saved = (full - fixed) / (shared - fixed) / ratio
        print_row(
            f"{ratio:.2f}", work.limit, packed, tree, packed / tree / ratio, saved
        )


if __name__ == "__main__":
    main()
