r"""What log-probs are worth that servers compute on the KV cache of old weights.

Responses go on through weight updates, each of which is a step of AdamW, with
``pause_mode="continue"``, which computes their prefix again, and with ``"in_place"``,
which does not. The log-prob of each token is compared with that of Hugging Face's model
with the weights of the token's own version.

    python benchmarks/old_kv.py runs/smollm2-135m-instruct --lr 1e-6 1e-5
    python benchmarks/old_kv.py tiny --lr 1e-3
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from script import print_row, read_options
from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.cli.bench.measure import start_engine
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.types import Completion

TOPICS = ("rivers", "bridges", "bread", "the moon", "chess", "violins", "bees", "salt")


class Trainer:
    """A model, and what takes steps with it."""

    def __init__(self, engine: AsyncSGLang, start: Any, lr: float) -> None:
        self.model = copy.deepcopy(start)
        tokenizer = AutoTokenizer.from_pretrained(engine.model_path)
        texts = [f"Tell me something about {topic}, and why." for topic in TOPICS]
        self.prompts = [tokenizer.encode(text) for text in texts]
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.versions: dict[int, Any] = {}
        """Version -> the model's weights then."""

    def step(self) -> None:
        """Makes some texts likelier and others less so, as advantages do."""
        self._optimizer.zero_grad()
        for number, prompt in enumerate(self.prompts):
            ids = torch.tensor([prompt])
            sign = 1 if number % 2 else -1
            (sign * self.model(ids, labels=ids).loss).backward()
        self._optimizer.step()

    def send(self, sender: Any) -> None:
        """Gives the servers the weights that there are now."""
        report = sender.update_weights(self.model)
        weights = self.model.state_dict()
        self.versions[int(report.version)] = {
            name: value.clone() for name, value in weights.items()
        }


async def generate(
    engine: AsyncSGLang, trainer: Trainer, sender: Any, options: Any
) -> list[Completion]:
    """Generates through updates, which come after equal parts of a response."""
    seen, comes = 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_tokens(token_ids: list[int]) -> None:
        nonlocal seen
        seen = len(token_ids)
        loop.call_soon_threadsafe(comes.set)

    requests = [
        GenerateRequest(
            input_ids=prompt,
            sampling_params={"max_new_tokens": options.tokens, "ignore_eos": True},
            return_logprobs=True,
            on_tokens=on_tokens if number == 0 else None,
        )
        for number, prompt in enumerate(trainer.prompts)
    ]
    trainer.send(sender)
    running = asyncio.ensure_future(engine.agenerate_requests(requests))
    for number in range(1, options.updates + 1):
        trainer.step()
        while seen < number * options.tokens // (options.updates + 1):
            await asyncio.wait_for(comes.wait(), 600)
            comes.clear()
        await asyncio.to_thread(trainer.send, sender)
    return await running


@torch.no_grad()
def differences(
    trainer: Trainer, answers: list[Completion]
) -> dict[int, list[torch.Tensor]]:
    """Returns, by the number of updates before a token, how far its log-prob is off."""
    found: dict[int, list[torch.Tensor]] = {}
    for version, weights in trainer.versions.items():
        trainer.model.load_state_dict(weights)
        for prompt, answer in zip(trainer.prompts, answers, strict=True):
            ids = torch.tensor([*prompt, *answer.token_ids])
            logits = trainer.model(ids[None, :-1]).logits[0, len(prompt) - 1 :]
            own = logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0]
            off = torch.tensor(answer.log_probs) - own
            for span in answer.versions:
                if int(span.version) == version:
                    before = version - min(trainer.versions)
                    found.setdefault(before, []).append(off[span.start : span.end])
    return found


@contextmanager
def sending(engine: AsyncSGLang, mode: str) -> Iterator[Any]:
    """Yields a sender."""
    scheme = SGLangWeightSyncScheme(engine, pause_mode=mode)
    try:
        yield scheme.create_sender()
    finally:
        scheme.shutdown()


def main() -> None:
    """Prints what old keys and values cost, after one and after more updates."""
    options = read_options(
        __doc__, model="tiny", lr=(1e-5,), updates=3, tokens=192, rounds=2
    )
    print_row("", "updates", "tokens", "mean |d|", "p99 |d|", "k3 KL", "ESS")
    with start_engine(options.model, device="cpu", dtype="float32") as engine:
        start = AutoModelForCausalLM.from_pretrained(
            engine.model_path, dtype=torch.float32
        )
        for lr in options.lr:
            for mode in ("continue", "in_place"):
                merged: dict[int, list[torch.Tensor]] = {}
                for _ in range(options.rounds):
                    trainer = Trainer(engine, start, lr)
                    with sending(engine, mode) as sender:
                        answers = asyncio.run(
                            generate(engine, trainer, sender, options)
                        )
                    for before, parts in differences(trainer, answers).items():
                        merged.setdefault(before, []).extend(parts)
                for before, parts in sorted(merged.items()):
                    show(f"{mode}, lr {lr:g}", before, torch.cat(parts))


def show(name: str, before: int, off: torch.Tensor) -> None:
    """Prints a row; the ratio is the version's own probability to the recorded one."""
    ratio = (-off.double()).exp()
    ess = (ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)).item()
    kl = (ratio - 1 - ratio.log()).mean().item()
    size = off.abs()
    p99 = size.sort().values[math.ceil(0.99 * len(size)) - 1].item()
    values = (f"{size.mean().item():.2g}", f"{p99:.2g}", f"{kl:.2g}", f"{ess:.4f}")
    print_row(name, before, len(off), *values)


if __name__ == "__main__":
    main()
