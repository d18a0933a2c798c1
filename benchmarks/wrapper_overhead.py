"""Python time of SGLangWrapper for one sample, with an engine that responds instantly.

What is measured is everything between a TensorDict and the engine's ``generate`` and
back: templates, tokenization, containers. Beside it is the time of the tokenizer's own
calls. A second table shows how the time grows with the length of the responses.

    python benchmarks/wrapper_overhead.py [--batch-size 256] [--repeats 5]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from script import print_row, read_options
from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.cli.bench.measure import median_seconds
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer, save_tiny_model
from torchrl_sglang.types import Completion, ServerCapabilities

RESPONSE_TOKENS = 128
MODES = ("history", "text", "tokens")
LENGTHS = (128, 512, 2048, 8192)
PROMPT_CHARACTERS = 96


class InstantEngine(AsyncSGLang):
    """An engine whose responses are known before they are requested."""

    def __init__(self, length: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = str(save_tiny_model(self._folder.name))
        super().__init__(
            Fleet(replicas=[Replica(url="http://127.0.0.1:1")], weight_version="0"),
            ServerCapabilities(
                version="none",
                model_path=path,
                tokenizer_path=path,
                vocab_size=len(make_tiny_tokenizer()),
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
    arguments = read_options(__doc__, batch_size=256, repeats=5)
    size, repeats = arguments.batch_size, arguments.repeats
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    engine = InstantEngine(RESPONSE_TOKENS)
    print(f"batch of {size}, {RESPONSE_TOKENS} response tokens, milliseconds a sample")
    print_row("mode", "ragged", "padded", "tokenizer")
    for mode in MODES:
        ragged = measure(engine, mode, size, repeats)
        padded = measure(engine, mode, size, repeats, pad_output=True)
        texts = measure_tokenizer(engine, mode, size, repeats)
        print_row(mode, ragged, padded, texts)
    print_row("\nragged, by length", *LENGTHS)
    for mode in MODES:
        row = []
        for engine.response_tokens in LENGTHS:
            row.append(measure(engine, mode, size, repeats))
        print_row(mode, *row)


def measure(
    engine: InstantEngine,
    mode: str,
    size: int,
    repeats: int,
    *,
    pad_output: bool = False,
) -> float:
    """Returns the wrapper's milliseconds a sample."""
    wrapper = SGLangWrapper(engine, input_mode=mode, pad_output=pad_output)
    tokenizer = engine.get_tokenizer()
    inputs = iter([make_input(mode, size, tokenizer) for _ in range(repeats + 1)])
    return 1e3 * median_seconds(lambda: wrapper(next(inputs)), repeats) / size


def measure_tokenizer(
    engine: InstantEngine, mode: str, size: int, repeats: int
) -> float:
    """Returns the milliseconds a sample of the tokenizer's own calls."""
    if mode == "tokens":
        return 0.0
    tokenizer = engine.get_tokenizer()
    responses = [[5] * engine.response_tokens] * size
    chats = [[{"role": "user", "content": "x" * PROMPT_CHARACTERS}]] * size

    def run() -> None:
        texts = ["x" * PROMPT_CHARACTERS] * size
        if mode == "history":
            texts = tokenizer.apply_chat_template(
                chats, tokenize=False, add_generation_prompt=True
            )
        tokenizer(texts)
        tokenizer.batch_decode(responses, skip_special_tokens=False)

    return 1e3 * median_seconds(run, repeats) / size


if __name__ == "__main__":
    main()
