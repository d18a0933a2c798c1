"""What drafts from earlier responses cost and save, on a GPU.

With a model of random weights: how many tokens a pass has to give for drafts to pay,
which is how many passes a server makes in the same time without them.

With ``chain``, a model of 0.5B shapes whose every token follows from the one before it:
tokens a second where a known share of each response is in the texts, in blocks of 16
tokens. Each prompt has tokens of its own, so that no other response helps.

    python benchmarks/history_drafts.py chain
    python benchmarks/history_drafts.py 7b --running 8 64
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from script import print_row, read_options
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.cli.bench.measure import start_engine
from torchrl_sglang.support.event_loop import run_sync

CYCLE = 593
"""Tokens that a prompt of the chain has to itself."""
CHAINS = 250
BLOCK = 16
SPARE = 127
"""Printable ASCII, which a server's first prompts are made of."""


def save_chain(folder: str) -> None:
    """Writes the model: one that says the next token of the last one's cycle."""
    size = SPARE + CYCLE * CHAINS
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    following = torch.arange(size)
    for start in range(SPARE, size, CYCLE):
        following[start : start + CYCLE] = torch.arange(start, start + CYCLE).roll(-1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        embeddings = model.model.embed_tokens.weight.normal_()
        model.lm_head.weight[following] = 0.1 * embeddings
    model.save_pretrained(folder)
    # One character for each token, which a text has again.
    characters = [chr(i) for i in range(SPARE)]
    characters += [chr(0x10000 + i) for i in range(size - SPARE)]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


class Measured:
    """What one server does with as many requests at once as there are prompts."""

    def __init__(self, engine: AsyncSGLang, repeats: int, tokens: int) -> None:
        self.engine, self._repeats, self._tokens = engine, repeats, tokens

    def run(self, prompts: Sequence[Sequence[int]]) -> tuple[float, float, Any]:
        """Returns tokens a second, passes a second of one response, and responses."""
        rates, passes = [], []
        for number in range(self._repeats + 1):
            self.engine.flush_cache()
            begin = time.perf_counter()
            found = self.engine.generate(
                input_ids=[list(prompt) for prompt in prompts],
                sampling_params={
                    "temperature": 0.0,
                    "max_new_tokens": self._tokens,
                    "ignore_eos": True,
                },
            )
            seconds = time.perf_counter() - begin
            if number > 0:
                counts = [each.verify_passes or self._tokens for each in found]
                rates.append(len(prompts) * self._tokens / seconds)
                passes.append(statistics.mean(counts) / seconds)
        return statistics.median(rates), statistics.median(passes), found


def texts(share: float, responses: Sequence[Sequence[int]], engine: AsyncSGLang) -> Any:
    """Returns the responses, of which this share is as it was."""
    tokenizer = engine.get_tokenizer()
    generator = torch.Generator().manual_seed(0)
    found = []
    for response in responses:
        kept: list[int] = []
        for start in range(0, len(response), BLOCK):
            block = list(response[start : start + BLOCK])
            if torch.rand((), generator=generator) >= share:
                low, high = SPARE, SPARE + CYCLE * CHAINS
                block = torch.randint(
                    low, high, (len(block),), generator=generator
                ).tolist()
            kept += block
        found.append(tokenizer.decode(kept))
    return found


def main() -> None:
    """Runs the comparison."""
    given = read_options(
        __doc__,
        model="chain|0.5b|3b|7b",
        running=(8, 64, 250),
        tokens=256,
        repeats=5,
        shares=(0.0, 0.3, 0.6, 0.9, 1.0),
    )
    room = {
        "max_running_requests": max(given.running),
        "max_total_tokens": max(given.running) * (given.tokens + 256),
    }
    with ExitStack() as stack:
        path = given.model
        if path == "chain":
            path = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            save_chain(path)
            torch.cuda.empty_cache()

        def start(share: float, **options: Any) -> Measured:
            engine = stack.enter_context(
                start_engine(
                    path,
                    device="cuda",
                    gpu_memory_utilization=share,
                    **room,
                    **options,
                )
            )
            return Measured(engine, given.repeats, given.tokens)

        # Both on one GPU, measured in turn.
        plain = start(0.45)
        drafts = start(0.8, drafts="history")
        server = AsyncSGLang.connect(drafts.engine.server_url)
        stack.callback(server.shutdown)
        # Nothing is remembered by this one.
        drafted = Measured(server, given.repeats, given.tokens)
        print_row("running, share", "plain", "drafts", "speed", "length", "pays from")
        for running in given.running:
            starts = [SPARE + CYCLE * i for i in range(running)]
            if given.model == "chain":
                prompts = [[first, first + 1] for first in starts]
            else:
                prompts = [[5 + i % 80, 6 + i // 80, 7] for i in range(running)]
            base, steps, _ = plain.run(prompts)
            shares: Sequence[float | None] = (None,)
            if given.model == "chain":
                shares = given.shares
            for share in shares:
                if share is not None:
                    made = [range(first, first + given.tokens + 2) for first in starts]
                    run_sync(server.control.remove_draft_texts("known"))
                    (held,) = run_sync(
                        server.control.add_draft_texts(
                            "known", texts(share, made, server)
                        )
                    )
                    assert held == sum(map(len, made)) + len(made) - 1, held
                speed, passes, found = drafted.run(prompts)
                length = statistics.mean(
                    given.tokens / each.verify_passes for each in found
                )
                name = f"{running}" if share is None else f"{running}, {share}"
                print_row(
                    name,
                    f"{base:,.0f}",
                    f"{speed:,.0f}",
                    speed / base,
                    length,
                    steps / passes,
                )


if __name__ == "__main__":
    main()
