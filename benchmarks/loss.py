"""Forward and backward pass of GRPOLoss, TorchRL's and ours, beside the model's own.

A batch of responses of different lengths goes through the model and its loss, in
bfloat16 with float32 weights. Beside it, the same model's pass with PyTorch's cross
entropy of the same tokens, padded likewise; and ours of tokens that were drawn at a
temperature, and from supports of 50 and of 4,096 tokens.

    python benchmarks/loss.py 0.5b
    python benchmarks/loss.py tiny --device cpu --tokens 64
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from transformers import PreTrainedModel

from script import read_options
from torchrl_sglang import CorrectedGRPOLoss
from torchrl_sglang.cli.bench.timing import median_seconds
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer
from trained_model import make_trained_model

PROMPT_TOKENS = 32


def make_batch(count: int, tokens: int, device: str) -> TensorDictBase:
    """Returns responses of half to all of a number of random tokens."""
    rows = []
    for index in range(count):
        length = PROMPT_TOKENS + tokens - index * tokens // (2 * count)
        ids = torch.randint(3, 90, (length,))
        response = torch.arange(length) >= PROMPT_TOKENS
        log_probs = torch.where(response, torch.rand(length).log(), torch.nan)
        rows.append(
            TensorDict(
                tokens=Tokens(
                    prompt=ids[:PROMPT_TOKENS],
                    response=ids[PROMPT_TOKENS:],
                    full=ids,
                    padded=False,
                ),
                masks=Masks(
                    all_attention_mask=torch.ones_like(response),
                    all_assistant_mask=response,
                    padded=False,
                ),
                log_probs=LogProbs(full=log_probs, padded=False),
                advantage=torch.randn(1, 1),
            )
        )
    return lazy_stack(rows).to(device)


def drawn(batch: TensorDictBase, support: int, vocabulary: int) -> TensorDictBase:
    """Returns a batch whose responses were each drawn from so many tokens, at 0.7."""
    support = min(support, vocabulary)
    rows = []
    for row in batch.unbind(0):
        written = row["masks", "all_assistant_mask"]
        own = row["tokens", "full"][written].unsqueeze(-1)
        kept = (own + torch.arange(support, device=own.device)) % vocabulary
        found = row.copy()
        found["sampling_temperature"] = TensorDict(
            full=torch.where(written, 0.7, 1.0), device=own.device
        )
        found["sampling_support"] = TensorDict(
            full=kept.flatten().int(), full_counts=written * support, device=own.device
        )
        rows.append(found)
    return lazy_stack(rows)


def of_the_model(model: PreTrainedModel, batch: TensorDictBase) -> Callable[[], Tensor]:
    """Returns the pass that the others are compared with."""
    rows = batch.get(("tokens", "full"), as_list=True)
    options = {"batch_first": True, "padding_side": "left"}
    tokens = pad_sequence(rows, padding_value=0, **options)
    attention = pad_sequence([torch.ones_like(row) for row in rows], **options)
    targets = pad_sequence(rows, padding_value=-100, **options)[:, 1:].flatten()

    def run() -> Tensor:
        logits = model(tokens, attention).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)

    return run


def measure(run: Callable[[], Tensor], device: str, repeats: int) -> tuple[float, int]:
    """Returns the median seconds of forward and backward pass, and bytes of memory."""
    if cuda := device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = run()
        loss.backward()
        if cuda:
            torch.cuda.synchronize()

    seconds = median_seconds(step, repeats)
    return seconds, torch.cuda.max_memory_allocated() if cuda else 0


def main() -> None:
    """Prints a row for the model with cross entropy, and for each loss."""
    arguments = read_options(
        __doc__, model="0.5b", device="cuda|cpu", responses=8, tokens=1024, repeats=15
    )
    torch.manual_seed(0)
    device = arguments.device
    model = make_trained_model(arguments.model, device)
    batch = make_batch(arguments.responses, arguments.tokens, device)
    actor = TransformersWrapper(
        model, tokenizer=make_tiny_tokenizer(), input_mode="tokens", generate=False
    )
    runs = {"cross entropy": of_the_model(model, batch)}
    for kind in (CorrectedGRPOLoss, TorchRLGRPOLoss):
        loss = kind(actor, clip_epsilon=0.2, entropy_bonus=False)
        name = f"{kind.__module__.partition('.')[0]} {kind.__name__}"
        runs[name] = lambda loss=loss: loss(batch).loss_objective
    ours = CorrectedGRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False)
    for name, support in {"temperature": 0, "support 50": 50, "4096": 4096}.items():
        sampled = drawn(batch, support, model.config.vocab_size)
        runs[f"CorrectedGRPOLoss, {name}"] = lambda sampled=sampled: (
            ours(sampled).loss_objective
        )
    first = None
    for name, run in runs.items():
        seconds, memory = measure(run, device, arguments.repeats)
        first = first or seconds
        print(
            f"{name}: {seconds:.4f} s, {first / seconds:.3f} of cross entropy's speed, "
            f"{memory / 1e9:.1f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
