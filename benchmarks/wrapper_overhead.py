"""Python time of SGLangWrapper for one sample, with an engine that responds instantly.

What is measured is everything between a TensorDict and the engine's ``generate`` and
back: templates, tokenization, containers. The tokenizer's own time, measured in the
same run, is shown beside it. A second table shows how the time grows with the length
of the responses.

    python benchmarks/wrapper_overhead.py [--batch-size 256] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens
from transformers import AutoTokenizer

from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.testing.tiny_model import save_tiny_model
from torchrl_sglang.types import Completion, ServerCapabilities

RESPONSE_TOKENS = 128
LENGTHS = (128, 512, 2048, 8192)
PROMPT_CHARACTERS = 96


class InstantEngine(AsyncSGLang):
    """An engine whose responses are known before they are requested."""

    def __init__(self, path: str, tokenizer: Any, length: int) -> None:
        super().__init__(
            Fleet(replicas=[Replica(url="http://127.0.0.1:1")], weight_version="0"),
            ServerCapabilities(
                version="none",
                model_path=path,
                tokenizer_path=path,
                vocab_size=len(tokenizer),
                max_context=2048,
                max_prompt=2047,
                dtype=torch.float32,
                tp_size=1,
                pp_size=1,
                dp_size=1,
                needs_update_session=False,
                load_route="/v1/loads",
                has_tokenizer=True,
                has_grammar=False,
                weight_version="0",
            ),
        )
        self._tokenizer = tokenizer
        self.response_tokens = length

    def generate_requests(
        self, requests: Sequence[Any], **options: Any
    ) -> list[Completion]:
        """Returns responses of slightly different lengths."""
        return [
            Completion(
                token_ids=[5] * (self.response_tokens - index % 16),
                log_probs=[-1.0] * (self.response_tokens - index % 16),
                finish_reason="length",
            )
            for index, _ in enumerate(requests)
        ]

    async def agenerate_requests(
        self, requests: Sequence[Any], **options: Any
    ) -> list[Completion]:
        """The same, for a collector."""
        return self.generate_requests(requests)


def make_input(mode: str, size: int, tokenizer: Any) -> TensorDict:
    texts = ["x" * (PROMPT_CHARACTERS - index % 32) for index in range(size)]
    if mode == "history":
        chats = History.from_chats([[{"role": "user", "content": t}] for t in texts])
        return TensorDict(history=ChatHistory(prompt=chats), batch_size=(size,))
    if mode == "text":
        return TensorDict(
            text=Text(prompt=texts, batch_size=(size,)), batch_size=(size,)
        )
    return lazy_stack(
        [
            TensorDict(tokens=Tokens(prompt=torch.tensor(tokenizer.encode(text))))
            for text in texts
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    size = arguments.batch_size
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_model(folder))
        tokenizer = AutoTokenizer.from_pretrained(path)
    print(f"batch of {size}, {RESPONSE_TOKENS} response tokens, milliseconds a sample")
    print(f"{'mode':8} {'padded':6} {'wrapper':>8} {'of which the tokenizer':>24}")
    for mode in ("history", "text", "tokens"):
        for pad_output in (False, True):
            engine = InstantEngine(path, tokenizer, RESPONSE_TOKENS)
            total, tokenizing = measure(
                engine, mode, size, arguments.repeats, pad_output=pad_output
            )
            print(f"{mode:8} {pad_output!s:6} {total:8.3f} {tokenizing:24.3f}")
    print(f"\nragged, by response length\n{'mode':8}", *(f"{n:>8}" for n in LENGTHS))
    for mode in ("history", "text", "tokens"):
        row = []
        for length in LENGTHS:
            engine = InstantEngine(path, tokenizer, length)
            row.append(measure(engine, mode, size, arguments.repeats)[0])
        print(f"{mode:8}", *(f"{total:8.3f}" for total in row))


def measure(
    engine: InstantEngine,
    mode: str,
    size: int,
    repeats: int,
    *,
    pad_output: bool = False,
) -> tuple[float, float]:
    """Returns milliseconds a sample: the wrapper's, and the tokenizer's alone."""
    tokenizer = engine.get_tokenizer()
    wrapper = SGLangWrapper(
        engine, tokenizer=tokenizer, input_mode=mode, pad_output=pad_output
    )
    total, tokenizing = [], []
    for _ in range(repeats + 1):
        td = make_input(mode, size, tokenizer)
        start = time.perf_counter()
        wrapper(td)
        total.append(time.perf_counter() - start)
        tokenizing.append(measure_tokenizer(mode, size, engine))
    # The first run warms up.
    both = (statistics.median(total[1:]), statistics.median(tokenizing[1:]))
    return 1e3 * both[0] / size, 1e3 * both[1] / size


def measure_tokenizer(mode: str, size: int, engine: InstantEngine) -> float:
    """Returns the seconds that the tokenizer's own calls take for such a batch."""
    if mode == "tokens":
        return 0.0
    tokenizer = engine.get_tokenizer()
    texts = ["x" * PROMPT_CHARACTERS] * size
    responses = [[5] * engine.response_tokens] * size
    chats = [[{"role": "user", "content": text}] for text in texts]
    start = time.perf_counter()
    if mode == "history":
        texts = tokenizer.apply_chat_template(
            chats, tokenize=False, add_generation_prompt=True
        )
    tokenizer(texts)
    tokenizer.batch_decode(responses, skip_special_tokens=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
