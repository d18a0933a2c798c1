r"""Weight updates, beyond the bandwidth that ``bench weights`` measures.

* ``torchrl``: seconds of an update by the scheme that TorchRL itself has for SGLang, on
  two GPUs; compare with ``bench weights 7b`` in the same run.
* ``pause``: a client streams tokens through an update. The longest time between two of
  them, less the duration that the update reports, is what it costs beside its own time.
* ``delta``: bytes and seconds of changes over HTTP, against everything. The messages
  are made and loaded in this process, without a server, and take seconds of processor
  time, whatever else runs; a link's seconds are their bytes, in base64, over its rate.
  A share of random weights moves by one unit in the last place.

    python benchmarks/updates.py torchrl 7b [--repeats 3]
    python benchmarks/updates.py pause                            # CPU
    python benchmarks/updates.py pause 7b --device cuda           # two GPUs
    python benchmarks/updates.py pause 7b --device cuda --transport cuda_ipc \
        --pause-mode in_place                                     # one GPU
    python benchmarks/updates.py delta [--share 0.02] [--repeats 5]
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import statistics
import threading
import time
from collections.abc import Iterable, Iterator

import requests
import torch
from torch import nn
from torchrl.weight_update.llm import SGLangWeightSyncScheme as TorchRLScheme

from script import print_row, read_options
from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.backends.launch.loaders import torchrl_sglang_delta as loader
from torchrl_sglang.cli.bench.generation import exact_length
from torchrl_sglang.cli.bench.models import start_engine
from torchrl_sglang.cli.bench.timing import median_seconds
from torchrl_sglang.cli.bench.transfer import random_weights
from torchrl_sglang.weight_update.transports.delta import MESSAGE_BYTES
from torchrl_sglang.weight_update.transports.delta_messages import (
    DeltaWriter,
    all_of,
    bits_of,
    changes_of,
)
from torchrl_sglang.weight_update.weights import TensorSpec

TORCHRL_SETTINGS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""What TorchRL starts SGLang with, and sets in the trainer."""

TOKENS_BEFORE = 32
"""Tokens that come before an update begins."""

PROMPT = list(range(5, 69))
TOKENS = 4000
"""Most tokens of a stream: more than come before and during an update."""

GBITS = (1, 10)
ELEMENTS, TENSORS = 1 << 23, 8
"""Size and number of random tensors."""

Weights = dict[str, torch.Tensor]


def measure_torchrl(model: str, repeats: int) -> None:
    """Prints the seconds of an update by TorchRL's scheme."""
    options = {"base_gpu_id": 1, "enforce_eager": True, "gpu_memory_utilization": 0.6}
    options |= {"environment": TORCHRL_SETTINGS, "start_timeout": 400}
    with start_engine(model, device="cuda", **options) as engine:
        weights = random_weights(engine, "cuda:0")
        sender = TorchRLScheme(
            engine.server_url, master_address="127.0.0.1", num_gpus=1, device=0
        ).create_sender()
        sender.init_all_workers_group(engine.get_model_metadata())

        def update() -> None:
            sender.update_weights(weights)
            torch.cuda.synchronize()

        seconds = median_seconds(update, repeats)
    rate = sum(tensor.nbytes for tensor in weights.values()) / seconds / 1e9
    print(f"TorchRL's scheme: {seconds:.4f} s, {rate:.2f} GB/s")


class Stream:
    """A raw client that records when its tokens arrive, until it is stopped."""

    def __init__(self, url: str, tokens: int) -> None:
        self.times: list[float] = []
        self.begun = threading.Event()
        self.stop = threading.Event()
        self._url = url
        self._tokens = tokens
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {
            "input_ids": PROMPT,
            "sampling_params": exact_length(self._tokens),
            "stream": True,
        }
        with requests.post(
            f"{self._url}/generate", json=body, stream=True, timeout=600
        ) as response:
            for line in response.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                reason = json.loads(line[6:])["meta_info"]["finish_reason"] or {}
                if reason.get("type") == "abort":
                    raise SystemExit("This server ends streams for an update.")
                self.times.append(time.perf_counter())
                if len(self.times) == TOKENS_BEFORE:
                    self.begun.set()
                if self.stop.is_set():
                    return

    def longest_gap(self, since: float) -> float:
        """Waits for tokens after the update; returns the longest time between two."""
        count = len(self.times)
        while len(self.times) < count + TOKENS_BEFORE and self._thread.is_alive():
            time.sleep(0.01)
        self.stop.set()
        self._thread.join(60)
        first = max(i for i, moment in enumerate(self.times) if moment <= since)
        around = self.times[first:]
        return max(b - a for a, b in itertools.pairwise(around))


