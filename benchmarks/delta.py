"""Bytes and seconds of changes over HTTP, against everything.

The messages are made and loaded in this process, without a server, and take seconds of
processor time, whatever else runs; a link's seconds are
their bytes, in base64, over its rate. With the folder of a model, its weights are
trained in bfloat16 by steps of AdamW, on random tokens; otherwise a share of random
weights moves by one unit in the last place.

    python benchmarks/delta.py [FOLDER] [--steps 5] [--rate 1e-6] [--share 0.02]
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from script import print_row, read_options
from torchrl_sglang.backends.launch.loaders import torchrl_sglang_delta as loader
from torchrl_sglang.weight_update.transports.delta import MESSAGE_BYTES
from torchrl_sglang.weight_update.transports.delta_messages import (
    DeltaWriter,
    all_of,
    bits_of,
    changes_of,
)
from torchrl_sglang.weight_update.weights import TensorSpec

GBITS = (1, 10)
ELEMENTS, TENSORS = 1 << 23, 8
"""Size and number of random tensors."""
TOKENS = (2, 64)
"""Sequences and tokens of a step."""

Weights = dict[str, torch.Tensor]


class Served(nn.Module):
    """Parameters that are loaded by name, as a server's are."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.held = nn.ParameterDict(
            {n.replace(".", "/"): torch.zeros_like(w) for n, w in weights.items()}
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies weights into the parameters."""
        for name, value in weights:
            self.held[name.replace(".", "/")].data.copy_(value)


def random_steps(share: float, steps: int) -> Iterator[Weights]:
    """Yields weights of which a share has changed by one unit in the last place."""
    weights = {
        f"w{i}": (0.02 * torch.randn(ELEMENTS)).bfloat16() for i in range(TENSORS)
    }
    yield weights
    for _ in range(steps):
        for value in weights.values():
            chosen = torch.rand(len(value)) < share
            move = torch.randint(0, 2, (int(chosen.sum()),), dtype=torch.int16)
            value.view(torch.int16)[chosen] += 2 * move - 1
        yield weights


def trained_steps(folder: str, rate: float, steps: int) -> Iterator[Weights]:
    """Yields a model's weights before and after each step of AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    yield weights
    for _ in range(steps):
        ids = torch.randint(0, model.config.vocab_size, TOKENS)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield weights


def main() -> None:
    options = read_options(__doc__, model="", steps=5, rate=1e-6, share=0.02)
    torch.manual_seed(0)
    if options.model:
        sources = trained_steps(options.model, options.rate, options.steps)
    else:
        sources = random_steps(options.share, options.steps)
    columns = [f"s, {rate} Gbit/s" for rate in GBITS]
    print_row(
        "", "changed", "MB", "MB sent", "CPU s made", "CPU s loaded", *columns, width=13
    )
    served: Served | None = None
    before: Weights = {}
    token = ""
    for number, weights in enumerate(sources):
        served = served or Served(weights)
        update = secrets.token_hex(12)
        start = time.process_time()
        messages, changed = make_messages(weights, before, update, token)
        made = time.process_time() - start
        start = time.process_time()
        for message in messages:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            loader.load(served, [(loader.PAYLOAD, content)])
        loaded = time.process_time() - start
        assert loader.state_of(served).token == update
        for name, value in weights.items():
            there = served.held[name.replace(".", "/")].data
            assert torch.equal(bits_of(there.view(-1)), bits_of(value.view(-1))), name
        before = {name: value.clone() for name, value in weights.items()}
        token = update
        size = sum(value.nbytes for value in weights.values())
        share = changed / sum(value.numel() for value in weights.values())
        sent = sum(map(len, messages)) * 4 / 3
        links = [sent * 8 / rate / 1e9 for rate in GBITS]
        print_row(
            "changes" if number else "everything",
            f"{share:.2%}" if number else "",
            *(round(each / 1e6, 2) for each in (size, sent)),
            made,
            loaded,
            *links,
            width=13,
        )


def make_messages(
    weights: Weights, before: Weights, update: str, base: str
) -> tuple[list[bytes], int]:
    """Returns the messages of an update, and how many elements have changed."""
    specs = tuple(
        TensorSpec(name=name, dtype=value.dtype, shape=value.shape)
        for name, value in weights.items()
    )
    writer = DeltaWriter(update=update, base=base, specs=specs)
    messages, changed = [], 0
    for number, (name, value) in enumerate(weights.items()):
        bits = bits_of(value.reshape(-1))
        length = MESSAGE_BYTES // bits.element_size()
        for begin in range(0, len(bits), length):
            piece = bits[begin : begin + length]
            if base:
                old = bits_of(before[name].reshape(-1))[begin : begin + length]
                part, places = changes_of(number, begin, piece, old)
                changed += len(places)
            else:
                part = all_of(number, begin, piece)
            if part is None:
                continue
            if writer.num_bytes + part.num_bytes > MESSAGE_BYTES:
                messages.append(writer.message())
            writer.add(part)
    messages.append(writer.message(last=True))
    return messages, changed


if __name__ == "__main__":
    main()
