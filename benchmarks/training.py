"""A step of Learner beside the model's bare forward and backward pass of its tokens.

Responses of long-tailed lengths are trained on, packed and padded, with what a step
has: loss, gradient's norm, AdamW. The limit is the same model's pass over the same rows
with PyTorch's cross entropy of the responses, measured in turn with them. Weights are
float32 with random values, passes in bfloat16 on a GPU, and activations are computed
again in the backward pass, as ``GRPO`` has it.

    python benchmarks/training.py 0.5b
    python benchmarks/training.py 3b --responses 16
    python benchmarks/training.py tiny --device cpu --responses 16 --longest 256
    torchrun --nproc-per-node 2 benchmarks/training.py 3b

Under torchrun the model is sharded with FSDP2, each rank has as many responses, and
seconds are those of the slowest rank; the bare passes are the sharded model's, too.

FLOP are those of the model alone: two for each parameter of a matrix and token, and of
the causal attention, times three for both passes, without what is computed again.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from script import print_row, read_options
from torchrl_sglang import CorrectedGRPOLoss, Learner
from torchrl_sglang.cli.bench.generation import long_tailed
from torchrl_sglang.cli.bench.models import Load
from torchrl_sglang.objectives.attention import no_mask
from torchrl_sglang.objectives.transform import OffPolicyCorrection
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer
from torchrl_sglang.trainers.models import scorer, shard
from torchrl_sglang.trainers.optimizers import optimizer_of
from torchrl_sglang.trainers.passes import cut_by_tokens
from torchrl_sglang.trainers.ranks import TrainerRanks, find_trainer_ranks
from trained_model import make_trained_model

PEAK = 989e12
"""FLOP/s of an H200 in bfloat16, without sparsity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a step is of."""

    model: Any
    rows: Sequence[torch.Tensor]
    """Prompts with responses."""
    prompt: int
    """Tokens of each prompt."""
    group_size: int
    """Responses to a prompt."""
    limit: int
    """Most tokens of a pass."""
    device: str
    ranks: TrainerRanks
    """Those that share the model, each with rows of its own."""


def make_batch(work: Work, *, prompts_once: bool = False) -> TensorDictBase:
    """Returns a batch as a collector writes it, with advantages.

    Args:
        work: the rows.
        prompts_once: leave a group's prompt out of all responses but one, except for
            its last token.
    """
    rows = []
    for number, row in enumerate(work.rows):
        ids, prompt = row, work.prompt
        if prompts_once and number % work.group_size:
            ids, prompt = row[prompt - 1 :], 1
        response = torch.arange(len(ids)) >= prompt
        log_probs = torch.where(response, torch.rand(len(ids)).log(), torch.nan)
        parts = {"prompt": ids[:prompt], "response": ids[prompt:]}
        rows.append(
            TensorDict(
                tokens=TensorDict(full=ids, **parts),
                masks=TensorDict(
                    all_attention_mask=torch.ones_like(response),
                    all_assistant_mask=response,
                ),
                log_probs=TensorDict(full=log_probs),
                advantage=torch.randn(1, 1),
            )
        )
    return lazy_stack(rows)


def make_bare(work: Work, *, prompts_once: bool = False) -> Callable[[], None]:
    """Returns the model's own pass: all rows, packed, cross entropy of responses.

    Args:
        work: the rows.
        prompts_once: leave a group's prompt out of all responses but one, which bounds
            what could be gained if their attention read it there.
    """
    group = work.group_size
    skipped = [
        work.prompt if prompts_once and number % group else 0
        for number in range(len(work.rows))
    ]
    rows = [row[skip:] for row, skip in zip(work.rows, skipped, strict=True)]
    lengths = [len(each) for each in rows]
    parts = cut_by_tokens(lengths, work.limit, packed=True)
    # A sharded model's passes take all ranks.
    most = max(work.ranks.gather(len(parts)))
    parts = cut_by_tokens(lengths, work.limit, packed=True, least=most)
    parts += [parts[0]] * (most - len(parts))

    def tensors(part: list[int]) -> dict[str, Any]:
        lengths = torch.tensor([len(rows[index]) for index in part])
        places = [torch.arange(skipped[i], len(work.rows[i])) for i in part]
        order = torch.cat(places).to(work.device)
        bounds = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().to(work.device)
        row = torch.cat([rows[index] for index in part]).to(work.device)
        wanted = (order >= work.prompt).nonzero()[:, 0]
        return {
            "input_ids": row[None],
            "position_ids": order[None],
            "attention_mask": no_mask(torch.device(work.device)),
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
            **dict.fromkeys(("max_length_q", "max_length_k"), int(lengths.max())),
            "logits_to_keep": (wanted - 1).clamp_min(0),
            "use_cache": False,
        }

    half = torch.autocast(work.device, torch.bfloat16, work.device == "cuda")

    def run() -> None:
        with half:
            for part in parts:
                given = tensors(part)
                targets = given["input_ids"][0, given["logits_to_keep"] + 1]
                logits = work.model(**given).logits.flatten(0, 1)
                loss = cross_entropy(logits, targets, reduction="sum")
                with torch.autocast(work.device, enabled=False):
                    # Like a mean over the step, so that no number is too large.
                    (loss / sum(map(len, work.rows))).backward()
        work.model.zero_grad()

    return run


def make_steps(work: Work, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns what is measured: a name, and a call for one step."""
    actor, batch = scorer(work.model, make_tiny_tokenizer()), make_batch(work)
    given: dict[str, dict[str, Any]] = {
        "packed": {"packing": True},
        "padded": {"packing": False},
        "packed, corrected": {"packing": True, "correct": "decoupled_token_is"},
        "with a pass before": {"packing": True, "correct": "decoupled_token_is"},
    }
    steps: dict[str, Any] = {}
    for name, options in given.items():
        preset = options.get("correct")
        loss = CorrectedGRPOLoss(
            actor, clip_epsilon=0.2, entropy_bonus=False, packing=options["packing"]
        )
        learner = Learner(
            loss,
            optimizer,
            correct=None if preset is None else OffPolicyCorrection(preset),
            max_tokens_per_pass=work.limit,
            autocast=work.device == "cuda",
            ranks=work.ranks,
        )
        if name == "with a pass before":
            # As it is where a batch takes several steps.
            learner._one_pass = False
        steps[name] = lambda learner=learner: learner.train(batch, 0)
    # The first one makes the model's attention what the bare passes need.
    bare = {
        "bare": make_bare(work),
        "bare, prompts once": make_bare(work, prompts_once=True),
    }
    return {"packed": steps.pop("packed"), **bare, **steps}


