"""A step of Learner that trains shared prefixes once, beside the packed step.

Groups of responses share a prompt, whose length makes the ratio of all tokens to the
distinct ones. The limit is a packed step of the distinct tokens alone: each prompt with
one of its responses, the other responses without it, so that their attention to it is
missing. A tree has that attention, too: what PyTorch's kernel takes for it alone is
*attention s*, and the ideal is the limit and that. Memory is that beyond weights,
gradients and optimizer. All steps have passes of at most as many tokens, or
one pass for all, and are measured in turn. Recorded rows are those of a file of
``gateway.to_dataset().to_json(path)``, without that limit.

    python benchmarks/tree.py 0.5b
    python benchmarks/tree.py 0.5b --groups 16 --max-tokens-per-pass 65536
    python benchmarks/tree.py 0.5b --recorded agents.jsonl --max-tokens-per-pass 65536
    python benchmarks/tree.py tiny --device cpu --response-tokens 32 --repeats 3
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from script import print_row, read_options
from torchrl_sglang import CorrectedGRPOLoss, Learner, dataset_to_batch
from torchrl_sglang.cli.bench.timing import median_seconds
from torchrl_sglang.objectives.attention import _kernel
from torchrl_sglang.objectives.packing import Packing, attention_bounds
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
        limit=arguments.max_tokens_per_pass or sum(map(len, rows)),
        device=arguments.device,
        ranks=TrainerRanks(),
    )


def read_recorded(path: str, model: Any, arguments: Any) -> tuple[Work, TensorDictBase]:
    """Returns recorded rows, and their batch with random advantages."""
    from datasets import Dataset

    # Dataset.from_json() writes into the user's home.
    lines = Path(path).read_text().splitlines()
    batch = dataset_to_batch(Dataset.from_list([json.loads(line) for line in lines]))
    for row in batch.unbind(0):
        row["advantage"] = torch.randn(1, 1)
    rows = [row["tokens", "full"] for row in batch.unbind(0)]
    work = Work(
        model=model,
        rows=rows,
        prompt=0,
        group_size=1,
        limit=arguments.max_tokens_per_pass or sum(map(len, rows)),
        device=arguments.device,
        ranks=TrainerRanks(),
    )
    return work, batch


def kernel_seconds(config: Any, lengths: list[int], paths: list[int]) -> float:
    """Returns the seconds of attention in a step that checkpoints activations.

    Args:
        config: of the model.
        lengths: of the queries of each segment.
        paths: of its keys, the last of which are the queries' own.
    """
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    counts = (heads, sum(lengths)), (config.num_key_value_heads, sum(paths))
    query, key, value = (
        torch.randn(tokens, width, size, dtype=torch.bfloat16, device="cuda")
        for width, tokens in (*counts, counts[1])
    )
    inputs = [each.requires_grad_() for each in (query, key, value)]
    places = [
        attention_bounds(kind, torch.tensor(each, device="cuda"))
        for kind, each in (("q", lengths), ("k", paths))
    ]
    bounds = [next(iter(place.values())) for place in places]
    longest = [max(lengths), max(paths)]
    kernel = _kernel()
    assert kernel is not None
    gradient = torch.randn_like(query)

    def forward() -> torch.Tensor:
        return kernel(*inputs, *bounds, *longest, scale=None, window=-1)

    def layer() -> None:
        with torch.no_grad():
            forward()
        torch.autograd.grad(forward(), inputs, gradient)
        torch.cuda.synchronize()

    return config.num_hidden_layers * median_seconds(layer, 5)


def skipped_attention(work: Work) -> float:
    """Returns the seconds of attention to prompts that the limit leaves out."""
    group, prompt = work.group_size, work.prompt
    first = [number % group == 0 for number in range(len(work.rows))]
    paths = [len(row) for row in work.rows]
    nodes = [n if has else n - prompt for n, has in zip(paths, first, strict=True)]
    config = work.model.config
    alone = kernel_seconds(config, nodes, nodes)
    return max(kernel_seconds(config, nodes, paths) - alone, 0.0)


def make_steps(
    work: Work, kinds: dict[str, tuple[Packing, Any]], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Returns a call for one step of each kind, which has its packing and its batch."""
    actor = scorer(work.model, make_tiny_tokenizer())
    steps: dict[str, Any] = {}
    for name, (packing, batch) in kinds.items():
        loss = CorrectedGRPOLoss(
            actor, clip_epsilon=0.2, entropy_bonus=False, packing=packing
        )
        learner = Learner(
            loss,
            optimizer,
            max_tokens_per_pass=work.limit,
            autocast=work.device == "cuda",
        )
        steps[name] = partial(learner.train, batch, 0)
    return steps


def compare(
    work: Work, kinds: dict[str, tuple[Packing, Any]], optimizer: Any, repeats: int
) -> None:
    """Prints seconds and memory of each kind of step."""
    steps = make_steps(work, kinds, optimizer)
    ratio = steps["tree"]()["train/tree_ratio"]
    fixed = 0
    if work.device == "cuda":
        torch.cuda.empty_cache()
        # Gradients are there at the peak, too.
        fixed = torch.cuda.memory_allocated() + sum(
            p.numel() * p.element_size() for p in work.model.parameters()
        )
    found = measure(steps, work, repeats)
    packed, tree, *limit = (found[name][0] for name in steps)
    shares = [value / tree for value in limit]
    count = sum(map(len, work.rows))
    if limit and fixed:
        more = skipped_attention(work)
        shares += [more, (limit[0] + more) / tree]
    print_row(f"{ratio:.2f}", count, packed, tree, packed / tree, *limit, *shares)
    if fixed:
        packed, tree, *limit = ((found[name][1] - fixed) / 1e9 for name in steps)
        shares = [value / tree for value in limit]
        print_row("  GB", "", packed, tree, packed / tree, *limit, *shares)


def main() -> None:
    """Prints a row for each ratio, or one for recorded rows."""
    arguments = read_options(
        __doc__,
        model="0.5b",
        device="cuda|cpu",
        groups=1,
        group_size=16,
        response_tokens=256,
        recorded="",
        max_tokens_per_pass=0,
        ratios=(1.0, 2.0, 4.0, 8.0),
        repeats=15,
    )
    torch.manual_seed(0)
    model = make_trained_model(arguments.model, arguments.device)
    optimizer = optimizer_of(None, 1e-9)(model.parameters())
    names = ["packed s", "tree s", "faster", "limit s", "of limit"]
    print_row("ratio", "tokens", *names, "attention s", "of ideal", width=11)
    if arguments.recorded:
        work, batch = read_recorded(arguments.recorded, model, arguments)
        recorded: dict[str, tuple[Packing, Any]] = {
            "packed": (True, batch),
            "tree": ("tree", batch),
        }
        compare(work, recorded, optimizer, arguments.repeats)
        return
    for wanted in arguments.ratios:
        work = make_work(model, wanted, arguments)
        whole, distinct = make_batch(work), make_batch(work, prompts_once=True)
        kinds: dict[str, tuple[Packing, Any]] = {
            "packed": (True, whole),
            "tree": ("tree", whole),
            "limit": (True, distinct),
        }
        compare(work, kinds, optimizer, arguments.repeats)


if __name__ == "__main__":
    main()