def measure_pause(arguments: argparse.Namespace, repeats: int) -> None:
    """Prints how long generation pauses for an update, beyond the update itself."""
    transport, mode = arguments.transport, arguments.pause_mode
    options = {}
    if arguments.device == "cuda":
        options = {"base_gpu_id": int(transport == "broadcast"), "start_timeout": 400}
        options |= {"mem_fraction_static": 0.6}
    with start_engine(arguments.model, device=arguments.device, **options) as engine:
        place = "cuda:0" if arguments.device == "cuda" else "cpu"
        weights = random_weights(engine, place)
        sender = SGLangWeightSyncScheme(
            engine, transport=transport, pause_mode=mode
        ).create_sender()
        sender.update_weights(weights)
        tokens = min(TOKENS, engine.capabilities.max_context - len(PROMPT) - 1)
        beyond, updates = [], []
        for _ in range(repeats):
            stream = Stream(engine.server_url, tokens)
            if not stream.begun.wait(120):
                raise SystemExit("No tokens came.")
            since = time.perf_counter()
            report = sender.update_weights(weights)
            beyond.append(stream.longest_gap(since) - report.seconds)
            updates.append(report.seconds)
        sender.shutdown()
    extra, worst = statistics.median(beyond), max(beyond)
    print(
        f"{mode}: an update of {statistics.median(updates):.3f} s stops generation for "
        f"{extra:+.3f} s beyond that (worst {worst:+.3f} s)."
    )


class Served(nn.Module):
    """Parameters that are loaded by name, as a server's are."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.held = nn.ParameterDict(
            {n: torch.zeros_like(w) for n, w in weights.items()}
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies weights into the parameters."""
        for name, value in weights:
            self.held[name].data.copy_(value)


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


def make_messages(
    weights: Weights, before: Weights, update: str, base: str
) -> list[bytes]:
    """Returns the messages of an update."""
    specs = tuple(
        TensorSpec(name=name, dtype=value.dtype, shape=value.shape)
        for name, value in weights.items()
    )
    writer = DeltaWriter(update=update, base=base, specs=specs)
    messages = []
    for number, (name, value) in enumerate(weights.items()):
        bits = bits_of(value.reshape(-1))
        length = MESSAGE_BYTES // bits.element_size()
        for begin in range(0, len(bits), length):
            piece = bits[begin : begin + length]
            if base:
                old = bits_of(before[name].reshape(-1))[begin : begin + length]
                part, _ = changes_of(number, begin, piece, old)
            else:
                part = all_of(number, begin, piece)
            if part is None:
                continue
            if writer.num_bytes + part.num_bytes > MESSAGE_BYTES:
                messages.append(writer.message())
            writer.add(part)
    messages.append(writer.message(last=True))
    return messages


def measure_delta(share: float, repeats: int) -> None:
    """Prints bytes and seconds of everything, and of changes."""
    torch.manual_seed(0)
    links = [f"s, {rate} Gbit/s" for rate in GBITS]
    names = ("MB", "MB sent", "CPU s made", "CPU s loaded", *links)
    print_row("", *names, width=13)
    served: Served | None = None
    before: Weights = {}
    token = ""
    for number, weights in enumerate(random_steps(share, repeats)):
        served = served or Served(weights)
        update = secrets.token_hex(12)
        start = time.process_time()
        messages = make_messages(weights, before, update, token)
        made = time.process_time() - start
        start = time.process_time()
        for message in messages:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            loader.load(served, [(loader.PAYLOAD, content)])
        loaded = time.process_time() - start
        assert loader.state_of(served).token == update
        for name, value in weights.items():
            assert torch.equal(bits_of(served.held[name].data), bits_of(value)), name
        before = {name: value.clone() for name, value in weights.items()}
        token = update
        size = sum(value.nbytes for value in weights.values())
        sent = sum(map(len, messages)) * 4 / 3
        megabytes = (round(each / 1e6, 2) for each in (size, sent))
        seconds = [sent * 8 / rate / 1e9 for rate in GBITS]
        name = "changes" if number else "everything"
        print_row(name, *megabytes, made, loaded, *seconds, width=13)


def main() -> None:
    arguments = read_options(
        __doc__,
        measurement="torchrl|pause|delta",
        model="35m",
        device="cpu|cuda",
        transport="broadcast|cuda_ipc",
        pause_mode="continue|in_place",
        share=0.02,
        repeats=int,
    )
    if arguments.measurement == "torchrl":
        measure_torchrl(arguments.model, arguments.repeats or 3)
    elif arguments.measurement == "pause":
        measure_pause(arguments, arguments.repeats or 5)
    else:
        measure_delta(arguments.share, arguments.repeats or 5)


if __name__ == "__main__":
    main()