def model_flop(work: Work) -> float:
    """Returns the FLOP of both passes over all rows."""
    config = work.model.config
    matrices = sum(
        parameter.numel()
        for name, parameter in work.model.named_parameters()
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
    )
    tokens = sum(map(len, work.rows))
    responses = tokens - work.prompt * len(work.rows)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    attention = sum(2 * width * len(each) ** 2 for each in work.rows)
    head = 2 * config.vocab_size * config.hidden_size * responses
    forward = 2 * matrices * tokens + attention * config.num_hidden_layers + head
    return 3.0 * forward


def measure(
    steps: dict[str, Callable[[], Any]], work: Work, repeats: int
) -> dict[str, tuple[float, int]]:
    """Returns median seconds and most bytes of each, in turn, of the slowest and of the
    fullest rank; a first round is not counted.
    """
    device, ranks = work.device, work.ranks
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for number in range(repeats + 1):
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            ranks.barrier()
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
            spent = time.perf_counter() - start
            if number:
                seconds[name].append(max(ranks.gather(spent)))
    fullest = {name: max(ranks.gather(peak)) for name, peak in peaks.items()}
    return {name: (statistics.median(seconds[name]), fullest[name]) for name in steps}


def print_memory(work: Work, optimizer: torch.optim.Optimizer) -> None:
    """Prints the bytes that are there whatever the batch."""
    parameters = sum(p.numel() * p.element_size() for p in work.model.parameters())
    state = sum(
        value.numel() * value.element_size()
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    )
    for name, size in (
        ("parameters", parameters),
        ("gradients", parameters),
        ("optimizer", state),
    ):
        print_row(name, size / 1e9, "GB")


def print_table(work: Work, found: dict[str, tuple[float, int]]) -> None:
    """Prints the speeds of all ranks together, and MFU of a GPU of theirs."""
    ranks, rows = work.ranks, work.rows
    tokens = sum(ranks.gather(sum(map(len, rows))))
    longest = max(ranks.gather(max(map(len, rows))))
    flop = sum(ranks.gather(model_flop(work)))
    if not ranks.is_first:
        return
    responses = len(rows) * ranks.size
    again = work.prompt * (responses - responses / work.group_size)
    print_row("responses", responses, f"on {ranks.size} ranks")
    print_row("tokens", tokens, f"longest {longest}")
    print_row("prompts seen again", again / tokens, "of the tokens")
    print_row("", "s", "tokens/s", "of bare", "TFLOP/s", "MFU", "peak GB")
    bare = found["bare"][0]
    for name, (seconds, peak) in found.items():
        speed, share = f"{tokens / seconds:.0f}", flop / seconds / ranks.size
        mfu = share / PEAK if work.device == "cuda" else "-"
        print_row(name, seconds, speed, bare / seconds, share / 1e12, mfu, peak / 1e9)


def print_profile(steps: dict[str, Callable[[], Any]], device: str) -> None:
    """Prints where the time of a step goes."""
    for name in ("bare", "packed", "padded"):
        kinds = [ProfilerActivity.CPU]
        if device == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        with profile(activities=kinds) as found:
            steps[name]()
        order = f"self_{device}_time_total"
        print(f"\n{name}")
        print(found.key_averages().table(order, row_limit=14, max_name_column_width=60))


def main() -> None:
    """Prints memory, and for each kind of step its speed beside the bare pass."""
    arguments = read_options(
        __doc__,
        model="0.5b",
        device="cuda|cpu",
        responses=32,
        group_size=8,
        prompt_tokens=128,
        longest=4096,
        max_tokens_per_pass=16_384,
        repeats=15,
        profile=False,
    )
    torch.manual_seed(0)
    device = arguments.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Before the ranks meet, since transformers saves on the first one alone.
    model = make_trained_model(arguments.model, device)
    ranks = find_trainer_ranks()
    if ranks.size > 1:
        shard(model, ranks, ranks.device() if device == "cuda" else torch.device("cpu"))
    load = Load(prompts=arguments.responses * ranks.size, new_tokens=arguments.longest)
    prompt = arguments.prompt_tokens
    lengths = long_tailed(load)[ranks.rank :: ranks.size]
    work = Work(
        model=model,
        rows=[torch.randint(3, 90, (prompt + each,)) for each in lengths],
        prompt=prompt,
        group_size=arguments.group_size,
        limit=arguments.max_tokens_per_pass,
        device=device,
        ranks=ranks,
    )
    optimizer = optimizer_of(None, 1e-9)(model.parameters())
    steps = make_steps(work, optimizer)
    found = measure(steps, work, arguments.repeats)
    if ranks.is_first:
        print_memory(work, optimizer)
    print_table(work, found)
    if arguments.profile and ranks.size == 1:
        print_profile(steps, device)
    ranks.end()


if __name__ == "__main__":
    main()
